"""A copy that a rotation overtook while it was made is named for nobody, a second one or a moved one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.pool.counters import MissCause
from agent.pool.format.directory import DIRECTORY_BYTES, Directory, Entry, flags_of, is_under_dropped
from agent.pool.maintenance import replication
from agent.pool.maintenance.migrate import Migration, Outcome
from agent.pool.maintenance.replication import Kept, keep_two
from agent.pool.map.document import VolumeWish, plan_pool
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.key_transition import QUIET_SECONDS, SETTLE_SECONDS
from tests.support.pool.memory_channel import MemoryNamespace
from tests.support.pool.memory_pool import key_of, nguid_of
from tests.unit.agent.tenants.test_key_rotation import ROOT, SIZE, STEP, Shelf, value_of
from tests.unit.agent.tenants.test_rotation_ends import Watching, publish
from tests.unit.pool.test_joining import Joined, _volume, one_misplaced


class TwoCopies(Shelf):
    """Flash of two namespaces with a volume that keeps two copies."""

    def __init__(self, state: Path) -> None:
        wish = VolumeWish(
            name="v", value_bytes=1 << 18, unit_bytes=1 << 16, share=1.0, tenant="blue", copies=2
        )
        self.state = state
        self.pool_map = plan_pool([(nguid_of(number), SIZE) for number in range(2)], [wish], ROOT)
        self.namespaces = [MemoryNamespace(SIZE) for _ in range(2)]

    def served_with_one_away(self, number: int) -> list[bool]:
        served = []
        for away in self.namespaces:
            away.down = True
            served.append(Watching(self).get(number) == value_of(number))
            away.down = False
        return served

    def rotate_by(self, other: Watching) -> None:
        """A whole rotation, by another agent and the verb."""
        publish(self, self.rotate())
        other.pass_time(30)
        assert other.left() == 0
        other.pass_time(QUIET_SECONDS)
        assert other.left() == 0
        publish(self, self.end())
        other.pass_time(2)


@pytest.fixture
def shelf(tmp_path: Path) -> TwoCopies:
    shelf = TwoCopies(tmp_path)
    publish(shelf, shelf.pool_map)
    return shelf


def keep(agent: Watching, number: int) -> Kept:
    pseudonym = agent.volume.placement.pseudonym(key_of(number))
    return agent.channel.run(keep_two(agent.volume, agent.channel, pseudonym))


def stop_before(monkeypatch: pytest.MonkeyPatch, name: str, meanwhile: Callable[[], None]) -> None:
    """Whoever comes to this step is stopped there once, for as long as `meanwhile` takes."""
    original = getattr(replication, name)

    def stopped(*arguments: Any) -> Steps[Any]:
        monkeypatch.setattr(replication, name, original)
        meanwhile()
        return (yield from original(*arguments))

    monkeypatch.setattr(replication, name, stopped)


@pytest.mark.interpreted
@pytest.mark.parametrize("step", ["_copy_over", "_name", "_is_still_wanted"])
def test_who_is_stopped_while_a_second_copy_is_made_names_none_under_a_key_that_is_gone(
    shelf: TwoCopies, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    stopped, other = Watching(shelf), Watching(shelf)
    stopped.put(1)
    stopped.pass_time(2)

    def meanwhile() -> None:
        shelf.rotate_by(other)
        stopped.channel.clock += QUIET_SECONDS

    stop_before(monkeypatch, step, meanwhile)
    kept = keep(stopped, 1)
    if step == "_is_still_wanted":
        # Named before the rotation, it was sealed anew by the other like any value.
        assert kept in (Kept.ONE, Kept.NONE)
    else:
        assert kept is Kept.ONE
    stopped.pass_time(2)
    assert len(shelf.fingerprints()) == 1
    assert all(shelf.fingerprints() == {agent.volume.codec.fingerprint} for agent in (stopped, other))
    assert keep(Watching(shelf), 1) is Kept.TWO
    assert shelf.served_with_one_away(1) == [True, True]


@pytest.mark.interpreted
def test_a_copy_under_a_key_that_is_gone_is_no_copy_and_another_is_made(
    shelf: TwoCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, other = Watching(shelf), Watching(shelf)
    killed.put(1)
    killed.pass_time(2)

    def no_look(*_: Any) -> Steps[bool]:
        yield from ()
        return True

    stop_before(monkeypatch, "_name", lambda: shelf.rotate_by(other))
    with monkeypatch.context() as ended_there:
        ended_there.setattr(replication, "_is_still_wanted", no_look)
        keep(killed, 1)
    assert shelf.served_with_one_away(1).count(True) == 1
    for _ in range(2):
        assert keep(Watching(shelf), 1) is Kept.TWO
    assert shelf.served_with_one_away(1) == [True, True]
    assert len(shelf.fingerprints()) == 1


def test_an_agent_that_is_behind_takes_no_newer_copy_for_a_dead_one(shelf: TwoCopies) -> None:
    behind, ahead = Watching(shelf), Watching(shelf)
    behind.put(1)
    assert keep(behind, 1) is Kept.TWO
    publish(shelf, shelf.rotate())
    ahead.pass_time(2 + SETTLE_SECONDS + 10)
    assert ahead.left() == 0
    assert keep(behind, 1) is Kept.TWO
    assert shelf.served_with_one_away(1) == [True, True]
    behind.pass_time(2 + STEP)
    assert keep(behind, 1) is Kept.TWO


def test_which_epochs_are_gone() -> None:
    def gone(epoch: int, oldest: int) -> bool:
        return is_under_dropped(Entry(bytes(16), 1, 1, 1, flags=flags_of(epoch) | 0x81), oldest)

    assert [gone(epoch, 5) for epoch in (3, 4, 5, 6, 7)] == [True, True, False, False, False]
    assert [gone(epoch, 256) for epoch in (254, 255, 256, 257)] == [True, True, False, False]
    assert not gone(0, 0)


def test_what_is_moved_under_a_key_that_is_gone_stays_where_it_was() -> None:
    joined = Joined()
    joined.fill(80)
    agent, volume, channel = _volume(joined)
    key, old = one_misplaced(joined, agent)
    answers: list[MissCause | None] = [MissCause.WRONG_KEY, MissCause.LATE, None]

    def ask(channel: IoChannel, namespace: int, deadline: float) -> Steps[MissCause | None]:
        yield from ()
        return answers[0]

    volume.map_age.watch(ask)
    before = _named(joined)
    while answers[0] is not None:
        assert channel.run(Migration(volume, channel, old, agent.deadline()).copy()) is Outcome.TROUBLE
        assert _named(joined) == before, "it is named where it was, and there alone"
        assert agent.get(key) == joined.values[key]
        del answers[0]
    assert not any(cached.reserved or cached.writer.locked() for cached in agent.cache.snapshot())
    assert channel.run(Migration(volume, channel, old, agent.deadline()).copy()) is Outcome.COPIED
    assert len(_named(joined)) == len(before) + 1


def _named(joined: Joined) -> list[tuple[int, int, int, bytes]]:
    """Namespace, directory, slot and pseudonym of all that flash names."""
    found = []
    for extent in joined.after.extents:
        for number in range(extent.sets):
            at = extent.offset + number * joined.after.set_bytes
            block = joined.pool.namespaces[extent.namespace].blocks.get(at, bytes(DIRECTORY_BYTES))
            found += [(extent.namespace, at, slot, entry.pseudonym) for slot, entry in Directory(block)]
    return found
