"""What a place does not do is told until it does it, and holds up no other volume."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from agent.config.spill_section import SpillSection
from agent.spill.names import bundle_name, volume_prefix
from agent.spill.target import TargetError
from agent.spill.tier import LOG_SECONDS, SpillPlace
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of, volume_settings
from tests.support.pool.spill_pool import POOL_ID, MemoryTarget

SLOTS = 64
NAMES = ("first", "second")


class NoDeletes(MemoryTarget):
    """Credentials that may store and list."""

    def delete(self, name: str) -> None:
        raise TargetError("403 for a delete")


class TwoVolumes:
    """Two volumes with one place in G4, each of one set; a turn of its thread is a step of a loop."""

    def __init__(self, target: MemoryTarget, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agent.spill.tier.target_of", lambda section: target)
        namespaces = MemoryPool((1, 1)).namespaces
        self.agents = [
            PoolAgent(
                namespaces,
                replace(
                    volume_settings((number == 0, number == 1), volume_id=bytes((number,)) * 16), name=name
                ),
            )
            for number, name in enumerate(NAMES)
        ]
        section = SpillSection.model_validate({"folder": "/g4", "max_bytes": "1G", "values": "all"})
        volumes = [agent.volume for agent in self.agents]
        channel = self.agents[0].channel
        self.place = SpillPlace(section, POOL_ID, volumes, {}, lambda: channel)  # type: ignore[arg-type, return-value]
        self._monkeypatch = monkeypatch
        self._next_key = 0

    def evict(self, number: int) -> None:
        """Put into a volume what takes all its slots and one more."""
        for _ in range(SLOTS + 1):
            self._next_key += 1
            self.agents[number].channel.clock += 0.01
            self.agents[number].put(key_of(self._next_key), bytes(10_000))

    def work(self, until: Callable[[], bool]) -> None:
        """Turns of the thread until something holds, for two minutes of its own time at the most."""
        waited = 0.0
        self.place.stopping.clear()

        def wait(seconds: float) -> bool:
            nonlocal waited
            waited += max(0.001, seconds)
            for agent in self.agents:
                agent.channel.clock += max(0.001, seconds)
            if until() or waited > 120.0:
                self.place.stopping.set()
            return False

        self._monkeypatch.setattr(self.place.stopping, "wait", wait)
        self.place._work()
        assert until()

    @property
    def error(self) -> str:
        return str(self.place.snapshot()["error"])

    def bundles(self, number: int) -> int:
        return int(self.place.snapshot()["volumes"][NAMES[number]]["bundles"])


@pytest.mark.expects_log("no room on it")
def test_a_bundle_that_is_dropped_is_told_of_until_one_is_stored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = MemoryTarget()
    two = TwoVolumes(target, monkeypatch)
    stores = target.put

    def full(name: str, data: memoryview) -> None:
        raise TargetError("no room on it")

    monkeypatch.setattr(target, "put", full)
    two.evict(0)
    with caplog.at_level(logging.WARNING):
        two.work(lambda: bool(two.error))
        two.evict(0)
        two.work(lambda: two.place.snapshot()["volumes"]["first"]["bundles_dropped"] >= 2)
    assert two.error == "no room on it"
    assert len(caplog.messages) == 1, "the same error is logged once"
    assert "no room on it" in caplog.messages[0]
    monkeypatch.setattr(target, "put", stores)
    two.evict(0)
    two.work(lambda: two.bundles(0) > 0)
    assert two.error == ""


@pytest.mark.expects_log("403 for a delete")
def test_a_volume_whose_bundles_may_not_be_deleted_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = NoDeletes()
    two = TwoVolumes(target, monkeypatch)
    erased = two.agents[0].volume
    target.objects[bundle_name(POOL_ID, erased.settings.volume_id, 1)] = bytes(100)
    erased.change(erased=True)
    two.evict(1)
    two.work(lambda: two.bundles(1) > 0 and bool(two.error))
    assert two.error == "403 for a delete"
    assert list(target.names(volume_prefix(POOL_ID, erased.settings.volume_id)))
    monkeypatch.setattr(target, "delete", lambda name: MemoryTarget.delete(target, name))
    two.work(lambda: not two.error)
    assert not list(target.names(volume_prefix(POOL_ID, erased.settings.volume_id)))
    assert list(target.names(volume_prefix(POOL_ID, two.agents[1].volume.settings.volume_id)))


@pytest.mark.expects_log("it is not there")
def test_marks_of_every_volume_are_looked_at_while_the_place_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mark that another agent brought back goes, whichever volume's it is (docs/tiers.md)."""
    target = MemoryTarget()
    two = TwoVolumes(target, monkeypatch)
    target.refusal = TargetError("it is not there")
    looked: list[str] = []
    for agent, name in zip(two.agents, NAMES, strict=True):

        def next_due(now: float, name: str = name) -> None:
            looked.append(name)

        monkeypatch.setattr(agent.volume.removed_marks, "next_due", next_due)
    two.work(lambda: len(looked) >= 8)
    assert looked.count("second") >= 3


@pytest.mark.expects_log("full")
def test_an_error_that_comes_back_is_logged_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = TwoVolumes(MemoryTarget(), monkeypatch).place
    with caplog.at_level(logging.WARNING, "agent.spill.tier"):
        for at, error in enumerate(("full", "full", "", "full")):
            place._error = error
            place._tell(1000.0 + at * LOG_SECONDS)
    assert [("full" in each) for each in caplog.messages] == [True, True]
