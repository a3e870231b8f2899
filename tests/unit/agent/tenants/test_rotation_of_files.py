"""A rotation costs no file: one agent seals the blocks anew, and another's key is no reason to give up."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.attach.map_watch import EVERY_SECONDS
from agent.config.configuration import ScrubSection
from agent.fs.files.face import FilesFace
from agent.fs.files.options import FilesOptions
from agent.fs.files.pool_store import PoolBlockStore
from agent.fs.files.suspect_blocks import LOOK_SECONDS, LOOKS
from agent.pool.format.directory import DIRECTORY_BYTES, Directory, Entry
from agent.pool.map.commit import replace_map
from agent.pool.map.tenant_changes import without_key
from agent.pool.volume.key_transition import MAP_AGE_SECONDS, SETTLE_SECONDS
from agent.remote.channel import WorkerChannel
from agent.service.repair import Repair
from agent.tenancy.key_rotation import LEFTOVERS_SECONDS
from tests.support.fs.files_calls import FaceCalls
from tests.unit.agent.tenants.test_key_rotation import NUMBERS, STEP, Shelf
from tests.unit.agent.tenants.test_rotation_ends import Watching, publish

BLOCK = 1 << 18
YOUNG_SECONDS = 2 * 5.0


class Serving(Watching):
    """An agent with a /fs of its own, which keeps volumes of blocks by the rule of
    agent/service/repair.py."""

    def __init__(self, shelf: Shelf, folder: Path) -> None:
        super().__init__(shelf)
        self.volume.change(files_elsewhere=True)
        folder.mkdir(exist_ok=True)
        store = PoolBlockStore([self.volume], lambda: self.channel)
        options = FilesOptions(staging_bytes=8 * BLOCK, workers=4, cache_seconds=0)
        self.face = FilesFace(folder / "files.sqlite", store, options, clock=self.channel.now)
        self.files = FaceCalls(self.face, self.channel)
        self.keys.unnamed = self.face.orphans
        section = ScrubSection.model_validate({})
        self.keeping = Repair(
            section, [self.volume], _no_channel, list, lambda _: self.face.gauges().is_anything
        )

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / STEP)):
            super().pass_time(STEP)
            self.channel.run(self.keeping.look(self.channel))
            while self.channel.run(self.face.collect()):
                pass

    def errno_of(self, name: str) -> int:
        with pytest.raises(OSError) as refused:
            self.files.get(name)
        return refused.value.errno or 0


def _no_channel() -> WorkerChannel:
    raise AssertionError("nothing is scrubbed")


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    shelf = Shelf(tmp_path, kind="files")
    publish(shelf, shelf.pool_map)
    return shelf


@pytest.fixture
def agents(shelf: Shelf, tmp_path: Path) -> Iterator[tuple[Serving, Serving]]:
    """One with files, and one without."""
    pair = Serving(shelf, tmp_path / "one"), Serving(shelf, tmp_path / "other")
    for number in range(20):
        pair[0].files.put(f"file{number}", content(number))
    for agent in pair:
        agent.pass_time(2)
    yield pair
    for agent in pair:
        agent.face.close()


def content(number: int) -> bytes:
    return bytes([number + 1]) * (1000 + 5000 * number)


def are_whole(agent: Serving, *numbers: int) -> bool:
    return all(agent.files.get(f"file{number}") == content(number) for number in numbers)


def seal_anew(other: Serving) -> None:
    """By an agent of an earlier release, say, or one with files of its own there; what the blocks have left
    is used for others since."""
    before = {(place, slot) for place, slot, _ in named(other)}
    other.volume.change(files_elsewhere=False)
    other.pass_time(30)
    assert other.left() == 0
    for (namespace, offset), slot in before - {(place, slot) for place, slot, _ in named(other)}:
        header = offset + DIRECTORY_BYTES + slot * other.volume.settings.slot_bytes
        other.shelf.namespaces[namespace].blocks[header] = bytes(4096)


# -- whoever is behind -----------------------------------------------------------------------------------


def test_a_block_under_a_key_that_is_not_known_yet_is_not_lost(
    shelf: Shelf, agents: tuple[Serving, Serving]
) -> None:
    stopped, other = agents
    publish(shelf, shelf.rotate())
    seal_anew(other)
    stopped.channel.clock += MAP_AGE_SECONDS + SETTLE_SECONDS
    for number in range(20):
        assert stopped.errno_of(f"file{number}") == errno.EIO
    handle = stopped.files.open("file7", 1)  # O_WRONLY
    with pytest.raises(OSError) as refused:
        stopped.files.pwrite(handle, b"y", 10)
    assert refused.value.errno == errno.EIO
    stopped.files.close(handle)
    assert len(stopped.files.listdir("")) == 20
    assert stopped.face.counters.files_lost == 0
    stopped.pass_time(EVERY_SECONDS + STEP)
    assert are_whole(stopped, *range(20))
    publish(shelf, shelf.end())
    stopped.channel.clock += MAP_AGE_SECONDS
    assert are_whole(stopped, *range(20)), "the key that it knows opens all"


def test_a_map_on_one_namespace_only_costs_no_file(shelf: Shelf, agents: tuple[Serving, Serving]) -> None:
    behind, other = agents
    shelf.rotate()
    [second] = [{nguid: number} for nguid, number in NUMBERS.items() if number == 1]
    assert set(behind.channel.run(replace_map(behind.channel, shelf.pool_map, second))) <= set(NUMBERS)
    seal_anew(other)
    # It looks, in time, where there is nothing new.
    behind.volume.map_age.note(behind.channel.now())
    assert {behind.errno_of(f"file{number}") for number in range(20)} == {errno.EIO}
    shelf.namespaces[1].down = True
    assert {behind.errno_of(f"file{number}") for number in range(20)} == {errno.EIO}
    shelf.namespaces[1].down = False
    behind.pass_time(3 * EVERY_SECONDS)
    assert are_whole(behind, *range(20))
    assert behind.face.counters.files_lost == 0


@pytest.mark.expects_log("lost a block")
def test_what_the_newest_map_does_not_open_is_lost_once_all_namespaces_were_asked(
    shelf: Shelf, agents: tuple[Serving, Serving]
) -> None:
    agent, _ = agents
    place, slot, _ = next(named(agent))
    header = place[1] + DIRECTORY_BYTES + slot * agent.volume.settings.slot_bytes
    shelf.namespaces[place[0]].blocks[header] = bytes(4096)
    shelf.namespaces[1 - place[0]].down = True
    codes = {name: _errno(agent, name) for name in sorted(agent.files.listdir(""))}
    assert set(codes.values()) <= {0, errno.EIO}
    agent.pass_time((LOOKS + 1) * LOOK_SECONDS)
    assert len(agent.files.listdir("")) == 20, "whether there is a newer map cannot be told"
    shelf.namespaces[1 - place[0]].down = False
    codes = {name: _errno(agent, name) for name in codes}
    assert sorted(codes.values()) == [0] * 19 + [errno.EIO]
    agent.pass_time((LOOKS + 1) * LOOK_SECONDS)
    codes = {name: _errno(agent, name) for name in codes}
    assert sorted(codes.values()) == [0] * 19 + [errno.ENOENT]
    assert agent.face.counters.files_lost == 1


@pytest.mark.expects_log("was erased")
def test_a_map_that_says_that_the_tenant_was_erased_removes_no_file(
    shelf: Shelf, agents: tuple[Serving, Serving]
) -> None:
    agent, _ = agents
    publish(shelf, without_key(shelf.pool_map, "blue"))
    agent.pass_time(2 * EVERY_SECONDS + STEP)
    assert agent.volume.erased
    for _ in range(2):
        assert agent.errno_of("file7") == errno.EIO
    assert agent.face.counters.files_lost == 0
    agent.files.unlink("file7")
    agent.pass_time(1)
    assert agent.face.gauges().doomed_blocks == 0


def _errno(agent: Serving, name: str) -> int:
    try:
        agent.files.get(name)
    except OSError as refused:
        return refused.errno or 0
    return 0


# -- who seals anew --------------------------------------------------------------------------------------


def test_an_agent_without_files_writes_no_directory_of_files(
    shelf: Shelf, agents: tuple[Serving, Serving]
) -> None:
    keeper, other = agents
    publish(shelf, shelf.rotate())
    before = [each.writes for each in shelf.namespaces]
    other.pass_time(60)
    assert [each.writes for each in shelf.namespaces] == before
    assert other.row["rotating"], "it opens with both keys"
    assert keeper.left() == 20
    keeper.pass_time(60)
    assert keeper.left() == 0
    assert keeper.row["resealed"] == 20
    publish(shelf, shelf.end())
    for agent in agents:
        agent.pass_time(EVERY_SECONDS + STEP)
    assert are_whole(keeper, *range(20))
    # Once it has a file, it keeps what lies there.
    other.files.put("own", b"x" * 100)
    other.pass_time(STEP)
    assert not other.volume.files_elsewhere


@pytest.mark.parametrize("kind", ["zeros", "another key"])
def test_an_entry_that_no_file_has_and_that_does_not_open_does_not_keep_a_rotation_from_its_end(
    shelf: Shelf, agents: tuple[Serving, Serving], kind: str
) -> None:
    keeper, _ = agents
    entries = {entry.pseudonym: (place, slot) for place, slot, entry in named(keeper)}
    images = {place: shelf.namespaces[place[0]].blocks[place[1]] for place, _ in entries.values()}
    keeper.files.unlink("file3")
    keeper.pass_time(2)
    left = {entry.pseudonym for _, _, entry in named(keeper)}
    [(place, slot)] = [entries[each] for each in entries if each not in left]
    # Another agent's image of the directory goes over ours, as it was before.
    shelf.namespaces[place[0]].blocks[place[1]] = images[place]
    header = place[1] + DIRECTORY_BYTES + slot * keeper.volume.settings.slot_bytes
    assert not any(shelf.namespaces[place[0]].blocks[header])
    if kind == "another key":
        other = next(at for at, number, _ in named(keeper) if (at, number) != (place, slot))
        number = next(number for at, number, _ in named(keeper) if at == other)
        source = other[1] + DIRECTORY_BYTES + number * keeper.volume.settings.slot_bytes
        block = bytearray(shelf.namespaces[other[0]].blocks[source])
        block[16] ^= 1  # the fingerprint of its key
        shelf.namespaces[place[0]].blocks[header] = bytes(block)
    keeper.pass_time(YOUNG_SECONDS)
    assert len(list(named(keeper))) == 20
    publish(shelf, shelf.rotate())
    keeper.pass_time(40)
    assert keeper.left() == 0
    publish(shelf, shelf.end())
    keeper.pass_time(EVERY_SECONDS + STEP)
    assert are_whole(keeper, *(number for number in range(20) if number != 3))
    assert keeper.face.counters.files_lost == 0


def test_a_block_that_a_file_has_is_left_to_its_reader_however_damaged(
    shelf: Shelf, agents: tuple[Serving, Serving]
) -> None:
    keeper, _ = agents
    place, slot, _ = next(named(keeper))
    header = place[1] + DIRECTORY_BYTES + slot * keeper.volume.settings.slot_bytes
    good = shelf.namespaces[place[0]].blocks[header]
    shelf.namespaces[place[0]].blocks[header] = bytes(4096)
    keeper.pass_time(YOUNG_SECONDS)
    publish(shelf, shelf.rotate())
    keeper.pass_time(40 + LEFTOVERS_SECONDS)
    assert keeper.left() == 1
    shelf.namespaces[place[0]].blocks[header] = good
    keeper.pass_time(40)
    assert keeper.left() == 0
    assert are_whole(keeper, *range(20))


def named(agent: Serving) -> Iterator[tuple[tuple[int, int], int, Entry]]:
    """Place, slot and entry of every block that flash names."""
    settings = agent.volume.settings
    for extent in settings.extents:
        for number in range(extent.sets):
            offset = extent.offset + number * settings.set_bytes
            block = agent.shelf.namespaces[extent.namespace].blocks.get(offset, bytes(DIRECTORY_BYTES))
            for slot, entry in Directory(block):
                yield (extent.namespace, offset), slot, entry
