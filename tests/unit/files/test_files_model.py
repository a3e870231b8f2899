"""/fs against a real file system: the same random calls on both, the same results, at every step.

The store is tiny and staging memory holds two blocks, so that nearly every call seals, evicts buffers
and reads back. `crash` starts again from the metadata file and the store alone: with all files closed,
nothing may differ afterwards.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent.fs.files.face import FilesFace
from agent.fs.files.options import FilesOptions
from tests.support.fs.files_calls import FaceCalls, RealCalls
from tests.support.pool.inline_runner import InlineRunner
from tests.support.pool.memory_blocks import MemoryBlockStore

CAPACITIES = (512, 2048, 8192)
BLOCK = 8192
NAMES = st.sampled_from(["a", "b", "c", "d", "d/a", "d/b", "e", "e/a", "e/d", "e/d/a", "missing/x"])
OFFSETS = st.one_of(
    st.integers(0, 5 * BLOCK), st.sampled_from([0, 511, 512, 2048, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
)
LENGTHS = st.one_of(st.integers(1, 3 * BLOCK), st.sampled_from([1, 512, 513, BLOCK, 2 * BLOCK]))
OPEN_FLAGS = st.sampled_from(
    [
        os.O_RDWR,
        os.O_RDWR | os.O_CREAT,
        os.O_RDWR | os.O_CREAT | os.O_EXCL,
        os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    ]
)
HANDLES_MAX = 4
KEEP_SIZE, PUNCH_HOLE = 1, 2


class FilesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        base = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.folder = Path(tempfile.mkdtemp(prefix="g35-files-", dir=base))
        (self.folder / "real").mkdir()
        self.store = MemoryBlockStore(CAPACITIES)
        self.start()
        self.real = RealCalls(self.folder / "real")
        self.open_files: list[tuple[Any, int]] = []
        self.written = 0

    def start(self) -> None:
        options = FilesOptions(staging_bytes=2 * BLOCK, workers=1)
        self.face = FilesFace(self.folder / "files.sqlite", self.store, options)
        self.ours = FaceCalls(self.face, InlineRunner())

    def teardown(self) -> None:
        for ours, real in self.open_files:
            self.ours.close(ours)
            self.real.close(real)
        try:
            assert self.ours.tree() == self.real.tree()
            while self.face.gauges().doomed_blocks:
                self.ours.do(self.face.collect)
            assert self.face.orphans(self.store.blocks) == []
            gauges = self.face.gauges()
            assert (gauges.open_files, gauges.staged_blocks, gauges.staging_bytes) == (0, 0, 0)
        finally:
            self.face.close()
            shutil.rmtree(self.folder)

    def both(self, call: str, *arguments: Any, exact: bool = True, **keywords: Any) -> tuple[Any, Any]:
        """Do the same to both; they succeed alike or fail alike."""
        results: list[Any] = []
        for side in (self.ours, self.real):
            try:
                results.append(getattr(side, call)(*arguments, **keywords))
            except OSError as refusal:
                results.append(refusal)
        ours, real = results
        if isinstance(ours, OSError) or isinstance(real, OSError):
            assert isinstance(ours, OSError), f"{call}{arguments}: only the real one refused: {real}"
            assert isinstance(real, OSError), f"{call}{arguments}: only ours refused: {ours}"
            if exact:
                assert ours.errno == real.errno, f"{call}{arguments}: {ours} / {real}"
        return ours, real

    def same(self, call: str, *arguments: Any, **keywords: Any) -> None:
        ours, real = self.both(call, *arguments, **keywords)
        if not isinstance(ours, OSError):
            assert ours == real

    def on_open(self, pick: int, call: str, *arguments: Any) -> None:
        ours_file, real_file = self.open_files[pick % len(self.open_files)]
        ours = getattr(self.ours, call)(ours_file, *arguments)
        real = getattr(self.real, call)(real_file, *arguments)
        assert ours == real, f"{call}{arguments}"

    def content(self, length: int) -> bytes:
        """Bytes that tell by themselves which write they are from."""
        self.written += 1
        pattern = f"<{self.written}>".encode()
        return (pattern * (length // len(pattern) + 1))[:length]

    @precondition(lambda self: len(self.open_files) < HANDLES_MAX)
    @rule(path=NAMES, flags=OPEN_FLAGS)
    def open_file(self, path: str, flags: int) -> None:
        ours, real = self.both("open", path, flags, exact=False)
        if not isinstance(ours, OSError):
            self.open_files.append((ours, real))

    @precondition(lambda self: self.open_files)
    @rule(pick=st.integers(0, 99))
    def close_file(self, pick: int) -> None:
        ours, real = self.open_files.pop(pick % len(self.open_files))
        self.ours.close(ours)
        self.real.close(real)

    @precondition(lambda self: self.open_files)
    @rule(pick=st.integers(0, 99), offset=OFFSETS, length=LENGTHS)
    def write(self, pick: int, offset: int, length: int) -> None:
        self.on_open(pick, "pwrite", self.content(length), offset)

    @precondition(lambda self: self.open_files)
    @rule(pick=st.integers(0, 99), offset=OFFSETS, length=LENGTHS)
    def read(self, pick: int, offset: int, length: int) -> None:
        self.on_open(pick, "pread", length, offset)

    @precondition(lambda self: self.open_files)
    @rule(pick=st.integers(0, 99))
    def read_all_and_stat(self, pick: int) -> None:
        self.on_open(pick, "fstat")
        self.on_open(pick, "pread", 16 * BLOCK, 0)

    @precondition(lambda self: self.open_files)
    @rule(pick=st.integers(0, 99), size=OFFSETS)
    def ftruncate(self, pick: int, size: int) -> None:
        self.on_open(pick, "ftruncate", size)

    @precondition(lambda self: self.open_files)
    @rule(pick=st.integers(0, 99), offset=OFFSETS, length=LENGTHS)
    def punch(self, pick: int, offset: int, length: int) -> None:
        self.on_open(pick, "fallocate", PUNCH_HOLE | KEEP_SIZE, offset, length)

    @precondition(lambda self: self.open_files)
    @rule(pick=st.integers(0, 99), offset=OFFSETS, length=LENGTHS, keep=st.booleans())
    def reserve(self, pick: int, offset: int, length: int, keep: bool) -> None:
        self.on_open(pick, "fallocate", KEEP_SIZE if keep else 0, offset, length)

    @precondition(lambda self: self.open_files)
    @rule(pick=st.integers(0, 99))
    def fsync(self, pick: int) -> None:
        self.on_open(pick, "fsync")

    @rule(path=NAMES, size=OFFSETS)
    def truncate(self, path: str, size: int) -> None:
        self.same("truncate", path, size)

    @rule(path=NAMES)
    def make_directory(self, path: str) -> None:
        self.same("mkdir", path)

    @rule(path=NAMES)
    def remove_directory(self, path: str) -> None:
        self.same("rmdir", path)

    @rule(path=NAMES)
    def unlink(self, path: str) -> None:
        self.same("unlink", path)

    @rule(old=NAMES, new=NAMES, flags=st.sampled_from([0, 0, 0, 1, 2]))
    def rename(self, old: str, new: str, flags: int) -> None:
        # Which of several reasons to refuse a rename is found first is the kernel's business.
        self.both("rename", old, new, flags, exact=False)

    @rule(old=NAMES, new=NAMES)
    def link(self, old: str, new: str) -> None:
        self.both("link", old, new, exact=False)

    @rule(to=st.sampled_from(["x", "../y"]), path=NAMES)
    def symlink(self, to: str, path: str) -> None:
        self.same("symlink", to, path)

    @rule(path=NAMES)
    def readlink(self, path: str) -> None:
        self.same("readlink", path)

    @rule(path=NAMES, mode=st.sampled_from([0o600, 0o755, 0o4755]))
    def chmod(self, path: str, mode: int) -> None:
        self.both("chmod", path, mode, exact=False)

    @rule(path=NAMES)
    def stat(self, path: str) -> None:
        self.same("stat", path)

    @rule()
    def look_at_everything(self) -> None:
        assert self.ours.tree() == self.real.tree()

    @precondition(lambda self: not self.open_files)
    @rule()
    def crash(self) -> None:
        """All files are closed, so all was acknowledged: nothing is lost."""
        self.face.close()
        self.start()
        assert self.ours.tree() == self.real.tree()

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.face.gauges().staging_bytes <= 2 * BLOCK + BLOCK


FilesMachine.TestCase.settings = settings(stateful_step_count=50)
TestFilesModel = FilesMachine.TestCase
