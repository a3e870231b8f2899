"""The likely continuation of a prefix: what is learned and guessed, what it may cost, what is counted."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.pool.access import serve
from agent.pool.prestage.predictor import COUNT_MAX, SUCCESSORS_MAX, Successors
from agent.pool.prestage.prefetcher import Prefetcher, stage
from agent.pool.prestage.readahead import Readahead, Trail
from agent.pool.prestage.staging_queue import GUESSES_MAX
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.volume.bandwidth import TokenBucket
from agent.pool.write.admission import SecondUse
from host_shim.control_wire import Outcome
from host_shim.pool import Pool
from tests.support.engines.session_door import SessionDoor
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of, stage_now
from tests.support.pool.staged import add_staged
from tests.support.waiting import wait_until

A, B, C, D, E = (bytes([letter]) * 16 for letter in b"ABCDE")
VOLUME = b"v" * 16
SLOT = memoryview(bytes(8192))


def test_what_followed_before_is_likely_to_follow() -> None:
    table = Successors()
    table.saw((A, B, C, D))
    assert table.likely(A, 2) == [B, C]
    assert table.likely(A, 9) == [B, C, D]
    assert table.likely(D, 9) == []
    assert table.likely(E, 9) == []


def test_where_the_text_branches_nothing_is_guessed() -> None:
    table = Successors()
    table.saw((A, B, C))
    table.saw((A, B, D))
    assert table.likely(A, 9) == [B]
    for _ in range(4):
        table.saw((B, D))
    assert table.likely(A, 9) == [B, D], "most went on that way"


def test_an_order_put_together_from_two_clients_does_not_outweigh_one_that_was_named() -> None:
    table = Successors()
    table.saw((A, B))
    table.saw((A, E), weight=1)
    assert table.likely(A, 1) == [B]


def test_a_circle_ends() -> None:
    table = Successors()
    table.saw((A, B, C, A))
    assert table.likely(A, 64) == [B, C, A]


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=20), max_size=60))
def test_the_table_keeps_to_its_bounds(chains: list[list[int]]) -> None:
    table = Successors(entries_max=8)
    for chain in chains:
        table.saw([bytes([each]) * 16 for each in chain])
        assert len(table) <= 8
        for seen in table._table.values():
            assert len(seen) <= SUCCESSORS_MAX
            assert all(0 < count <= COUNT_MAX for count in seen.values())
    for each in range(31):
        likely = table.likely(bytes([each]) * 16, 5)
        assert len(likely) == len(set(likely)) <= 5


def test_guesses_have_half_of_the_room_and_push_out_none_that_was_announced() -> None:
    cache = PrestageCache(4 * len(SLOT))
    for key in (A, B):
        assert add_staged(cache, VOLUME, key, 1, SLOT)
    for key in (C, D, E):
        assert add_staged(cache, VOLUME, key, 1, SLOT, guessed=True)
    assert [cache.holds(VOLUME, key) for key in (A, B, C, D, E)] == [True, True, False, True, True]
    assert not add_staged(cache, VOLUME, C, 1, memoryview(bytes(3 * len(SLOT))), guessed=True)
    assert cache.counts(VOLUME).wasted_bytes == len(SLOT)


def test_what_came_of_it_is_counted() -> None:
    cache = PrestageCache(2 * len(SLOT))
    for key in (A, B):
        assert cache.expect(VOLUME, key)
        assert cache.expect(VOLUME, key) is False
        assert cache.bring(VOLUME, key, 1, SLOT)
        assert cache.expect(VOLUME, key) is None
    for _ in range(2):
        assert cache.find(VOLUME, A, 1) is not None
    assert add_staged(cache, VOLUME, C, 1, SLOT), "B goes, unserved"
    assert add_staged(cache, VOLUME, D, 1, SLOT), "A goes, served"
    assert cache.expect(VOLUME, E)
    for _ in range(2):
        assert cache.find(VOLUME, E, 1) is None, "the get came first, and is counted once"
    assert not cache.bring(VOLUME, E, 1, SLOT)
    assert not cache.holds(VOLUME, E)
    counts = cache.counts(VOLUME)
    assert (counts.useful_bytes, counts.wasted_bytes, counts.late, counts.late_bytes) == (
        len(SLOT), len(SLOT), 1, len(SLOT),
    )  # fmt: skip
    assert cache.counts(b"w" * 16).useful_bytes == 0


def test_a_rate_is_kept() -> None:
    bucket = TokenBucket(1000, 100.0, 1.0)
    assert [bucket.take(600, 100.0), bucket.take(600, 100.0)] == [True, False]
    assert bucket.take(600, 100.3)
    assert [bucket.take(999, 160.3), bucket.take(999, 160.3)] == [True, False], (
        "a second's worth ahead at most"
    )
    assert bucket.take(5000, 162.3), "one that is longer than a second's worth gets through, too"


@pytest.fixture
def stored() -> PoolAgent:
    agent = MemoryPool().agent(prestage_bytes=1 << 20)
    for number in range(8):
        agent.put(key_of(number), value_of(number))
    return agent


def value_of(number: int) -> bytes:
    return random.Random(number).randbytes(9000)


class Ahead:
    """A prestager's stand-in that reads at once what was guessed."""

    def __init__(self, agent: PoolAgent) -> None:
        self.agent = agent
        self.guessed: list[bytes] = []

    def __call__(self, volume: object, pseudonym: bytes) -> None:
        agent = self.agent
        assert volume is agent.volume
        assert agent.prestage is not None
        self.guessed.append(pseudonym)
        if agent.prestage.expect(agent.volume.settings.volume_id, pseudonym, guessed=True):
            agent.channel.run(stage(agent.volume, agent.prestage, agent.channel, pseudonym))


@pytest.fixture
def client(stored: PoolAgent) -> Iterator[Pool]:
    with Pool(
        "", sessions=1, parallel=1, files=SessionDoor(stored, Readahead(Ahead(stored), depth=2))
    ) as pool:
        yield pool


def test_reading_a_prefix_again_is_served_from_memory(stored: PoolAgent, client: Pool) -> None:
    kv = client.volume("v")
    keys = [key_of(number) for number in range(6)]
    assert kv.exists([*keys, key_of(99)]) == [True] * 6 + [False]
    reads = sum(each.reads for each in stored.channel.namespaces)
    for number, key in enumerate(keys):
        assert kv.get(key) == value_of(number)
    assert stored.tally.prestage_hits == 5, "all but the first"
    assert sum(each.reads for each in stored.channel.namespaces) == reads + 6, (
        "each value came from flash once"
    )
    assert stored.prestage is not None
    counts = stored.prestage.counts(stored.volume.settings.volume_id)
    assert (counts.wasted_bytes, counts.late) == (0, 0)
    assert counts.useful_bytes == stored.tally.prestaged_bytes


def test_single_gets_teach_as_well(stored: PoolAgent, client: Pool) -> None:
    kv = client.volume("v")
    for _ in range(2):
        for number in range(4):
            assert kv.get(key_of(number)) == value_of(number)
    # Of the second round the first follows the last of the first round; it was guessed of nobody.
    assert stored.tally.prestage_hits == 3


def test_a_batch_leads_on_behind_its_last_key_once(stored: PoolAgent) -> None:
    ahead = Ahead(stored)
    with Pool("", sessions=1, parallel=1, files=SessionDoor(stored, Readahead(ahead, depth=2))) as pool:
        kv = pool.volume("v")
        keys = [key_of(number) for number in range(8)]
        kv.exists(keys)
        buffers = [bytearray(16384) for _ in range(4)]
        assert kv.get_many(keys[:4], buffers) == [9000] * 4
        pseudonyms = [stored.volume.placement.pseudonym(key) for key in keys]
        assert ahead.guessed == pseudonyms[4:6]


def test_a_hole_is_not_learned_from(stored: PoolAgent) -> None:
    ahead = Ahead(stored)
    continuer = Readahead(ahead)
    with Pool("", sessions=1, parallel=1, files=SessionDoor(stored, continuer)) as pool:
        pool.volume("v").exists([key_of(0), key_of(1), key_of(98), key_of(2)])
    continuer.reads(stored.volume, key_of(0))
    assert ahead.guessed == [stored.volume.placement.pseudonym(key_of(1))]


def test_a_volume_that_was_erased_is_guessed_of_no_more(stored: PoolAgent) -> None:
    ahead = Ahead(stored)
    continuer = Readahead(ahead)
    continuer.chain(stored.volume, [key_of(0), key_of(1)], Trail())
    stored.volume.change(erased=True)
    continuer.reads(stored.volume, key_of(0))
    continuer.chain(stored.volume, [key_of(0), key_of(1)])
    assert ahead.guessed == []


class _Gate:
    """The channel's runner that waits until it may go on, then drives steps as the channel does."""

    def __init__(self, agent: PoolAgent) -> None:
        import threading

        self.channel = agent.channel
        self.open = threading.Event()
        self.begun = threading.Event()

    def run(self, steps: object) -> object:
        self.begun.set()
        assert self.open.wait(10)
        return self.channel.run(steps)  # type: ignore[arg-type]


class _Broken:
    def run(self, steps: object) -> object:
        raise ZeroDivisionError


@pytest.mark.expects_log("prestaging from volume v: ZeroDivisionError: nothing was read")
def test_a_bug_costs_a_count_for_each_key_and_one_line_of_the_log(
    stored: PoolAgent, caplog: pytest.LogCaptureFixture
) -> None:
    cache, settings = PrestageCache(1 << 20), stored.volume.settings
    prefetcher = Prefetcher(cache, lambda _: (stored.channel, _Broken()), threads=1)  # type: ignore[arg-type, return-value]
    for number in range(100):
        assert prefetcher.request(stored.volume, key_of(number))
    prefetcher.start()
    try:
        wait_until(lambda: cache.counts(settings.volume_id).failed == 100)
    finally:
        prefetcher.stop()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert not cache._expected


def test_what_was_announced_goes_first_and_what_is_too_late_is_not_read(stored: PoolAgent) -> None:
    gate, cache = _Gate(stored), stored.prestage
    assert cache is not None
    prestager = Prefetcher(cache, lambda _: (stored.channel, gate), threads=1)  # type: ignore[arg-type, return-value]
    prestager.start()
    try:
        volume, volume_id = stored.volume, stored.volume.settings.volume_id
        pseudonyms = [volume.placement.pseudonym(key_of(number)) for number in range(8)]
        assert prestager.request(volume, key_of(0))
        assert gate.begun.wait(10)
        assert prestager.guess(volume, pseudonyms[1])
        assert prestager.request(volume, key_of(2), time.monotonic() - 1.0)
        assert prestager.request(volume, key_of(3))
        assert prestager.request(volume, key_of(3)), "on its way"
        assert cache.find(volume_id, pseudonyms[3], 1) is None, "its get came before it"
        gate.open.set()
        wait_until(lambda: cache.holds(volume_id, pseudonyms[1]))
        assert [cache.holds(volume_id, each) for each in pseudonyms[:4]] == [True, True, False, False]
        assert prestager.request(volume, key_of(0)) is None, "it is there"
        assert cache.counts(volume_id).late == 1
        assert not cache._expected
    finally:
        prestager.stop()


def test_a_guess_that_is_announced_goes_first_and_is_read_once(stored: PoolAgent) -> None:
    gate, cache = _Gate(stored), stored.prestage
    assert cache is not None
    prestager = Prefetcher(cache, lambda _: (stored.channel, gate), threads=1, guess_rate=1)  # type: ignore[arg-type, return-value]
    prestager.start()
    try:
        volume, volume_id = stored.volume, stored.volume.settings.volume_id
        pseudonyms = [volume.placement.pseudonym(key_of(number)) for number in range(3)]
        assert prestager.request(volume, key_of(0))
        assert gate.begun.wait(10)
        for pseudonym in pseudonyms[1:]:
            assert prestager.guess(volume, pseudonym)
        assert prestager.request(volume, key_of(2))
        assert prestager.guess(volume, pseudonyms[2]), "on its way"
        gate.open.set()
        wait_until(lambda: not cache._expected)
        assert [cache.holds(volume_id, each) for each in pseudonyms] == [True, True, True]
        assert pseudonyms[2] not in {pseudonym for _, pseudonym in cache._guessed}
        assert cache.counts(volume_id).late_bytes == 0
        assert stored.tally.prestaged_bytes == cache.bytes_held
    finally:
        prestager.stop()


def test_guesses_that_nobody_has_time_for_are_bounded(stored: PoolAgent) -> None:
    cache = stored.prestage
    assert cache is not None
    prestager = Prefetcher(cache, lambda _: (stored.channel, stored.channel), threads=1)
    for number in range(GUESSES_MAX + 9):
        assert prestager.guess(stored.volume, key_of(number))
    assert len(prestager) == len(cache._expected) == GUESSES_MAX
    prestager._threads.clear()
    prestager.stop()
    assert not cache._expected
    assert prestager.guess(stored.volume, A) is False


def test_without_memory_nothing_is_prestaged(stored: PoolAgent) -> None:
    cache = PrestageCache(0)
    prestager = Prefetcher(cache, lambda _: (stored.channel, stored.channel))
    prestager.start()
    assert prestager.request(stored.volume, key_of(0)) is False
    assert not stored.channel.run(stage_now(stored.volume, cache, stored.channel, key_of(0)))
    prestager.stop()


def test_a_deadline_crosses_the_wire_in_milliseconds(stored: PoolAgent) -> None:
    asked: list[int] = []

    def start(_volume: object, _key: bytes, milliseconds: int = 0) -> Outcome:
        asked.append(milliseconds)
        return Outcome.STARTED

    with Pool("", files=SessionDoor(stored, start_prestage=start)) as pool:
        kv = pool.volume("v")
        assert kv.prestage([key_of(0)]) == [True]
        assert kv.prestage([key_of(0)], deadline=0.25) == [True]
        assert kv.prestage([key_of(0)], deadline=1e-9) == [True]
        for over in (0, 0.0, -1.0, float("-inf")):
            assert kv.prestage([key_of(0)], deadline=over) == [False], "it is over, and nothing is asked"
        for wrong in (1e9, float("inf"), float("nan")):
            with pytest.raises(ValueError, match="deadline"):
                kv.prestage([key_of(0)], deadline=wrong)
    assert asked == [0, 250, 1]


def test_the_tables_of_all_volumes_share_one_bound(stored: PoolAgent) -> None:
    other = MemoryPool(volume_id=b"o" * 16).agent().volume
    continuer = Readahead(lambda _volume, _pseudonym: None, entries_max=10)
    for volume in (stored.volume, other):
        continuer.chain(volume, [key_of(number) for number in range(9)])
    sizes = [len(table) for _, table in continuer._tables.values()]
    assert sum(sizes) == 10
    assert all(sizes), "one volume does not push out another"
    other.change(erased=True)
    continuer.chain(stored.volume, [key_of(1)])
    assert [volume for volume, _ in continuer._tables.values()] == [stored.volume]


def test_an_erased_volume_forgets_which_keys_it_saw(stored: PoolAgent) -> None:
    seen = SecondUse()
    serve(stored.volume, admission=seen)
    assert not seen.was_seen(A)
    stored.volume.change(erased=True)
    assert not seen.was_seen(A)


def test_a_missing_block_in_the_middle_is_a_hole_and_those_behind_it_are_served(stored: PoolAgent) -> None:
    assert stored.delete(key_of(2))
    with Pool("", sessions=2, parallel=2, files=SessionDoor(stored)) as pool:
        kv = pool.volume("v")
        buffers = [bytearray(16384) for _ in range(6)]
        keys = [key_of(number) for number in (0, 1, 2, 3, 77, 5)]
        assert kv.get_many(keys, buffers) == [9000, 9000, None, 9000, None, 9000]
        for at, number in enumerate((0, 1, None, 3, None, 5)):
            assert buffers[at] == (bytes(16384) if number is None else value_of(number) + bytes(7384))
        causes = [one.outcome for one in kv.fetch(keys, buffers)]
        assert causes == [
            Outcome.HIT,
            Outcome.HIT,
            Outcome.NEVER_STORED,
            Outcome.HIT,
            Outcome.NEVER_STORED,
            Outcome.HIT,
        ]
