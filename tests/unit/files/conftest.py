"""What the tests of /fs share: a small store, a face on it, and a way to start it again after a crash."""

from __future__ import annotations

import dataclasses
import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.fs.files.face import FilesFace
from agent.fs.files.options import FilesOptions
from agent.fs.files.suspect_blocks import LOOK_SECONDS, LOOKS
from tests.support.fs.files_calls import FaceCalls
from tests.support.pool.inline_runner import InlineRunner
from tests.support.pool.memory_blocks import MemoryBlockStore

CAPACITIES = (512, 2048, 8192)
BLOCK = 8192


class World:
    """A face over a store; `restart` is what remains of both after kill -9."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = folder / "files.sqlite"
        self.store = MemoryBlockStore(CAPACITIES)
        self.options = FilesOptions(staging_bytes=4 * BLOCK, workers=4, cache_seconds=0)
        self.now_ns = 1_700_000_000_000_000_000
        self.later = 0.0
        """Seconds that the clock is ahead."""
        self._faces: list[FilesFace] = []
        self.start()

    def tick(self) -> int:
        """Time goes on a little with every question for it."""
        self.now_ns += 1000
        return self.now_ns

    def start(self) -> None:
        self.face = FilesFace(
            self.metadata,
            self.store,
            self.options,
            clock=lambda: time.monotonic() + self.later,
            wall_ns=self.tick,
        )
        self._faces.append(self.face)
        self.calls = FaceCalls(self.face, InlineRunner())

    def restart(self, **options: object) -> None:
        """Forget everything in memory and begin again from the metadata file and the store."""
        self.face.close()
        self.options = dataclasses.replace(self.options, **options)  # type: ignore[arg-type]
        self.start()

    def collect(self) -> None:
        """Delete everything that is doomed."""
        while self.face.gauges().doomed_blocks:
            assert self.calls.do(self.face.collect)

    def look_into_suspects(self, looks: int = LOOKS) -> None:
        """So many of the looks that a suspect block is given, with the time between them."""
        for _ in range(looks):
            self.later += LOOK_SECONDS + 0.01
            self.calls.do(self.face.collect)

    def close(self) -> None:
        for face in self._faces:
            face.close()


def refused(code: int, call: Callable[[], object]) -> None:
    """The call fails with this errno."""
    with pytest.raises(OSError) as refusal:
        call()
    assert refusal.value.errno == code, f"{errno.errorcode[refusal.value.errno or 0]}"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()
