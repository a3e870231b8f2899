"""Killed at any moment, /fs loses at most what was not acknowledged.

The world is photographed (metadata file, log and store) at every step that the store sees, which is
where a process can die with something half done. A new face is then started from each photograph.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.fs.files.face import FilesFace
from tests.support.fs.files_calls import FaceCalls
from tests.support.pool.inline_runner import InlineRunner
from tests.support.pool.memory_blocks import MemoryBlockStore
from tests.unit.files.conftest import BLOCK, CAPACITIES, World


@dataclass(frozen=True)
class Photograph:
    folder: Path
    blocks: dict[bytes, tuple[int, bytes]]
    acknowledged: bytes
    possible: dict[int, set[bytes]]


class Photographer:
    """Takes a photograph before every step, with what the file may contain then."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.folder = folder
        self.taken: list[Photograph] = []
        self.acknowledged = b""
        self.possible: dict[int, set[bytes]] = {}
        world.store.before = self.take

    def take(self, step: str) -> None:
        folder = self.folder / f"{len(self.taken)}-{step}"
        folder.mkdir(parents=True)
        for suffix in ("", "-wal"):
            shutil.copy(f"{self.world.metadata}{suffix}", folder / f"files.sqlite{suffix}")
        possible = {position: set(versions) for position, versions in self.possible.items()}
        photograph = Photograph(folder, dict(self.world.store.blocks), self.acknowledged, possible)
        self.taken.append(photograph)

    def wrote(self, content: bytes) -> None:
        """The whole file would now read as `content`; each block of it may already be on flash."""
        for position in range(0, len(content), BLOCK):
            block = content[position : position + BLOCK].ljust(BLOCK, b"\0")
            self.possible.setdefault(position, set()).add(block)

    def synced(self, content: bytes) -> None:
        self.acknowledged = content
        self.possible = {}
        self.wrote(content)


def start_from(photograph: Photograph) -> tuple[FilesFace, FaceCalls, MemoryBlockStore]:
    store = MemoryBlockStore(CAPACITIES)
    store.blocks = dict(photograph.blocks)
    face = FilesFace(photograph.folder / "files.sqlite", store)
    return face, FaceCalls(face, InlineRunner()), store


def check(photograph: Photograph) -> None:
    face, calls, store = start_from(photograph)
    try:
        assert face.orphans(store.blocks) == [], "a block that nobody knows of"
        if "file" in calls.listdir(""):
            content = calls.get("file")
            assert len(content) >= len(photograph.acknowledged)
            for at in range(0, len(content), BLOCK):
                block = content[at : at + BLOCK].ljust(BLOCK, b"\0")
                if block == bytes(BLOCK) and at >= len(photograph.acknowledged):
                    continue  # a hole where nothing was acknowledged
                assert block in photograph.possible[at], f"{photograph.folder.name}: block at {at}"
        else:
            assert not photograph.acknowledged
        # What was left over goes, what is in use stays, and the names of new blocks are new.
        while face.gauges().doomed_blocks:
            assert calls.do(face.collect)
        calls.put("after", b"x" * 3 * BLOCK)
        assert calls.get("after") == b"x" * 3 * BLOCK
        for name in calls.listdir(""):
            calls.get(name)
            calls.unlink(name)
        while face.gauges().doomed_blocks:
            assert calls.do(face.collect)
        assert store.blocks == {}
    finally:
        face.close()


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_step_a_file_has_what_was_synced_or_newer(
    world: World, tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    photographer = Photographer(world, tmp_path / "photographs")
    file = world.calls.open("file", os.O_CREAT | os.O_RDWR)
    content = b""
    for number in range(60):
        if dice.random() < 0.2:
            world.calls.fsync(file)
            photographer.synced(content)
            continue
        offset = dice.randrange(0, 5 * BLOCK)
        data = f"[{number}]".encode() * dice.randrange(1, 3000)
        end = offset + len(data)
        # The write passes through states in which a part of its blocks is sealed: each block by itself.
        content = content.ljust(end, b"\0")
        content = content[:offset] + data + content[end:]
        photographer.wrote(content)
        assert world.calls.pwrite(file, data, offset) == len(data)
    world.calls.close(file)
    photographer.synced(content)
    photographer.take("end")
    assert len(photographer.taken) > 80
    for photograph in photographer.taken:
        check(photograph)


def test_killed_while_files_are_made_replaced_and_removed(world: World, tmp_path: Path) -> None:
    """The way editors save: write a new file, sync, rename it over the old one. Never neither, never half."""
    versions = [f"version {number} ".encode() * 700 for number in range(12)]
    world.calls.put("file", versions[0])
    photographer = Photographer(world, tmp_path / "photographs")
    marks: list[int] = []
    for content in versions[1:]:
        file = world.calls.open("new", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        world.calls.pwrite(file, content, 0)
        world.calls.fsync(file)
        world.calls.close(file)
        world.calls.rename("new", "file")
        marks.append(len(photographer.taken))
    photographer.take("end")
    for number, photograph in enumerate(photographer.taken):
        face, calls, _ = start_from(photograph)
        done = sum(mark <= number for mark in marks)
        assert calls.get("file") == versions[done]
        face.close()


def test_a_file_unlinked_while_open_is_swept_after_a_crash(world: World) -> None:
    file = world.calls.open("file", os.O_CREAT | os.O_RDWR)
    world.calls.pwrite(file, b"x" * 3 * BLOCK, 0)
    world.calls.fsync(file)
    world.calls.unlink("file")
    assert world.calls.pread(file, 3 * BLOCK, 0) == b"x" * 3 * BLOCK
    assert world.store.blocks
    world.restart()
    assert world.face.gauges().inodes == 1
    world.collect()
    assert world.store.blocks == {}


def test_what_was_only_written_may_be_lost_but_the_file_is_whole(world: World) -> None:
    world.calls.put("file", b"old" * 1000)
    file = world.calls.open("file", os.O_WRONLY)
    world.calls.pwrite(file, b"new", 0)
    world.restart()
    assert world.calls.get("file") == b"old" * 1000


def test_deletions_wait_until_what_replaced_the_block_is_durable(world: World) -> None:
    steps: list[str] = []
    world.calls.put("file", b"one" * 1000)
    world.calls.put("file", b"two" * 1000)
    world.store.before = steps.append
    world.collect()
    assert steps == ["flush", "delete"]


def test_versions_are_never_given_out_twice(world: World) -> None:
    """The store asserts that no identifier comes back; here the counter starts again after each crash."""
    for number in range(5):
        world.calls.put("file", bytes([number]) * 100)
        world.restart()
    assert world.calls.get("file") == bytes([4]) * 100
