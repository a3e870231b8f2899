"""The age of what an agent knows of the pool map, where its machine sleeps meanwhile: its clock stands still,
those of the others go on."""

from __future__ import annotations

from typing import cast

import pytest

from agent.pool.counters import MissCause
from agent.pool.format.sealed_slot import SlotCodec
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume import key_transition
from agent.pool.volume.key_transition import GRACE_SECONDS, MAP_AGE_SECONDS, KeyTransition, MapAge
from tests.support.pool.memory_channel import MemoryChannel


class Machine:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept = 7000.0
        monkeypatch.setattr(key_transition, "slept_seconds", lambda: self.slept)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def no_ask(channel: IoChannel, namespace: int, deadline: float) -> Steps[MissCause | None]:
    yield from ()
    return None


def watched() -> MapAge:
    age = MapAge()
    age.watch(no_ask)
    return age


@pytest.mark.interpreted
def test_what_was_looked_at_before_a_sleep_is_not_fresh_after_it(machine: Machine) -> None:
    age = watched()
    assert not age.is_fresh(100.0)
    age.note(100.0)
    assert age.is_fresh(100.0 + MAP_AGE_SECONDS)
    machine.slept += 0.1
    assert age.is_fresh(100.0 + MAP_AGE_SECONDS), "two clocks are never read at once"
    machine.slept += 3600
    assert not age.is_fresh(100.1)
    age.note(100.1)
    assert age.is_fresh(100.2)


@pytest.mark.interpreted
def test_a_look_that_the_machine_slept_through_is_as_old_as_its_beginning(machine: Machine) -> None:
    age, channel = watched(), MemoryChannel([])

    def sleeps(channel: IoChannel, namespace: int, deadline: float) -> Steps[MissCause | None]:
        yield from ()
        machine.slept += 60
        return None

    age.watch(sleeps)
    assert channel.run(age.refresh(channel, 0, channel.now() + 1)) is None
    assert not age.is_fresh(channel.now())


@pytest.mark.interpreted
def test_the_time_to_seal_with_a_new_key_comes_while_the_machine_sleeps(machine: Machine) -> None:
    turn = KeyTransition(cast(SlotCodec, None), 50.0)
    assert not turn.is_due(49.0)
    assert turn.is_due(50.0)
    assert not turn.is_due(50.0, GRACE_SECONDS)
    machine.slept += 3.0
    assert turn.is_due(47.0)
    assert turn.is_due(48.0, GRACE_SECONDS)


def test_a_machine_that_is_awake_has_slept_no_more_than_before() -> None:
    before = key_transition.slept_seconds()
    assert key_transition.slept_since(before) == 0.0
    assert key_transition.slept_since(before - 5) == pytest.approx(5, abs=0.2)
