"""What flash can do to a value: flips in every region, stale, misplaced, blank, torn and foreign slots.

Every test first plants the damage and then reads through agents with remembered and with fresh
directories, whole and in ranges. The answer is the right bytes or a miss with a cause, nothing else, and
afterwards the key can be stored again.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.format.directory import DIRECTORY_BYTES, ENTRY_BYTES
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.read.get import SlotReader
from tests.support.pool.memory_pool import SUITES, MemoryPool, PoolAgent, key_of, stage_now
from tests.support.pool.staged import add_staged

LENGTH = 150_000
CAPACITY = 3 * 65536
every_suite = pytest.mark.parametrize("suite", SUITES)


def value_of(number: int, length: int = LENGTH) -> bytes:
    return random.Random(f"value {number}").randbytes(length)


def pool_with(suite: str, keys: int = 3, sets: tuple[int, ...] = (1, 1)) -> tuple[MemoryPool, PoolAgent]:
    pool = MemoryPool(sets, value_bytes=CAPACITY, suite=suite)
    agent = pool.agent()
    for number in range(keys):
        agent.put(key_of(number), value_of(number))
    return pool, agent


def served_right_or_missed(agent: PoolAgent, number: int, *, length: int = LENGTH) -> MissCause | None:
    """Read a key whole and in pieces; the cause where it is a miss."""
    value = value_of(number, length)
    cause: MissCause | None = None
    for offset, size in ((0, CAPACITY), (0, 65536), (70_000, 1000), (length - 1, 10)):
        served = agent.get(key_of(number), size, offset)
        if isinstance(served, MissCause):
            cause = served
        else:
            assert served == value[offset : offset + size], "a wrong byte was served"
    reading = SlotReader(agent.volume, key_of(number))
    for offset in range(0, length, 50_000):
        served = agent.read(reading, 50_000, offset)
        if isinstance(served, MissCause):
            return cause or served
        assert served == value[offset : offset + 50_000], "a wrong byte was served"
    return cause


def test_the_detector_fires_on_a_planted_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite that opens anything would be caught by the tests below."""
    from agent.inline import cipher_suites

    monkeypatch.setattr(cipher_suites.hmac, "compare_digest", lambda one, other: True)
    pool, agent = pool_with("plain+crc64")
    namespace, slot, _ = agent.where(key_of(0))
    pool.namespaces[namespace].flip(slot + HEADER_BYTES + 5)
    with pytest.raises(AssertionError, match="wrong byte"):
        served_right_or_missed(agent, 0)


@every_suite
def test_a_flip_anywhere_in_a_slot(suite: str, seed: int) -> None:
    """A bit in every field of the header and in every 512 bytes of the value and its padding."""
    rng = random.Random(f"{seed} {suite}")
    pool, agent = pool_with(suite, keys=1)
    namespace, slot, _ = agent.where(key_of(0))
    flash = pool.namespaces[namespace]
    size = HEADER_BYTES + -(-LENGTH // 4096) * 4096
    fields = [0, 8, 9, 10, 16, 24, 48, *range(64, 64 + 80, 8), 64 + 80, 2000, 4079, 4080, 4095]
    places = fields + [at + rng.randrange(512) for at in range(HEADER_BYTES, size, 512)]
    causes: Counter[MissCause] = Counter()
    for at in places:
        bit = rng.randrange(8)
        flash.flip(slot + at, bit)
        for reader in (agent, pool.agent()):
            served = reader.get(key_of(0), CAPACITY)
            assert isinstance(served, MissCause), f"byte {at} of the slot"
            causes[served] += 1
        flash.flip(slot + at, bit)
        assert agent.get(key_of(0)) == value_of(0)
    assert set(causes) == {MissCause.CORRUPT, MissCause.WRONG_KEY}
    assert causes[MissCause.WRONG_KEY] == 2, "the byte of the fingerprint"


@every_suite
def test_flips_cost_only_the_ranges_they_are_in(suite: str, seed: int) -> None:
    pool, agent = pool_with(suite, keys=1)
    namespace, slot, _ = agent.where(key_of(0))
    pool.namespaces[namespace].flip(slot + HEADER_BYTES + 65536 + 9, 3)
    assert agent.get(key_of(0), 65536, 0) == value_of(0)[:65536]
    assert agent.get(key_of(0), 1, 65536) is MissCause.CORRUPT
    assert agent.get(key_of(0), 1000, 131072) == value_of(0)[131072:132072]
    assert served_right_or_missed(agent, 0) is MissCause.CORRUPT


def test_a_flip_anywhere_in_a_directory_entry() -> None:
    pool, agent = pool_with("aes-256-gcm", keys=2)
    namespace, slot, directory = agent.where(key_of(0))
    number = (slot - directory - DIRECTORY_BYTES) // pool.settings.slot_bytes
    flash = pool.namespaces[namespace]
    causes: Counter[object] = Counter()
    for bit in range(ENTRY_BYTES * 8):
        flash.flip(directory + number * ENTRY_BYTES + bit // 8, bit % 8)
        reader = pool.agent()
        causes[reader.get(key_of(0))] += 1
        assert reader.get(key_of(1)) == value_of(1)
        assert reader.tally.corrupt_entries >= 1
        flash.flip(directory + number * ENTRY_BYTES + bit // 8, bit % 8)
    assert causes == {MissCause.CORRUPT: 384, MissCause.NEVER_STORED: 128}, "the key itself may be what rots"


@every_suite
def test_stale_misplaced_and_foreign_slots(suite: str) -> None:
    """Whole slots whose own proofs are right, where they do not belong."""
    pool, agent = pool_with(suite, keys=6)
    places = {number: agent.where(key_of(number)) for number in range(6)}
    assert {place[0] for place in places.values()} == {0, 1}, "both namespaces are in it"
    whole = {n: pool.slot_bytes(place[0], place[1], LENGTH) for n, place in places.items()}
    for victim in range(6):
        for source in range(6):
            if source == victim:
                continue
            namespace, slot, _ = places[victim]
            pool.namespaces[namespace].store(slot, [whole[source]])
            for reader in (agent, pool.agent()):
                assert served_right_or_missed(reader, victim) in (MissCause.EVICTED, MissCause.CORRUPT)
            pool.namespaces[namespace].store(slot, [whole[victim]])
    assert served_right_or_missed(pool.agent(), 0) is None


@every_suite
def test_an_older_write_of_the_same_key_at_the_same_place(suite: str) -> None:
    """Replayed from a snapshot: the slot alone, and the slot with its directory."""
    pool, agent = pool_with(suite, keys=1)
    namespace, slot, directory = agent.where(key_of(0))
    flash = pool.namespaces[namespace]
    old_slot, old_directory = pool.slot_bytes(namespace, slot, LENGTH), flash.blocks[directory]
    agent.delete(key_of(0))
    agent.channel.clock += 1
    agent.put(key_of(0), value_of(77))
    again, slot_again, _ = agent.where(key_of(0))
    if (again, slot_again) == (namespace, slot):
        flash.store(slot, [old_slot])
        assert agent.get(key_of(0)) is MissCause.EVICTED
        assert pool.agent().get(key_of(0)) is MissCause.EVICTED
    else:
        pytest.fail("the second write went elsewhere; this test needs it in the same slot")
    flash.blocks[directory] = old_directory
    assert agent.get(key_of(0)) in (MissCause.EVICTED, value_of(0))


@every_suite
def test_blank_and_truncated_slots(suite: str) -> None:
    pool, agent = pool_with(suite, keys=1)
    namespace, slot, _ = agent.where(key_of(0))
    flash = pool.namespaces[namespace]
    whole = pool.slot_bytes(namespace, slot, LENGTH)
    for kept in range(0, len(whole), 4096):
        flash.store(slot, [whole[:kept] + bytes(len(whole) - kept)])
        for reader in (agent, pool.agent()):
            cause = served_right_or_missed(reader, 0)
            assert cause is (MissCause.CORRUPT if kept else MissCause.EVICTED), kept


@every_suite
def test_torn_at_every_block(suite: str) -> None:
    """The slot was reused for another key, and only a part of that write reached the medium."""
    pool, agent = pool_with(suite, keys=2, sets=(1,))
    places = [agent.where(key_of(number)) for number in range(2)]
    one = pool.slot_bytes(0, places[0][1], LENGTH)
    other = pool.slot_bytes(0, places[1][1], LENGTH)
    for cut in range(4096, len(one), 4096):
        for torn in (one[:cut] + other[cut:], other[:cut] + one[cut:]):
            pool.namespaces[0].store(places[0][1], [torn])
            assert served_right_or_missed(agent, 0) in (MissCause.CORRUPT, MissCause.EVICTED)


def test_another_volume_and_another_tenant_on_the_same_bytes() -> None:
    """Two maps that contradict each other: both claim the same slots. Neither reads what is the other's."""
    pool = MemoryPool((1,), value_bytes=CAPACITY)
    mine = pool.agent()
    for number in range(20):
        mine.put(key_of(number), value_of(number))
    changes: list[dict[str, Any]] = [{"tenant": bytes(16)}, {"volume_id": bytes(16)}, {"suite": SUITES[1]}]
    for extra, change in enumerate(changes, 100):
        other = MemoryPool((1,), value_bytes=CAPACITY, **change)
        other.namespaces = pool.namespaces
        stranger = other.agent()
        for number in range(20):
            assert isinstance(stranger.get(key_of(number)), MissCause)
        stranger.put(key_of(extra), value_of(extra))
        assert stranger.get(key_of(extra)) == value_of(extra)
        assert isinstance(mine.get(key_of(extra)), MissCause)
    for number in range(20):
        served_right_or_missed(mine, number)


def test_a_damaged_key_can_be_stored_again() -> None:
    """An entry that its slot does not bear out must not keep its key from the pool for ever."""
    for damage in ("rot", "blank", "torn"):
        pool, agent = pool_with("aes-256-gcm", keys=1)
        namespace, slot, _ = agent.where(key_of(0))
        if damage == "rot":
            pool.namespaces[namespace].flip(slot + 100)
        elif damage == "blank":
            pool.namespaces[namespace].store(slot, [bytes(4096)])
        else:
            pool.namespaces[namespace].flip(slot + HEADER_BYTES + 70_000)
        for reader in (agent, pool.agent()):
            reader.age_directories()
            assert isinstance(reader.get(key_of(0)), MissCause)
            reader.age_directories()
        assert reader.put(key_of(0), value_of(0)).stored, damage
        assert pool.agent().get(key_of(0)) == value_of(0)
        agent.age_directories()
        assert agent.get(key_of(0)) == value_of(0)


def test_a_put_that_failed_half_way_is_not_taken_for_stored() -> None:
    """The directory was written and the slot was not: the caller was told so, and tries again."""
    pool = MemoryPool((1,), value_bytes=CAPACITY)
    agent = pool.agent()
    agent.get(key_of(0))
    flash = pool.namespaces[0]
    store = flash.store

    def only_directories(offset: int, parts: Any) -> None:
        if offset == pool.settings.extents[0].offset:
            store(offset, parts)

    flash.store = only_directories  # type: ignore[method-assign]
    real_start = agent.channel._start

    def start(target: Any) -> Any:
        pending = real_start(target)
        if target.writes == 1:
            pending.fault = "Write Fault"
        return pending

    agent.channel._start = start  # type: ignore[method-assign]
    with pytest.raises(PutRefused):
        agent.put(key_of(0), value_of(0))
    flash.store = store  # type: ignore[method-assign]
    agent.age_directories()
    again = agent.put(key_of(0), value_of(0))
    assert again.stored
    assert agent.get(key_of(0)) == value_of(0)


def test_prestaged_bytes_prove_themselves_too() -> None:
    """What waits in memory may be old or damaged: then flash decides, and it waits no longer."""
    pool, _ = pool_with("aes-256-gcm", keys=1)
    agent = pool.agent(prestage_bytes=8 << 20)
    assert agent.prestage is not None
    pseudonym = agent.volume.placement.pseudonym(key_of(0))
    assert agent.channel.run(stage_now(agent.volume, agent.prestage, agent.channel, key_of(0)))
    reads = sum(namespace.reads for namespace in pool.namespaces)
    assert agent.get(key_of(0)) == value_of(0)
    assert sum(namespace.reads for namespace in pool.namespaces) == reads, "it came from memory"
    staged = agent.prestage.find(pool.settings.volume_id, pseudonym, _generation(agent))
    assert staged is not None
    for at in (0, 100, HEADER_BYTES + 1, HEADER_BYTES + 70_000):
        agent.channel.run(stage_now(agent.volume, agent.prestage, agent.channel, key_of(0)))
        staged = agent.prestage.find(pool.settings.volume_id, pseudonym, _generation(agent))
        assert staged is not None
        staged[at] ^= 1
        assert served_right_or_missed(agent, 0) is None
    assert agent.prestage.bytes_held == 0
    staged_blank = memoryview(bytearray(HEADER_BYTES + 151_552))
    add_staged(agent.prestage, pool.settings.volume_id, pseudonym, _generation(agent), staged_blank)
    assert agent.get(key_of(0)) == value_of(0)
    reading = SlotReader(agent.volume, key_of(0), agent.prestage)
    assert agent.read(reading, 65536, 0) == value_of(0)[:65536]
    add_staged(agent.prestage, pool.settings.volume_id, pseudonym, _generation(agent), staged_blank)
    assert agent.read(reading, 65536, 65536) == value_of(0)[65536:131072]


def _generation(agent: PoolAgent) -> int:
    pseudonym = agent.volume.placement.pseudonym(key_of(0))
    sets = agent.volume.borrow_sets(pseudonym)
    agent.volume.give_back_sets(sets)
    return agent.volume.find(sets, pseudonym)[0].entry.generation


@every_suite
def test_random_garbage_everywhere(suite: str, seed: int) -> None:
    """Any block of the volume overwritten with anything, over and over: nothing wrong, no exception."""
    rng = random.Random(f"{seed} {suite} garbage")
    pool, agent = pool_with(suite, keys=12)
    written = {number: value_of(number) for number in range(12)}
    injected = missed = 0
    for _ in range(150):
        flash = rng.choice(pool.namespaces)
        at = rng.choice(sorted(flash.blocks))
        other = rng.choice(sorted(flash.blocks))
        flash.blocks[at] = rng.choice(
            [bytes(4096), rng.randbytes(4096), flash.blocks[other], b"\xff" * 4096, b"g35slot1" * 512]
        )
        injected += 1
        number = rng.randrange(12)
        reader = rng.choice([agent, pool.agent()])
        served = reader.get(key_of(number))
        if isinstance(served, MissCause):
            missed += 1
            reader.age_directories()
            reader.put(key_of(number), written[number])
        else:
            assert served == written[number]
    assert injected == 150
    assert missed > 20, f"seed {seed}: only {missed} of the faults were met"
