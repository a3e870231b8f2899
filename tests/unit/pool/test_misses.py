"""Every miss has one cause and is counted once; time to live, eviction, pins and deletion."""

from __future__ import annotations

import random

import pytest

from agent.pool.counters import MissCause, Tally, total
from agent.pool.errors import PutRefused
from agent.pool.format.directory import TIME_MAX
from agent.pool.read.get import SlotReader
from agent.pool.volume.settings import Timing
from agent.pool.write.delete_and_pin import PINNED_SLOTS_MAX, pin
from agent.pool.write.put import SlotWriter
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, fixed_secret, key_of

VALUE = b"a value" * 100


def counted(agent: PoolAgent) -> dict[MissCause, int]:
    return {cause: count for cause, count in agent.tally.misses.items() if count}


def test_never_stored_and_evicted() -> None:
    pool = MemoryPool((1,), value_bytes=4096)
    agent = pool.agent()
    assert agent.get(key_of(1)) is MissCause.NEVER_STORED
    for number in range(100):
        agent.channel.clock += 1
        agent.put(key_of(number), VALUE[:100])
    assert agent.tally.evictions == 100 - 64
    later = pool.agent()
    for reader in (agent, later):
        causes = [reader.get(key_of(number)) for number in range(100)]
        assert causes[:36] == [MissCause.EVICTED] * 36, "the oldest went, and the ghosts say so"
        assert causes[36:] == [VALUE[:100]] * 64
        assert reader.get(key_of(500)) is MissCause.NEVER_STORED
    assert counted(agent) == {MissCause.NEVER_STORED: 2, MissCause.EVICTED: 36}
    assert agent.tally.gets_hit == 64


def test_the_least_useful_goes() -> None:
    agent = MemoryPool((1,), value_bytes=4096).agent()
    for number in range(64):
        agent.channel.clock += 1
        agent.put(key_of(number), VALUE[:64])
    for number in range(64):
        if number != 40:
            agent.channel.clock += 0.01
            assert agent.get(key_of(number)) == VALUE[:64]
    agent.put(key_of(100), VALUE[:64])
    assert agent.get(key_of(40)) is MissCause.EVICTED
    assert agent.get(key_of(0)) == VALUE[:64]


def test_time_to_live_ends_and_the_slot_is_used_again() -> None:
    pool = MemoryPool((1,), value_bytes=4096, ttl_seconds=0)
    agent = pool.agent()
    agent.put(key_of(1), b"mortal", ttl_seconds=10)
    agent.put(key_of(2), b"for ever")
    agent.channel.clock += 9
    assert agent.get(key_of(1)) == b"mortal"
    agent.channel.clock += 2
    assert agent.get(key_of(1)) is MissCause.EXPIRED
    assert pool.agent(timing=Timing()).get(key_of(2)) == b"for ever"
    assert agent.channel.run(agent.volume.lookup(agent.channel, [key_of(1)], agent.deadline())) == [
        MissCause.EXPIRED
    ]
    assert not agent.put(key_of(1), b"again").already_there
    assert agent.get(key_of(1)) == b"again"
    assert agent.tally.evictions == 0


def test_expired_entries_go_before_live_ones() -> None:
    agent = MemoryPool((1,), value_bytes=4096).agent()
    for number in range(64):
        agent.put(key_of(number), b"v", ttl_seconds=5 if number % 2 else 0)
    agent.channel.clock += 6
    for number in range(100, 132):
        agent.put(key_of(number), b"w")
    assert (agent.tally.evictions, agent.tally.evictions_expired) == (0, 32)
    assert all(agent.get(key_of(number)) == b"v" for number in range(0, 64, 2))


def test_a_volumes_time_to_live_and_the_end_of_time() -> None:
    agent = MemoryPool((1,), ttl_seconds=20).agent()
    agent.put(key_of(1), b"v")
    agent.put(key_of(2), b"v", ttl_seconds=TIME_MAX)
    agent.channel.clock += 21
    assert agent.get(key_of(1)) is MissCause.EXPIRED
    assert agent.get(key_of(2)) == b"v"
    assert agent.channel.run(pin(agent.volume, agent.channel, key_of(2), 1 << 60, agent.deadline()))


def test_wrong_key_is_told_from_damage() -> None:
    pool = MemoryPool((1,))
    pool.agent().put(key_of(1), VALUE)
    raw = bytearray(fixed_secret().reveal())
    raw[40] ^= 1
    from agent.inline.secrets import SecretKey

    stranger = pool.agent(secret=SecretKey(bytes(raw)))
    assert stranger.get(key_of(1)) is MissCause.WRONG_KEY
    # With another secret altogether not even the entry can be found.
    assert pool.agent(secret=fixed_secret(2)).get(key_of(1)) is MissCause.NEVER_STORED


@pytest.mark.parametrize("fault", ["down", "hung", "broken"])
@pytest.mark.parametrize("warm", [True, False])
def test_an_enclosure_that_fails(fault: str, warm: bool) -> None:
    pool = MemoryPool((1,))
    writer = pool.agent()
    writer.put(key_of(1), VALUE)
    agent = writer if warm else pool.agent()
    setattr(pool.namespaces[0], fault, True)
    cause = {
        "down": MissCause.ENCLOSURE_DOWN,
        "hung": MissCause.LATE,
        "broken": MissCause.CORRUPT,
    }[fault]
    before = agent.channel.clock
    assert agent.get(key_of(1)) is cause
    assert agent.channel.clock - before <= agent.volume.timing.read_deadline + 1e-9
    assert counted(agent) == {cause: 1}
    setattr(pool.namespaces[0], fault, False)
    assert agent.get(key_of(1)) == VALUE


def test_causes_add_up(seed: int) -> None:
    """Whatever happens, each get is a hit or one miss, and reading on changes at most which."""
    rng = random.Random(seed)
    pool = MemoryPool((1, 1), value_bytes=3 * 65536)
    agent = pool.agent()
    gets = 0
    for _ in range(400):
        agent.channel.clock += rng.random()
        number = rng.randrange(150)
        for namespace in pool.namespaces:
            namespace.down = rng.random() < 0.05
            namespace.hung = rng.random() < 0.05
            namespace.broken = rng.random() < 0.05
            if namespace.blocks and rng.random() < 0.1:
                namespace.flip(rng.choice(list(namespace.blocks)) + rng.randrange(4096), rng.randrange(8))
        if rng.random() < 0.4:
            try:
                agent.put(key_of(number), bytes([number]) * rng.choice([10, 70_000, 196_608]))
            except PutRefused:
                continue
        else:
            reading = SlotReader(agent.volume, key_of(number))
            gets += 1
            for offset in (0, 65536, 131072):
                served = agent.read(reading, 65536, offset)
                if isinstance(served, MissCause):
                    break
                assert served == bytes([number]) * len(served)
    assert agent.tally.gets_hit + agent.tally.gets_missed == gets
    assert len(counted(agent)) >= 4


def test_totals_add_the_tallies_of_all_workers() -> None:
    one, other = Tally(gets_hit=3, puts=1), Tally(gets_hit=-1, bytes_read=7)
    one.miss(MissCause.LATE)
    other.miss(MissCause.LATE)
    other.miss(MissCause.CORRUPT)
    summed = total([one, other])
    assert (summed.gets_hit, summed.puts, summed.bytes_read, summed.gets_missed) == (2, 1, 7, 3)
    assert summed.misses[MissCause.LATE] == 2


# -- pins -------------------------------------------------------------------------------------------


def pinned(agent: PoolAgent, key: bytes, seconds: int = 1000) -> bool | None:
    until = int(agent.channel.wall()) + seconds if seconds else 0
    return agent.channel.run(pin(agent.volume, agent.channel, key, until, agent.deadline()))


def test_a_pin_holds_also_after_the_directory_was_read_anew() -> None:
    pool = MemoryPool((1,), value_bytes=4096)
    agent = pool.agent()
    for number in range(64):
        agent.put(key_of(number), b"v")
    assert pinned(agent, key_of(7)) is True
    agent.age_directories()
    assert agent.get(key_of(999)) is MissCause.NEVER_STORED
    for number in range(100, 300):
        agent.channel.clock += 2
        agent.put(key_of(number), b"w")
    assert agent.get(key_of(7)) == b"v"
    assert pool.agent().get(key_of(7)) == b"v"
    other = pool.agent()
    for number in range(300, 400):
        other.channel.clock += 2
        other.put(key_of(number), b"w")
    assert other.get(key_of(7)) == b"v", "the pin reached flash with the next write"
    assert pinned(agent, key_of(7), 0) is True
    for number in range(400, 600):
        agent.channel.clock += 2
        agent.put(key_of(number), b"w")
    assert agent.get(key_of(7)) is not None
    assert isinstance(agent.get(key_of(7)), MissCause)


def test_pins_cannot_fill_a_set() -> None:
    agent = MemoryPool((1,), value_bytes=4096).agent()
    for number in range(64):
        agent.put(key_of(number), b"v")
    results = [pinned(agent, key_of(number)) for number in range(64)]
    assert results == [True] * PINNED_SLOTS_MAX + [False] * (64 - PINNED_SLOTS_MAX)
    assert pinned(agent, key_of(0)) is True, "what is pinned may be pinned anew"
    assert pinned(agent, key_of(777)) is None
    for number in range(100, 300):
        agent.channel.clock += 1
        agent.put(key_of(number), b"w")
    assert all(agent.get(key_of(number)) == b"v" for number in range(PINNED_SLOTS_MAX))


# -- deletion ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [True, False])
def test_what_was_deleted_is_gone_for_an_agent_with_an_old_directory(fresh: bool) -> None:
    pool = MemoryPool((2, 2))
    agent, other = pool.agent(), pool.agent()
    agent.put(key_of(1), VALUE)
    assert other.get(key_of(1)) == VALUE
    if not fresh:
        other.age_directories()
    assert agent.delete(key_of(1)) is True
    assert agent.get(key_of(1)) is MissCause.NEVER_STORED
    assert other.get(key_of(1)) is MissCause.EVICTED
    assert agent.delete(key_of(1)) is False
    assert not agent.put(key_of(1), b"new").already_there
    assert agent.get(key_of(1)) == b"new"
    other.age_directories()
    assert other.get(key_of(1)) == b"new"


def test_delete_reads_the_directories_anew() -> None:
    pool = MemoryPool((1,))
    agent, other = pool.agent(), pool.agent()
    assert agent.get(key_of(1)) is MissCause.NEVER_STORED
    other.put(key_of(1), VALUE)
    assert agent.delete(key_of(1)) is True
    assert other.get(key_of(1)) is MissCause.EVICTED


@pytest.mark.parametrize("fault", ["down", "hung", "broken"])
def test_delete_is_refused_while_an_enclosure_is_away(fault: str) -> None:
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    agent.put(key_of(1), VALUE)
    holder = agent.where(key_of(1))[0]
    for away in (0, 1):
        setattr(pool.namespaces[away], fault, True)
        with pytest.raises(PutRefused):
            agent.delete(key_of(1))
        setattr(pool.namespaces[away], fault, False)
    agent.age_directories()
    assert agent.get(key_of(1)) == VALUE
    assert agent.delete(key_of(1)) is True
    assert holder in (0, 1)
    for cached in agent.cache.snapshot():
        assert not cached.writer.locked()
        assert not cached.users


def test_delete_removes_every_copy() -> None:
    """Two workers that put one key at the same time may each store it, even in one set."""
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    writings = [SlotWriter(agent.volume, key_of(1)) for _ in range(3)]
    for writing in writings:
        agent.channel.run(writing.write(agent.channel, 0, memoryview(VALUE), agent.deadline()))
    for writing in writings:
        agent.channel.run(writing.finish(agent.channel, agent.deadline()))
    assert agent.delete(key_of(1)) is True
    assert agent.get(key_of(1)) is MissCause.NEVER_STORED
    assert pool.agent().get(key_of(1)) is MissCause.NEVER_STORED
    assert sum(1 for _, _, directory in pool.directories() for _ in directory) == 0


# -- who has to go ----------------------------------------------------------------------------------


def fill(agent: PoolAgent, count: int) -> None:
    for number in range(count):
        agent.channel.clock += 0.001
        agent.put(key_of(number), b"v")


def test_nothing_is_evicted_before_the_volume_is_full(seed: int) -> None:
    pool = MemoryPool((2, 2, 2), value_bytes=4096)
    agent = pool.agent()
    fill(agent, int(pool.settings.slots * 0.95))
    assert agent.tally.evictions == 0
    assert agent.volume.usage() == (384, 364)


def test_a_full_volume_refuses_rather_than_evict_while_an_enclosure_is_away() -> None:
    pool = MemoryPool((1, 1), value_bytes=4096)
    agent = pool.agent()
    fill(agent, 128)
    assert agent.volume.usage() == (128, 128)
    for fault in ("down", "broken"):
        setattr(pool.namespaces[1], fault, True)
        agent.age_directories()
        with pytest.raises(PutRefused) as caught:
            agent.put(key_of(1000), b"w")
        setattr(pool.namespaces[1], fault, False)
    assert caught.value.cause is None
    assert agent.tally.evictions == 0
    agent.age_directories()
    agent.put(key_of(1000), b"w")
    assert agent.tally.evictions == 1


def test_a_put_goes_to_the_enclosure_that_is_there() -> None:
    for fault in ("down", "hung", "broken"):
        pool = MemoryPool((1, 1), value_bytes=4096)
        setattr(pool.namespaces[0], fault, True)
        agent = pool.agent()
        for number in range(10):
            agent.put(key_of(number), b"v")
            agent.age_directories()
        assert agent.tally.puts == 10
        assert all(pool.agent().get(key_of(number)) == b"v" for number in range(10)) or fault == "hung"


def test_a_volume_that_may_not_evict_refuses() -> None:
    pool = MemoryPool((1,), value_bytes=4096)
    agent = pool.agent()
    fill(agent, 64)
    with pytest.raises(PutRefused) as caught:
        agent.put(key_of(99), b"w", may_evict=False)
    assert caught.value.cause is None
    assert all(agent.get(key_of(number)) == b"v" for number in range(64))
