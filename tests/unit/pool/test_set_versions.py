"""Processes of one agent: what one has written, the others know at once to be written."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from agent.pool.counters import MissCause
from agent.pool.maintenance.count_uses import COUNTED_MAX, count_uses
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.set_versions import VERSIONS, SetVersions, is_later, place_of, shared_versions
from agent.pool.volume.settings import Timing
from agent.pool.volume.uses import USES_MAX, Uses
from agent.pool.volume.volume import Volume
from agent.pool.write.quota_eviction import evict_one
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of

VALUE = b"value" * 100
BELIEVED = Timing(directory_fresh=1e6)
"""What is remembered is never asked again for its age."""


class Process(PoolAgent):
    """One of an agent's, with directories of its own."""

    def __init__(self, pool: MemoryPool, versions: SetVersions) -> None:
        super().__init__(pool.namespaces, pool.settings, timing=BELIEVED)
        self.cache = DirectoryCache(64 << 20, versions)
        self.volume.cache = self.cache

    def lookup(self, *keys: bytes) -> list[MissCause | None]:
        return self.channel.run(self.volume.lookup(self.channel, keys, self.deadline()))

    def length(self, key: bytes) -> int | None:
        return self.channel.run(self.served.find_length(self.channel, key))


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = shared_versions()
    yield made
    os.close(made)


@pytest.fixture
def processes(descriptor: int) -> tuple[Process, Process]:
    """The one that writes, and one that reads."""
    pool = MemoryPool()
    return (
        Process(pool, SetVersions(descriptor, is_writer=True)),
        Process(pool, SetVersions(descriptor, is_writer=False)),
    )


def test_a_key_that_was_absent_is_found_once_it_is_stored(processes: tuple[Process, Process]) -> None:
    first, reader = processes
    for number in range(100):
        key = key_of(number)
        assert reader.get(key) is MissCause.NEVER_STORED
        assert reader.lookup(key) == [MissCause.NEVER_STORED]
        assert reader.length(key) is None
        first.put(key, VALUE)
        assert reader.get(key) == VALUE
        assert reader.lookup(key) == [None]
        assert reader.length(key) == len(VALUE)


def test_a_key_that_was_deleted_does_not_exist_any_more(processes: tuple[Process, Process]) -> None:
    first, reader = processes
    first.put(key_of(1), VALUE)
    assert reader.lookup(key_of(1)) == [None]
    assert first.delete(key_of(1))
    assert reader.lookup(key_of(1)) == [MissCause.NEVER_STORED]
    first.put(key_of(1), VALUE)
    assert reader.lookup(key_of(1)) == [None]
    assert first.delete(key_of(1))
    assert reader.length(key_of(1)) is None
    assert reader.get(key_of(1)) is MissCause.NEVER_STORED
    first.put(key_of(1), b"another value")
    assert reader.get(key_of(1)) == b"another value"


def test_nothing_is_read_again_where_nothing_was_written(processes: tuple[Process, Process]) -> None:
    first, reader = processes
    first.put(key_of(1), VALUE)
    for _ in range(3):
        reader.get(key_of(1))
        reader.lookup(key_of(1), key_of(2))
    read = reader.tally.directory_reads
    for _ in range(3):
        assert reader.get(key_of(2)) is MissCause.NEVER_STORED
        assert reader.lookup(key_of(1), key_of(2)) == [None, MissCause.NEVER_STORED]
    assert reader.tally.directory_reads == read


def test_the_process_that_writes_never_takes_what_it_remembers_for_old(
    processes: tuple[Process, Process],
) -> None:
    first, _ = processes
    for number in range(20):
        first.put(key_of(number), VALUE)
    read = first.tally.directory_reads
    assert first.get(key_of(100)) is MissCause.NEVER_STORED
    assert first.tally.directory_reads == read


def test_a_directory_that_was_read_before_a_write_is_old(processes: tuple[Process, Process]) -> None:
    first, reader = processes
    first.put(key_of(1), VALUE)
    with reader.volume.borrowed(reader.volume.placement.pseudonym(key_of(1))) as sets:
        loading = reader.volume.load(reader.channel, sets, reader.deadline())
        reader.channel.run(loading)
        assert not any(cached.is_overtaken() for cached in sets)
        noted = [cached.shared_version() for cached in sets]
        first.put(key_of(1), VALUE)  # there already: nothing is written
        assert [cached.shared_version() for cached in sets] == noted
        first.delete(key_of(1))
        assert any(cached.is_overtaken() for cached in sets)


def test_no_version_is_lost_or_taken_back_by_threads(descriptor: int) -> None:
    versions, times = SetVersions(descriptor, is_writer=True), 2000

    def raise_them() -> None:
        for _ in range(times):
            versions.raise_at(7)

    threads = [threading.Thread(target=raise_them) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert SetVersions(descriptor, is_writer=False).of(7) == 4 * times


def test_versions_wrap_and_the_map_version_is_another_matter(descriptor: int) -> None:
    first, reader = SetVersions(descriptor, is_writer=True), SetVersions(descriptor, is_writer=False)
    first._versions[VERSIONS - 1] = (1 << 32) - 1
    first.raise_at(VERSIONS - 1)
    assert reader.of(VERSIONS - 1) == 0
    first.say_map_version(1 << 40)
    assert (reader.map_version, reader.of(VERSIONS - 1)) == (1 << 40, 0)
    with pytest.raises(TypeError):
        reader.raise_at(0)


def test_directories_of_a_volume_rarely_share_a_version() -> None:
    set_bytes = 4096 + 64 * (4096 + (1 << 20))
    places = {place_of(namespace, number * set_bytes) for namespace in range(4) for number in range(500)}
    assert len(places) > 1950


def test_uses_of_a_reader_count_where_directories_are_written(processes: tuple[Process, Process]) -> None:
    first, reader = processes
    reader.volume.change(uses=(uses := Uses()))
    keys = [key_of(number) for number in range(10)]
    for key in keys:
        first.put(key, VALUE)
    for key in keys[:5]:
        for _ in range(3):
            assert reader.get(key) == VALUE
    for _ in range(2 * COUNTED_MAX):
        assert reader.get(keys[5]) == VALUE
    handed = uses.hand_over()
    assert (len(handed), len(uses)) == (6, 0)
    first.channel.run(count_uses([first.volume], first.channel, handed))
    assert [hits_of(first.volume, key) for key in keys] == [3] * 5 + [COUNTED_MAX] + [0] * 4
    # Of an entry that another value has by now nothing is counted, nor of a directory of no volume.
    first.delete(keys[0])
    first.put(keys[0], VALUE)
    elsewhere = handed[0]._replace(offset=1 << 39)
    first.channel.run(count_uses([first.volume], first.channel, [*handed[:1], elsewhere]))
    assert hits_of(first.volume, keys[0]) == 0


def hits_of(volume: Volume, key: bytes) -> int:
    pseudonym = volume.placement.pseudonym(key)
    with volume.borrowed(pseudonym) as sets:
        (found,) = volume.find(sets, pseudonym)
        return found.entry.hits


def test_uses_that_are_not_handed_over_are_bounded() -> None:
    uses = Uses()
    for number in range(USES_MAX + 100):
        uses.note(0, 0, 0, number)
    uses.note(0, 0, 0, 1)
    assert len(uses) == USES_MAX
    handed = uses.hand_over()
    assert sum(each.times for each in handed) == USES_MAX + 1


def get_together(process: Process, *keys: bytes) -> list[int | MissCause | None]:
    targets = [memoryview(bytearray(process.volume.settings.value_bytes)) for _ in keys]
    steps = process.served.read_together(process.channel, keys, targets, None)
    assert steps is not None
    return process.channel.run(steps)


def evict(process: Process) -> None:
    """Take out the one value that there is, and leave its slot as it is."""
    assert process.channel.run(evict_one(process.volume, process.channel, process.deadline()))


def test_a_value_that_was_evicted_is_not_served_once_it_was_deleted_or_replaced(
    processes: tuple[Process, Process],
) -> None:
    first, reader = processes
    first.put(key_of(1), VALUE)
    assert reader.get(key_of(1)) == VALUE
    evict(first)
    assert not first.delete(key_of(1))
    assert reader.get(key_of(1)) is MissCause.EVICTED
    first.put(key_of(1), b"another value")
    assert reader.get(key_of(1)) == b"another value"


def test_a_batch_serves_no_value_that_was_evicted_and_deleted(processes: tuple[Process, Process]) -> None:
    first, reader = processes
    first.put(key_of(1), VALUE)
    assert get_together(reader, key_of(1), key_of(2)) == [len(VALUE), MissCause.NEVER_STORED]
    evict(first)
    assert not first.delete(key_of(1))
    assert get_together(reader, key_of(1), key_of(2)) == [MissCause.EVICTED, MissCause.NEVER_STORED]
    first.put(key_of(1), b"another value")
    assert get_together(reader, key_of(1)) == [len(b"another value")]


def test_no_value_is_served_by_a_directory_that_was_overtaken_and_does_not_come(
    processes: tuple[Process, Process],
) -> None:
    first, reader = processes
    first.put(key_of(1), VALUE)
    assert reader.get(key_of(1)) == VALUE
    evict(first)
    for namespace in first.channel.namespaces:
        namespace.down = True
    assert reader.get(key_of(1)) is MissCause.ENCLOSURE_DOWN
    assert get_together(reader, key_of(1)) == [None]


def test_a_read_that_was_answered_late_takes_back_nothing(processes: tuple[Process, Process]) -> None:
    first, reader = processes
    with reader.volume.borrowed(reader.volume.placement.pseudonym(key_of(1))) as sets:
        reader.channel.run(reader.volume.load(reader.channel, sets, reader.deadline()))
        older = [(cached, cached.shared_version(), cached.directory) for cached in sets]
        blocks = [memoryview(directory.image()) for _, _, directory in older if directory is not None]
        first.put(key_of(1), VALUE)
        assert reader.get(key_of(1)) == VALUE
        for (cached, version, _), block in zip(older, blocks, strict=True):
            cached.accept(block, reader.channel.now(), cached.writes, version=version)
        assert reader.volume.find(sets, reader.volume.placement.pseudonym(key_of(1)))


def test_a_version_is_later_than_those_before_it_also_where_they_wrap() -> None:
    assert is_later(2, 1)
    assert not is_later(1, 1)
    assert not is_later(1, 2)
    assert is_later(0, (1 << 32) - 1)
    assert not is_later((1 << 32) - 1, 0)
