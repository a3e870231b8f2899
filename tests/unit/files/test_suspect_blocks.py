"""A reader gives no file up: what does not prove itself is looked into, with time, and only then lost."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.fs.files import suspect_blocks
from agent.fs.files.face import FilesFace
from agent.fs.files.options import FilesOptions
from agent.fs.files.pool_store import PoolBlockStore
from agent.fs.files.suspect_blocks import LOOK_SECONDS, LOOKS, UNDECIDED_MAX
from agent.pool.format.directory import DIRECTORY_BYTES, ENTRY_BYTES, Directory, count_quarantined
from agent.pool.maintenance.scrub import PAUSE_SECONDS, Scrubber, ScrubCounters, look_into_reports
from agent.pool.volume.directory_cache import COOLDOWN_SECONDS
from agent.pool.volume.settings import Timing
from tests.support.fs.files_calls import FaceCalls
from tests.support.pool.memory_pool import MemoryPool
from tests.support.pool.read_flips import ReadFlips
from tests.unit.files.conftest import refused

BLOCK = 8192
YOUNG_SECONDS = 2 * Timing().write_deadline


def content(number: int, salt: int = 0) -> bytes:
    return random.Random(f"file {number} {salt}").randbytes(1500 * (number + 1))


class Shelves:
    """/fs over a pool in memory, with what the upkeep thread does, and a scrub where a test runs one."""

    def __init__(self, folder: Path) -> None:
        self.pool = MemoryPool((3, 3), value_bytes=BLOCK)
        self.pool.settings = replace(self.pool.settings, kind="files")
        self._folder = folder
        self._starts = 0
        self.lost = 0
        self.flipped = 0
        self.start(1000.0)

    def start(self, clock: float) -> None:
        self._starts += 1
        self.agent = self.pool.agent()
        self.agent.channel.clock = clock
        self.agent.volume.change(files_elsewhere=False)
        self.flips = ReadFlips(self.agent.channel, self._starts)
        store = PoolBlockStore([self.agent.volume], lambda: self.agent.channel)
        options = FilesOptions(staging_bytes=8 * BLOCK, workers=4, cache_seconds=0)
        self.face = FilesFace(
            self._folder / "files.sqlite", store, options, clock=lambda: self.agent.channel.clock
        )
        self.calls = FaceCalls(self.face, self.agent.channel)

    def kill(self) -> None:
        """And start again: nothing that was in memory is left."""
        flips = self.flips
        self.lost += self.face.counters.files_lost
        self.flipped += flips.flipped
        self.face.close()
        self.start(self.agent.channel.clock + COOLDOWN_SECONDS + 1)
        self.flips.share, self.flips.bits, self.flips.namespaces = flips.share, flips.bits, flips.namespaces

    def sync(self, name: str, data: bytes) -> None:
        file = self.calls.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        try:
            self.calls.pwrite(file, data, 0)
            self.calls.fsync(file)
        finally:
            self.calls.close(file)

    def pass_time(self, seconds: float, step: float = 0.5) -> None:
        for _ in range(int(seconds / step)):
            self.agent.channel.clock += step
            self.agent.channel.run(
                look_into_reports([self.agent.volume], self.agent.channel, ScrubCounters())
            )
            while self.agent.channel.run(self.face.collect()):
                pass

    def errno_of(self, name: str) -> int:
        try:
            self.calls.get(name)
        except OSError as refusal:
            return refusal.errno or -1
        return 0

    def slot_of(self, number: int) -> tuple[int, int, int]:
        """Of the first block of the n-th file that was made: namespace, offset of its slot, of its set."""
        [row] = self.face._database.query(
            "SELECT ino, position, version FROM blocks WHERE ino = ? AND position = 0", number + 2
        )
        name = suspect_blocks.block_id(self.face._database.file_system_id, *row)
        return self.agent.where(name)

    def certain(self) -> None:
        """All the time that it takes to give a block up."""
        self.pass_time((LOOKS + 1) * LOOK_SECONDS)


@pytest.fixture
def shelves(tmp_path: Path) -> Iterator[Shelves]:
    made = Shelves(tmp_path)
    for number in range(12):
        made.sync(f"f{number}", content(number))
    made.pass_time(YOUNG_SECONDS + 1)
    yield made
    made.face.close()


def are_whole(shelves: Shelves, *numbers: int) -> bool:
    return all(shelves.calls.get(f"f{number}") == content(number) for number in numbers)


@pytest.mark.parametrize("restart", [False, True])
def test_a_moment_of_damaged_reads_costs_no_file(shelves: Shelves, restart: bool) -> None:
    shelves.flips.share = 1.0
    if restart:
        shelves.kill()
    for _ in range(3):
        for number in range(8):
            assert shelves.errno_of(f"f{number}") == errno.EIO
        shelves.pass_time(60)
    assert shelves.flips.flipped
    shelves.flips.share = 0.0
    assert are_whole(shelves, *range(12))
    shelves.certain()
    assert are_whole(shelves, *range(12))
    assert shelves.face.counters.files_lost == 0


@pytest.mark.expects_log("lost a block", "is set aside")
@pytest.mark.parametrize("what", ["value", "header", "entry", "medium"])
def test_a_block_that_flash_has_lost_takes_its_file_once_that_is_certain(shelves: Shelves, what: str) -> None:
    namespace, slot, directory = shelves.slot_of(5)
    flash = shelves.pool.namespaces[namespace]
    if what == "value":
        flash.flip(slot + 4096 + 77)
    elif what == "header":
        flash.flip(slot + 90)
    elif what == "medium":
        flash.unreadable.add(slot)
    else:
        number = (slot - directory - DIRECTORY_BYTES) // shelves.pool.settings.slot_bytes
        flash.flip(directory + number * ENTRY_BYTES + 20)
        shelves.kill()
    for _ in range(3):
        assert shelves.errno_of("f5") == errno.EIO
    shelves.pass_time((LOOKS - 1) * LOOK_SECONDS)
    assert shelves.errno_of("f5") == errno.EIO, "not before all looks were taken"
    shelves.certain()
    shelves.certain()
    assert shelves.errno_of("f5") == errno.ENOENT
    assert are_whole(shelves, *(number for number in range(12) if number != 5))
    assert shelves.face.gauges().doomed_blocks == 0
    shelves.sync("f5", content(5))
    assert are_whole(shelves, *range(12))


@pytest.mark.expects_log("lost a block", "is set aside")
def test_the_slot_of_a_lost_block_is_set_aside_where_its_medium_is_bad(shelves: Shelves) -> None:
    namespace, slot, directory = shelves.slot_of(5)
    shelves.pool.namespaces[namespace].unreadable.add(slot)
    assert shelves.errno_of("f5") == errno.EIO
    shelves.certain()
    assert shelves.errno_of("f5") == errno.ENOENT
    assert count_quarantined(Directory(shelves.pool.namespaces[namespace].blocks[directory])) == 1


def test_a_drive_that_fails_all_or_does_not_answer_costs_no_file(shelves: Shelves) -> None:
    for state in ("broken", "hung", "down"):
        setattr(shelves.pool.namespaces[1], state, True)
        codes = {shelves.errno_of(f"f{number}") for number in range(12)}
        assert codes == {0, errno.EIO}
        shelves.certain()
        setattr(shelves.pool.namespaces[1], state, False)
        assert are_whole(shelves, *range(12)), state
    assert shelves.face.counters.files_lost == 0


def test_a_block_that_is_read_again_after_all_is_no_suspect_any_more(shelves: Shelves) -> None:
    namespace, slot, _ = shelves.slot_of(5)
    flash = shelves.pool.namespaces[namespace]
    for _ in range(2 * LOOKS):
        flash.unreadable.add(slot)
        assert shelves.errno_of("f5") == errno.EIO
        shelves.pass_time((LOOKS - 1) * LOOK_SECONDS)
        flash.unreadable.clear()
        shelves.pass_time(LOOK_SECONDS)
    assert are_whole(shelves, *range(12))


def test_other_damage_at_each_look_is_the_path_s(shelves: Shelves) -> None:
    """In the one block alone; its neighbours are good."""
    namespace, slot, _ = shelves.slot_of(5)
    flash = shelves.pool.namespaces[namespace]
    for bit in range(4 * LOOKS):
        flash.flip(slot + 4096 + bit)
        assert shelves.errno_of("f5") == errno.EIO
        shelves.pass_time(LOOK_SECONDS)
        flash.flip(slot + 4096 + bit)
    assert are_whole(shelves, *range(12))


@pytest.mark.parametrize("how", ["written over", "cut off", "removed"])
def test_what_is_not_the_file_s_any_more_is_forgotten(shelves: Shelves, how: str) -> None:
    namespace, slot, _ = shelves.slot_of(11)
    shelves.pool.namespaces[namespace].flip(slot + 5000)
    assert shelves.errno_of("f11") == errno.EIO
    file = shelves.calls.open("f11", os.O_RDWR)
    if how == "written over":
        refused(errno.EIO, lambda: shelves.calls.pwrite(file, b"x", 10))
        shelves.calls.pwrite(file, content(11)[:BLOCK], 0)
    elif how == "cut off":
        shelves.calls.do(lambda: shelves.face._content.resize(shelves.face._open_files.get(13), 0, 1))  # type: ignore[arg-type]
        shelves.calls.pwrite(file, content(11), 0)
    else:
        shelves.calls.unlink("f11")
    shelves.calls.close(file)
    if how == "removed":
        shelves.sync("f11", content(11))
    shelves.certain()
    assert len(shelves.face._content.suspects) == 0
    assert are_whole(shelves, *range(12))
    assert shelves.face.counters.files_lost == 0


def test_suspects_are_bounded(shelves: Shelves, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspect_blocks, "SUSPECTS_MAX", 5)
    shelves.flips.share = 1.0
    for number in range(12):
        assert shelves.errno_of(f"f{number}") == errno.EIO
    assert len(shelves.face._content.suspects) == 5
    shelves.pass_time((UNDECIDED_MAX + 2) * LOOK_SECONDS)
    assert len(shelves.face._content.suspects) == 0, "nothing can be said of them; their readers come again"


def test_a_scrub_takes_no_block_of_a_file(shelves: Shelves) -> None:
    namespace, slot, _ = shelves.slot_of(5)
    shelves.pool.namespaces[namespace].unreadable.add(slot)
    before = [dict(each.blocks) for each in shelves.pool.namespaces]
    scrubber = Scrubber([shelves.agent.volume])
    while not scrubber.counters.passes:
        shelves.agent.channel.run(scrubber.advance(shelves.agent.channel))
    assert scrubber.counters.slots_left == 1
    shelves.pass_time(10 * PAUSE_SECONDS)
    assert [each.blocks for each in shelves.pool.namespaces] == before
    shelves.pool.namespaces[namespace].unreadable.clear()
    assert are_whole(shelves, *range(12))


@pytest.mark.parametrize("round_", range(8))
@pytest.mark.expects_log("nothing was removed there", "not one of")
def test_whatever_happens_under_read_flips_every_synced_file_is_whole_afterwards(
    shelves: Shelves, round_: int, seed: int
) -> None:
    """Seeded: reads, synced writes, removals, scrubs, kills, and a path that damages a share of the reads."""
    dice = random.Random(f"{seed} {round_}")
    synced: dict[str, set[bytes]] = {f"f{number}": {content(number)} for number in range(12)}
    scrubber, met, written = Scrubber([shelves.agent.volume]), 0, 0
    for step in range(150):
        if dice.random() < 0.1:
            shelves.flips.share = dice.choice([0.0, 0.05, 0.5, 1.0, 1.0])
            shelves.flips.bits = dice.choice([1, 8, 100])
            shelves.flips.namespaces = dice.choice([None, {0}, {1}])
        name, act = f"f{dice.randrange(16)}", dice.random()
        if act < 0.4:
            code = shelves.errno_of(name)
            assert code in (0, errno.EIO, errno.ENOENT)
            assert code != errno.ENOENT or b"" in synced.get(name, {b""}), f"{name} is gone"
            met += code == errno.EIO
            if code == 0:
                assert shelves.calls.get(name) in synced[name] if not shelves.flips.share else True
        elif act < 0.6:
            data = content(dice.randrange(14), step)
            try:
                shelves.sync(name, data)
                synced[name] = {data}
                written += 1
            except OSError:
                # It was cut to nothing before it was written; how much of it came, nobody was told.
                synced[name] = {b"", *(data[:size] for size in (BLOCK, 2 * BLOCK, len(data)))}
        elif act < 0.7:
            if name in synced:
                shelves.calls.unlink(name)
                del synced[name]
        elif act < 0.75:
            shelves.kill()
            scrubber = Scrubber([shelves.agent.volume])
        elif act < 0.9:
            shelves.pass_time(dice.choice([1, 6, 30]))
        else:
            for _ in range(40):
                shelves.agent.channel.run(scrubber.advance(shelves.agent.channel))
    shelves.flips.share = 0.0
    assert met, f"seed {seed}: no damage was met"
    assert written
    shelves.pass_time(COOLDOWN_SECONDS)
    for restarted in (False, True):
        if restarted:
            shelves.kill()
        for name, contents in synced.items():
            assert shelves.calls.get(name) in contents, f"seed {seed}, round {round_}: {name}"
    assert shelves.lost + shelves.face.counters.files_lost == 0
