"""The same calls through both doors and on tmpfs: the same answers, the same tree in the end."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.fs.interface import Caller, FsError
from agent.pool.steps import Outcome
from tests.support.fs.memory_filesystem import MemoryFileSystem
from tests.support.fs.mounted import mounted
from tests.support.fs.posix_calls import Call, Calls, calls
from tests.support.needs import needs_mount_as_root

pytestmark = [
    needs_mount_as_root,
    # A RELEASE that the unmount overtakes: libfuse says so, nobody waits for it.
    pytest.mark.expects_log("pyfuse3: fuse_release.* fuse_reply_.* failed"),
]


@pytest.fixture
def in_tmpfs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="g35-differential-", dir="/dev/shm") as folder:
        yield Path(folder)


def compare(tmp_path: Path, in_tmpfs: Path, ours: MemoryFileSystem, reference: MemoryFileSystem) -> int:
    """Play drawn sequences everywhere; how many calls that were."""
    our_place, their_place = tmp_path / "ours", tmp_path / "reference"
    number = itertools.count()
    played = 0
    with mounted("dev_fuse", our_place, ours), mounted("pyfuse3", their_place, reference):

        @settings(max_examples=60, suppress_health_check=list(HealthCheck))
        @given(st.lists(calls, min_size=1, max_size=25))
        def agree(sequence: list[Call]) -> None:
            nonlocal played
            name = str(next(number))
            answers = []
            for place in (in_tmpfs, our_place, their_place):
                (place / name).mkdir()
                try:
                    answers.append(Calls(os.fsencode(place / name)).play(sequence))
                finally:
                    shutil.rmtree(place / name)
            for call, wanted, got, referred in zip([*sequence, "tree"], *answers, strict=True):
                assert got == wanted, f"our door, {call}"
                assert referred == wanted, f"pyfuse3, {call}"
            played += len(sequence)

        agree()
        assert os.listdir(our_place) == os.listdir(their_place) == []
    return played


@pytest.mark.parametrize("direct_io", [False, True], ids=["cached", "direct"])
def test_doors_and_tmpfs_agree(tmp_path: Path, in_tmpfs: Path, direct_io: bool) -> None:
    ours, reference = MemoryFileSystem(direct_io=direct_io), MemoryFileSystem(direct_io=direct_io)
    assert compare(tmp_path, in_tmpfs, ours, reference) > 100


def test_a_planted_difference_is_found(tmp_path: Path, in_tmpfs: Path) -> None:
    class LosesLinks(MemoryFileSystem):
        """Of any name, so that sixty sequences of any seed meet one."""

        def unlink(self, caller: Caller, parent: int, name: bytes) -> Outcome[None]:
            raise FsError(errno.EPERM)

    with pytest.raises((AssertionError, PermissionError, ExceptionGroup)):
        compare(tmp_path, in_tmpfs, LosesLinks(), MemoryFileSystem())
