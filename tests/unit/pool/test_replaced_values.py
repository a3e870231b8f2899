"""Values that change: `replace` and `newest`, on one agent and on several."""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest

from agent.fs.interface import FsError
from agent.inline.scatter import Buffer
from agent.pool.access import serve
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused, TooLong
from agent.pool.format.directory import Directory
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.maintenance.migrate import Migration, Outcome
from agent.pool.mutable.replace import GENERATION_MAX
from agent.pool.steps import Steps
from agent.pool.volume.quota import Limits, Measured, Quota
from agent.pool.volume.volume import TenantShare
from agent.pool.write.put import PUT_FRESH_SECONDS
from tests.support.pool.memory_channel import MemoryPending
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of
from tests.support.sim.stepped_programs import Program, SteppedChannel
from tests.unit.pool.test_costs import Timed
from tests.unit.pool.test_joining import Joined, one_misplaced

KEY: Final = key_of(1)


def replace(agent: PoolAgent, value: bytes, key: bytes = KEY) -> None:
    agent.channel.run(agent.served.replace(agent.channel, key, value, agent.deadline()))


def replace_after(agent: PoolAgent, value: bytes, first: Callable[[], None], key: bytes = KEY) -> None:
    """`first` runs beside the reads of the directories."""

    def steps() -> Steps[None]:
        yield from ()
        first()

    agent.channel.run(agent.served.replace(agent.channel, key, value, agent.deadline(), steps()))


def newest(agent: PoolAgent, key: bytes = KEY, seconds: float = 0.05) -> bytes | MissCause:
    return agent.channel.run(agent.served.newest(agent.channel, key, agent.deadline(seconds)))


def named(pool: MemoryPool, agent: PoolAgent, key: bytes = KEY) -> list[tuple[int, int, int, Directory]]:
    """Where flash names a key: namespace, offset of the directory, slot, and the directory."""
    pseudonym = agent.volume.placement.pseudonym(key)
    return [
        (namespace, offset, slot, directory)
        for namespace, offset, directory in pool.directories()
        for slot in directory.find_all(pseudonym)
    ]


def slot_at(pool: MemoryPool, offset: int, slot: int) -> int:
    return offset + 4096 + slot * pool.settings.slot_bytes


@pytest.mark.parametrize("suite", ["aes-256-gcm", "aes-256-xts+crc64", "plain+crc64"])
def test_a_value_is_replaced_and_every_agent_has_the_newest(suite: str) -> None:
    pool = MemoryPool((2, 2), suite=suite)
    one, other = pool.agent(), pool.agent()
    assert newest(one) is MissCause.NEVER_STORED
    for number in range(5):
        value = bytes([number + 1]) * (number * 3000 + 1)
        replace((one, other)[number % 2], value)
        assert newest(one) == newest(other) == value
        assert len(named(pool, one)) == 1
    assert one.get(KEY) == newest(one), "a plain get finds it, too"
    assert one.delete(KEY)
    assert newest(other) is MissCause.NEVER_STORED


def test_what_another_agent_stored_while_the_first_steps_took_long_stays() -> None:
    """A file's chunks are named by them, and may wait for another put."""
    pool = MemoryPool((1,))
    one, other = pool.agent(), pool.agent()
    replace(other, b"first")

    def long() -> None:
        one.channel.clock += PUT_FRESH_SECONDS + 0.001
        replace(other, b"second")
        replace(other, b"new", key_of(2))

    replace_after(one, b"one", long, key_of(3))
    for agent in (one, other, pool.agent()):
        assert newest(agent) == b"second"
        assert newest(agent, key_of(2)) == b"new"
        assert newest(agent, key_of(3)) == b"one"


def test_a_value_longer_than_a_unit_or_a_slot_and_an_empty_one_are_refused() -> None:
    agent = MemoryPool((1,), value_bytes=1 << 18).agent()
    replace(agent, bytes(1 << 16))
    for length in (0, (1 << 16) + 1, (1 << 18) + 1):
        with pytest.raises(TooLong):
            replace(agent, bytes(length))
    short = MemoryPool((1,)).agent()
    with pytest.raises(TooLong):
        replace(short, bytes(16385))


def test_the_older_slot_does_not_open_any_more() -> None:
    pool = MemoryPool((2, 2))
    one, stale = pool.agent(), pool.agent()
    replace(one, b"old")
    assert newest(stale) == b"old"
    ((namespace, offset, slot, before),) = named(pool, one)
    replace(one, b"new")
    zeros = pool.slot_bytes(namespace, slot_at(pool, offset, slot), 1)[:HEADER_BYTES]
    assert zeros == bytes(HEADER_BYTES)
    # The directory of an agent that has not looked since goes over ours.
    pool.namespaces[namespace].store(offset, [before.image()])
    assert newest(pool.agent()) in (MissCause.EVICTED, b"new")
    assert stale.get(KEY) in (MissCause.EVICTED, b"new")


def test_the_entry_stays_in_its_set_and_one_directory_is_written() -> None:
    pool = MemoryPool((2, 2))
    agent = pool.agent()
    replace(agent, b"old")
    ((namespace, offset, slot, _),) = named(pool, agent)
    before = [each.writes for each in pool.namespaces]
    replace(agent, b"new")
    ((now_at, now_in, new_slot, _),) = named(pool, agent)
    assert (now_at, now_in) == (namespace, offset)
    assert new_slot != slot
    after = [each.writes for each in pool.namespaces]
    assert after[namespace] - before[namespace] == 3, "slot, directory, the older header"
    assert sum(after) - sum(before) == 3


def test_a_value_in_both_sets_is_taken_out_of_both() -> None:
    pool = MemoryPool((1, 1))
    agents = [pool.agent(), pool.agent()]
    for number, agent in enumerate(agents):
        pool.namespaces[1 - number].down = True
        agent.channel.clock += number
        agent.put(KEY, b"of agent %d" % number)
        pool.namespaces[1 - number].down = False
    assert len(named(pool, agents[0])) == 2
    assert newest(pool.agent()) == b"of agent 1"
    replace(agents[0], b"the one")
    assert len(named(pool, agents[0])) == 1
    assert newest(pool.agent()) == newest(agents[1]) == b"the one"


@pytest.mark.parametrize("behind", [0.0, 3600.0])
def test_the_newest_counts_although_a_clock_is_behind(behind: float) -> None:
    pool = MemoryPool((1, 1))
    ahead, late = pool.agent(), pool.agent()
    late.channel.epoch -= behind
    replace(ahead, b"first")
    ((_, _, slot, directory),) = named(pool, ahead)
    first = directory.entry(slot)
    replace(late, b"second")
    ((_, _, slot, directory),) = named(pool, ahead)
    second = directory.entry(slot)
    assert first is not None
    assert second is not None
    assert second.generation > first.generation
    assert newest(ahead) == b"second"


@pytest.mark.parametrize("generation", [GENERATION_MAX, (1 << 64) - 1])
def test_a_generation_of_nobodys_clock_neither_counts_nor_stays(generation: int) -> None:
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    replace(agent, b"value")
    ((namespace, offset, slot, directory),) = named(pool, agent)
    entry = directory.entry(slot)
    assert entry is not None
    directory.install(slot, entry._replace(generation=generation))
    pool.namespaces[namespace].store(offset, [directory.image()])
    assert newest(pool.agent()) is MissCause.EVICTED
    replace(agent, b"another")
    assert newest(pool.agent()) == b"another"
    assert len(named(pool, agent)) == 1


def test_it_is_refused_while_a_set_cannot_be_read_and_the_older_value_stays() -> None:
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    replace(agent, b"old")
    ((namespace, _, _, _),) = named(pool, agent)
    for away in (namespace, 1 - namespace):
        for fault in ("down", "hung", "broken"):
            setattr(pool.namespaces[away], fault, True)
            with pytest.raises(PutRefused) as refused:
                replace(agent, b"new")
            assert refused.value.cause is not None
            setattr(pool.namespaces[away], fault, False)
    assert newest(pool.agent()) == b"old"


def test_the_newest_is_read_while_the_other_enclosure_is_away_or_silent() -> None:
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    replace(agent, b"value")
    ((namespace, _, _, _),) = named(pool, agent)
    for fault in ("down", "hung"):
        setattr(pool.namespaces[1 - namespace], fault, True)
        assert newest(pool.agent()) == b"value"
        setattr(pool.namespaces[1 - namespace], fault, False)
        setattr(pool.namespaces[namespace], fault, True)
        cause = MissCause.ENCLOSURE_DOWN if fault == "down" else MissCause.LATE
        assert newest(pool.agent()) is cause, "it may be there"
        setattr(pool.namespaces[namespace], fault, False)


def test_a_write_that_may_land_late_keeps_the_key_as_it_is_for_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    replace(agent, b"old")
    ((namespace, directory_at, _, _),) = named(pool, agent)
    write = agent.channel.write

    def hangs(to: int, offset: int, parts: Sequence[Buffer], *, more: bool = False) -> MemoryPending:
        pool.namespaces[to].hung = offset == directory_at
        return write(to, offset, parts, more=more)

    monkeypatch.setattr(agent.channel, "write", hangs)
    with pytest.raises(PutRefused, match="did not take it"):
        replace(agent, b"new")
    monkeypatch.undo()
    pool.namespaces[namespace].hung = False
    with pytest.raises(PutRefused, match="may still land"):
        replace(agent, b"newer")
    assert newest(agent) == b"old"
    agent.channel.clock += 61
    replace(agent, b"newer")
    assert newest(agent) == b"newer"


@pytest.mark.parametrize("has_older", [False, True])
def test_a_key_is_stored_at_once_when_an_enclosure_that_refused_it_takes_writes_again(
    has_older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive that is full answers Capacity Exceeded: nothing lands late, so no key is in doubt."""
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    if has_older:
        replace(agent, b"old")
    write = agent.channel.write

    def refuses(to: int, offset: int, parts: Sequence[Buffer], *, more: bool = False) -> MemoryPending:
        pool.namespaces[to].broken = True
        pending = write(to, offset, parts, more=more)
        pool.namespaces[to].broken = False
        return pending

    monkeypatch.setattr(agent.channel, "write", refuses)
    with pytest.raises(PutRefused, match="did not take it"):
        replace(agent, b"new")
    monkeypatch.undo()
    assert newest(agent) == (b"old" if has_older else MissCause.NEVER_STORED)
    replace(agent, b"newer")
    assert newest(agent) == newest(pool.agent()) == b"newer"


@pytest.mark.parametrize("sets", [(1, 1), (1,)])
def test_whenever_the_agent_dies_the_key_has_the_older_value_or_the_new_one(sets: tuple[int, ...]) -> None:
    """Of the writes that are under way when it dies any part lands."""
    points = 0
    for point in itertools.count(1):
        for landed in itertools.product((False, True), repeat=3):
            pool = MemoryPool(sets)
            replace(pool.agent(), b"old")
            dying = SteppedChannel(pool.namespaces)
            program = Program(dying, pool.agent().served.replace(dying, KEY, b"new", 1e9))
            program.run(point)
            points += bool(dying.asked)
            for (pending, happens), lands in zip(dying.asked, landed, strict=False):
                pending.done = lands and happens().done
            found = newest(pool.agent())
            assert found == b"new" if program.ended else found in (b"old", b"new")
            replace(pool.agent(), b"after")
            assert newest(pool.agent()) == b"after"
        if program.ended:
            break
    assert points >= 4 * 8


def test_a_full_set_gives_up_another_value_and_never_the_keys_own() -> None:
    pool = MemoryPool((1,), value_bytes=4096)
    agent = pool.agent()
    replace(agent, b"first")
    agent.channel.clock += 100
    for number in range(2, 65):
        replace(agent, b"other", key_of(number))
    # Its own entry is the oldest of all, and would be the victim.
    replace(agent, b"second")
    assert newest(agent) == b"second"
    assert agent.tally.evictions == 1
    replace(agent, b"third")
    assert agent.tally.evictions == 1, "the older one has left its slot"


def test_a_set_that_is_full_of_held_and_pinned_values_refuses() -> None:
    pool = MemoryPool((1,), value_bytes=4096)
    agent = pool.agent()
    for number in range(1, 65):
        replace(agent, b"value", key_of(number))
    for number in range(33, 65):
        until = int(agent.channel.wall()) + 100
        agent.channel.run(agent.served.pin(agent.channel, key_of(number), until, agent.deadline()))
    agent.volume.holds.take([agent.volume.placement.pseudonym(key_of(each)) for each in range(1, 33)], 0)
    with pytest.raises(PutRefused, match="no slot"):
        replace(agent, b"new")
    assert newest(agent) == b"value"


def test_a_tenant_at_its_quota_replaces_what_it_has_and_evicts_nothing() -> None:
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    quota = Quota([Measured(agent.volume.occupancy, pool.settings.slot_bytes)], Limits(slots=2))
    agent.volume.change(tenant=TenantShare(quota, None, [agent.volume]))
    replace(agent, b"one")
    replace(agent, b"two", key_of(2))
    for number in range(5):
        replace(agent, b"again %d" % number)
    assert newest(agent, key_of(2)) == b"two"
    assert (agent.tally.evictions, quota.in_use()[0]) == (0, 2)
    replace(agent, b"three", key_of(3))
    assert (agent.tally.evictions, quota.in_use()[0]) == (1, 2)


def test_first_steps_that_fail_leave_nothing_set_aside_in_the_quota() -> None:
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    quota = Quota([Measured(agent.volume.occupancy, pool.settings.slot_bytes)], Limits(slots=2))
    agent.volume.change(tenant=TenantShare(quota, None, [agent.volume]))

    def fail() -> None:
        raise FsError(errno.EIO, "a chunk has no place")

    for _ in range(3):
        with pytest.raises(FsError):
            replace_after(agent, b"one", fail)
    assert quota.in_use() == (0, 0)
    assert not any(each.reserved or each.writer.locked() for each in agent.cache.snapshot())


def test_newest_counts_as_a_get_and_touches() -> None:
    agent = MemoryPool((1, 1)).agent()
    replace(agent, b"value")
    newest(agent)
    newest(agent, key_of(2))
    tally = agent.tally
    assert (tally.gets_hit, tally.gets_missed, tally.bytes_read) == (1, 1, 5)
    sets = agent.volume.borrow_sets(agent.volume.placement.pseudonym(KEY))
    assert agent.volume.find(sets, agent.volume.placement.pseudonym(KEY))[0].entry.hits == 1
    agent.volume.give_back_sets(sets)


def test_damage_is_a_miss_and_an_older_value_is_no_answer() -> None:
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    replace(agent, b"value")
    ((namespace, offset, slot, _),) = named(pool, agent)
    pool.namespaces[namespace].flip(slot_at(pool, offset, slot) + HEADER_BYTES + 2)
    assert newest(agent) is MissCause.CORRUPT
    assert newest(pool.agent()) is MissCause.CORRUPT
    replace(agent, b"again")
    assert newest(pool.agent()) == b"again"


def test_an_erased_volume_has_nothing_and_takes_nothing() -> None:
    agent = MemoryPool((1, 1)).agent()
    replace(agent, b"value")
    agent.volume.change(erased=True)
    assert newest(agent) is MissCause.WRONG_KEY
    with pytest.raises(PutRefused):
        replace(agent, b"new")


def test_what_they_cost() -> None:
    timed = Timed()
    timed.volume = timed.open(directory_fresh=0.0)
    served = functools.partial(_served, timed)
    assert timed.took(served().replace(timed.channel, KEY, b"v", 1e9)) == (2.0, 2, 2), "two directories, both"
    assert timed.took(served().newest(timed.channel, KEY, 1e9)) == (1.0, 3, 0), "all in one round trip"
    seconds, reads, writes = timed.took(served().replace(timed.channel, KEY, b"w", 1e9))
    assert (seconds, reads, writes) == (4.0, 2, 3), "the slot, then its entry, then the older header"
    other = timed.open(directory_fresh=0.0)
    assert timed.took(_served(timed, other).newest(timed.channel, KEY, 1e9)) == (2.0, 3, 0), "nothing known"
    assert timed.took(_served(timed, other).newest(timed.channel, KEY, 1e9)) == (1.0, 3, 0)
    timed.took(served().replace(timed.channel, KEY, b"x", 1e9))
    assert timed.took(_served(timed, other).newest(timed.channel, KEY, 1e9)) == (2.0, 4, 0), "a wrong hint"


def test_a_single_agent_believes_what_it_has_read_for_as_long_as_its_operator_says() -> None:
    timed = Timed()
    served = functools.partial(_served, timed)
    timed.volume = timed.open(directory_fresh=100.0)
    assert timed.took(served().newest(timed.channel, KEY, 1e9)) == (1.0, 2, 0), "nothing is known"
    assert timed.took(served().newest(timed.channel, KEY, 1e9)) == (0.0, 0, 0), "known to be absent"
    assert timed.took(served().replace(timed.channel, KEY, b"v", 1e9)) == (2.0, 2, 2), "read all the same"
    assert timed.took(served().newest(timed.channel, KEY, 1e9)) == (1.0, 1, 0), "the slot alone"
    assert timed.took(served().replace(timed.channel, KEY, b"w", 1e9)) == (4.0, 2, 3)
    assert _newest(timed) == b"w"
    timed.took(_served(timed, timed.open()).replace(timed.channel, KEY, b"x", 1e9))
    assert _newest(timed) == b"x", "its slot does not prove the older one any more"
    timed.took(_served(timed, timed.open()).delete(timed.channel, KEY, 1e9))
    assert _newest(timed) is MissCause.NEVER_STORED
    timed.took(_served(timed, timed.open()).replace(timed.channel, KEY, b"y", 1e9))
    assert _newest(timed) is MissCause.NEVER_STORED, "another agent's, within the time"
    timed.scheduler.now += 100.0
    assert _newest(timed) == b"y"


def _newest(timed: Timed) -> bytes | MissCause:
    return timed.scheduler.finish(_served(timed).newest(timed.channel, KEY, 1e9))


def test_a_value_that_moves_does_not_go_over_what_another_agent_stored_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined = Joined()
    joined.after = dataclasses.replace(joined.after, names_of=bytes(16))
    joined.fill(40)
    mover, other = joined.other(), joined.other()
    key, old = one_misplaced(joined, mover)
    write, wrote = mover.channel.write, False

    def replaced_meanwhile(
        to: int, offset: int, parts: Sequence[Buffer], *, more: bool = False
    ) -> MemoryPending:
        nonlocal wrote
        pending = write(to, offset, parts, more=more)
        if not wrote:
            wrote = True
            replace(other, b"newer", key)
        return pending

    monkeypatch.setattr(mover.channel, "write", replaced_meanwhile)
    move = Migration(mover.volume, mover.channel, old, mover.deadline())
    assert mover.channel.run(move.copy()) is Outcome.TROUBLE
    assert wrote
    assert newest(mover, key) == newest(other, key) == newest(joined.other(), key) == b"newer"


def _served(timed: Timed, volume: Any = None) -> Any:
    return serve(volume or timed.volume)
