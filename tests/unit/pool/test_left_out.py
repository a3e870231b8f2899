"""Values that are replaced while an enclosure is away: it is left out, and comes back in sync."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.format.sync_record import (
    BLANK,
    MARKS_MAX,
    RECORD_BYTES,
    RECORD_OFFSET,
    DamagedRecord,
    SyncRecord,
    decode_sync_record_untrusted,
)
from agent.pool.maintenance.resync import Resync
from agent.pool.map.superblock import COPY_OFFSETS, PROOF_OFFSET, WRITTEN_BYTES
from agent.pool.volume.in_sync import TIMING, InSync
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of, nguid_of
from tests.unit.pool.test_replaced_values import KEY, named, newest, replace

NUMBERS = st.integers(0, (1 << 62) - 1)
NGUIDS = st.binary(min_size=16, max_size=16)


def pool_of_names(sets: tuple[int, ...] = (1, 1)) -> MemoryPool:
    pool = MemoryPool(sets)
    pool.settings = dataclasses.replace(pool.settings, kind="shared-names", names_of=bytes(range(16)))
    return pool


def in_sync(agent: PoolAgent) -> InSync:
    found = agent.volume.in_sync
    assert found is not None
    return found


def upkeep(agent: PoolAgent, seconds: float, resync: Resync | None = None) -> Resync:
    """Turns of upkeep, half a second apart."""
    resync = resync or Resync(agent.volume, in_sync(agent))
    for _ in range(int(seconds / 0.5)):
        agent.channel.clock += 0.5
        agent.channel.run(resync.turn(agent.channel))
    return resync


def delete(agent: PoolAgent, key: bytes = KEY) -> bool:
    return agent.channel.run(agent.served.delete(agent.channel, key, agent.deadline()))


@given(NUMBERS, NUMBERS, st.dictionaries(NGUIDS, NUMBERS, max_size=MARKS_MAX), NGUIDS)
def test_a_record_survives_encoding_and_decoding(
    floor: int, incarnation: int, marks: dict[bytes, int], nguid: bytes
) -> None:
    record = SyncRecord(floor, incarnation, marks)
    assert decode_sync_record_untrusted(record.encode(nguid), nguid) == record


def test_a_record_has_a_place_that_no_map_and_no_proof_of_paths_reaches() -> None:
    assert COPY_OFFSETS[0] + WRITTEN_BYTES == RECORD_OFFSET
    assert COPY_OFFSETS[1] == RECORD_OFFSET + RECORD_BYTES
    assert PROOF_OFFSET > RECORD_OFFSET


@given(st.binary(max_size=RECORD_BYTES))
def test_bytes_of_anything_are_no_record_or_a_damaged_one(raw: bytes) -> None:
    for block in (raw, raw.ljust(RECORD_BYTES, b"\0"), (b"g35sync1" + raw).ljust(RECORD_BYTES, b"\0")):
        with contextlib.suppress(DamagedRecord):
            assert decode_sync_record_untrusted(block[:RECORD_BYTES], bytes(16)) == BLANK


@pytest.mark.parametrize("at", [0, 10, 24, 32, 40, 50, 4000, 4081, 4090])
def test_a_flipped_bit_is_damage_and_no_blank_record(at: int) -> None:
    block = bytearray(SyncRecord(5, 2, {nguid_of(1): 3}).encode(nguid_of(0)))
    block[at] ^= 1
    with pytest.raises(DamagedRecord):
        decode_sync_record_untrusted(bytes(block), nguid_of(0))


def test_the_record_of_another_namespace_is_damaged() -> None:
    with pytest.raises(DamagedRecord, match="another"):
        decode_sync_record_untrusted(SyncRecord(1).encode(nguid_of(0)), nguid_of(1))


@pytest.mark.parametrize("fault", ["down", "hung"])
def test_an_enclosure_that_stays_away_is_left_out_and_values_are_stored(fault: str) -> None:
    pool = pool_of_names()
    agent, other = pool.agent(), pool.agent()
    replace(agent, b"old")
    ((namespace, _, _, _),) = named(pool, agent)
    assert newest(other, seconds=5.0) == b"old"
    upkeep(agent, 1)
    setattr(pool.namespaces[namespace], fault, True)
    upkeep(agent, 2)
    before = agent.channel.clock
    with pytest.raises(PutRefused):
        replace(agent, b"too early")
    assert agent.channel.clock <= before + TIMING.retry, "what is known to be away is hardly waited for"
    upkeep(agent, TIMING.away)
    replace(agent, b"new")
    assert in_sync(agent).marked() == 1
    assert newest(agent, seconds=5.0) == b"new"
    other.channel.clock = agent.channel.clock
    assert newest(other, seconds=5.0) == b"new"
    assert delete(agent)
    setattr(pool.namespaces[namespace], fault, False)
    other.channel.clock += 1
    assert newest(other, seconds=5.0) is MissCause.NEVER_STORED, "what is back does not count"
    assert isinstance(newest(pool.agent(), seconds=5.0), MissCause)


def test_what_comes_back_is_emptied_and_counts_again() -> None:
    pool = pool_of_names()
    agent = pool.agent()
    keys = [key_of(number) for number in range(20)]
    for key in keys:
        replace(agent, b"old", key)
    where = {key: named(pool, agent, key)[0][0] for key in keys}
    away = where[KEY] if KEY in where else where[keys[0]]
    upkeep(agent, 2)
    pool.namespaces[away].down = True
    upkeep(agent, TIMING.away + 1)
    replace(agent, b"new", keys[0])
    pool.namespaces[away].down = False
    resync = upkeep(agent, 5)
    assert not resync.done, "operations that were begun before may not have ended"
    replace(agent, b"newer", keys[0])
    upkeep(agent, TIMING.settle + 3, resync)
    assert resync.done == 1
    assert not in_sync(agent).marked()
    fresh = pool.agent()
    for key in keys:
        found = newest(fresh, key, seconds=5.0)
        wanted = b"newer" if key == keys[0] else b"old"
        assert found == wanted if key == keys[0] or where[key] != away else isinstance(found, MissCause)
    for key in keys:
        replace(fresh, b"last", key)
        assert newest(fresh, key, seconds=5.0) == newest(agent, key, seconds=5.0) == b"last"
    assert {named(pool, agent, key)[0][0] for key in keys} == {0, 1}


def test_an_entry_that_a_late_write_brings_back_does_not_count() -> None:
    pool = pool_of_names()
    agent = pool.agent()
    replace(agent, b"old")
    ((away, offset, _, _),) = named(pool, agent)
    before = dict(pool.namespaces[away].blocks)
    upkeep(agent, 2)
    pool.namespaces[away].down = True
    upkeep(agent, TIMING.away + 1)
    replace(agent, b"new")
    delete(agent)
    pool.namespaces[away].down = False
    assert upkeep(agent, TIMING.settle + 5).done == 1
    late = {at: block for at, block in before.items() if at >= offset}
    pool.namespaces[away].blocks.update(late)
    assert isinstance(newest(pool.agent(), seconds=5.0), MissCause)


def test_one_that_comes_back_alone_is_not_believed_by_who_does_not_know_what_the_other_said() -> None:
    """Away; the other took a value alone, and went away as it came back."""
    pool = pool_of_names()
    agent, idle = pool.agent(), pool.agent()
    replace(agent, b"old")
    ((away, _, _, _),) = named(pool, agent)
    assert newest(idle, seconds=5.0) == b"old"
    upkeep(agent, 2)
    pool.namespaces[away].down = True
    upkeep(agent, TIMING.away + 1)
    replace(agent, b"new")
    pool.namespaces[1 - away].down, pool.namespaces[away].down = True, False
    idle.channel.clock = agent.channel.clock
    for each in (agent, idle, pool.agent()):
        upkeep(each, TIMING.away + 1)
        assert newest(each, seconds=5.0) is MissCause.ENCLOSURE_DOWN
        with pytest.raises(PutRefused):
            replace(each, b"never")
    pool.namespaces[1 - away].down = False
    for each in (agent, idle, pool.agent()):
        each.channel.clock = agent.channel.clock + 100
        assert newest(each, seconds=5.0) == b"new"


def test_the_other_enclosures_values_are_read_on_before_anything_is_left_out() -> None:
    pool = pool_of_names()
    agent = pool.agent()
    replace(agent, b"value")
    ((namespace, _, _, _),) = named(pool, agent)
    upkeep(agent, 2)
    pool.namespaces[1 - namespace].down = True
    upkeep(agent, 60)
    assert newest(agent, seconds=5.0) == b"value"
    assert not in_sync(agent).marked()
    pool.namespaces[1 - namespace].down = False
    upkeep(agent, 2)
    assert newest(agent, seconds=5.0) == b"value", "nothing was stored, so nothing is lost"


def test_a_damaged_record_is_written_anew() -> None:
    pool = pool_of_names()
    agent = pool.agent()
    replace(agent, b"old")
    pool.namespaces[0].store(RECORD_OFFSET, [b"g35sync1".ljust(RECORD_BYTES, b"x")])
    agent.channel.clock += 1
    assert newest(agent, seconds=5.0) in (b"old", MissCause.ENCLOSURE_DOWN)
    assert upkeep(agent, TIMING.settle + 5).done == 1
    replace(agent, b"new")
    assert newest(pool.agent(), seconds=5.0) == b"new"


def test_one_that_somebody_else_does_not_reach_is_not_brought_back_again_and_again() -> None:
    pool = pool_of_names()
    agent, cut = pool.agent(), pool.agent()
    replace(agent, b"old")
    ((away, _, _, _),) = named(pool, agent)
    newest(cut, seconds=5.0)
    upkeep(cut, 2)
    reads = cut.channel.namespaces
    cut.channel.namespaces = [
        each if number != away else type(each)(1 << 40, down=True) for number, each in enumerate(reads)
    ]
    upkeep(cut, TIMING.away + 1)
    replace(cut, b"new")
    agent.channel.clock = cut.channel.clock
    resync = Resync(agent.volume, in_sync(agent))
    for _ in range(10):
        upkeep(agent, 0.5, resync)
        upkeep(cut, 0.5)
    replace(cut, b"newer")
    agent.channel.clock = cut.channel.clock
    upkeep(agent, 30, resync)
    assert not resync.done
    assert newest(agent, seconds=5.0) == b"newer"
    upkeep(agent, TIMING.again + TIMING.settle, resync)
    assert resync.done == 1


def test_a_volume_that_is_nearly_full_evicts_although_an_enclosure_is_away() -> None:
    """With plenty of room in the whole volume live data stay; with none, a cache goes on."""
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    for number in range(60):
        agent.put(key_of(number), b"v")
    pool.namespaces[1].down = True
    for number in range(100, 140):
        agent.age_directories()
        with contextlib.suppress(PutRefused):
            agent.put(key_of(number), b"v")
    assert not agent.tally.evictions, "half of the volume is free"
    pool.namespaces[1].down = False
    for number in range(200, 400):
        agent.put(key_of(number), b"v")
    assert agent.volume.is_nearly_full()
    before = agent.tally.evictions
    pool.namespaces[1].down = True
    for number in range(500, 520):
        agent.age_directories()
        agent.put(key_of(number), b"v")
    assert agent.tally.evictions == before + 20
