"""What Dynamo's KVBM does with its disk tier, done to /fs: one large file without a name, O_DIRECT, anywhere.

From DYN_KVBM_DISK_CACHE_DIR it makes a file by mkostemp with O_DIRECT, reserves its size by fallocate (or by
writing zeros, where that is refused), removes its name, and then reads and writes blocks at random places.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.needs import needs_mount_as_root
from tests.support.pool.inline_runner import inline_runner
from tests.support.waiting import wait_until
from tests.system.files.test_files_programs import MIB, Mounted

pytestmark = needs_mount_as_root

FILE_BYTES = 64 * MIB
BLOCK_BYTES = 64 << 10
WRITES = 240
THREADS = 4


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    made = Mounted(tmp_path)
    try:
        yield made
    finally:
        made.stop()


def disk_tier_file(folder: Path) -> int:
    """As KVBM makes it; the descriptor of a file that has no name any more."""
    libc = ctypes.CDLL(None, use_errno=True)
    template = ctypes.create_string_buffer(os.fsencode(folder / "dynamo-kvbm-disk-cache-XXXXXX"))
    descriptor = libc.mkostemp(template, os.O_CLOEXEC | os.O_DIRECT)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    assert libc.fallocate(descriptor, 0, 0, FILE_BYTES) == 0, os.strerror(ctypes.get_errno())
    os.unlink(template.value)
    return int(descriptor)


def collected(mounted: Mounted) -> bool:
    """Whether nothing of the file is left; the kernel reports its last close when it pleases."""
    return inline_runner(0).run(mounted.face.collect()) is not None and not mounted.store.blocks


def test_a_disk_tier_lives_in_one_file_without_a_name(mounted: Mounted) -> None:
    descriptor = disk_tier_file(mounted.path)
    assert os.listdir(mounted.path) == []
    assert os.fstat(descriptor).st_size == FILE_BYTES
    assert os.fstat(descriptor).st_nlink == 0
    dice = random.Random(35)
    places = [dice.randrange(FILE_BYTES // BLOCK_BYTES) for _ in range(WRITES)]
    wrong: list[int] = []

    def work(share: int) -> None:
        """Blocks of its own; each is written, read, overwritten and read."""
        page_aligned = mmap.mmap(-1, BLOCK_BYTES)
        mine = random.Random(share)
        expected: dict[int, bytes] = {}
        for place in places:
            if place % THREADS != share:
                continue
            expected[place] = mine.randbytes(BLOCK_BYTES)
            page_aligned[:] = expected[place]
            assert os.pwritev(descriptor, [page_aligned], place * BLOCK_BYTES) == BLOCK_BYTES
            again = mine.choice(list(expected))
            assert os.preadv(descriptor, [page_aligned], again * BLOCK_BYTES) == BLOCK_BYTES
            if page_aligned[:] != expected[again]:
                wrong.append(again)
        for place, data in expected.items():
            os.preadv(descriptor, [page_aligned], place * BLOCK_BYTES)
            if page_aligned[:] != data:
                wrong.append(place)
        page_aligned.close()

    threads = [threading.Thread(target=work, args=(share,)) for share in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    untouched = next(place for place in range(FILE_BYTES // BLOCK_BYTES) if place not in places)
    with mmap.mmap(-1, BLOCK_BYTES) as buffer:
        assert os.preadv(descriptor, [buffer], untouched * BLOCK_BYTES) == BLOCK_BYTES
        assert buffer[:] == bytes(BLOCK_BYTES)
    os.fsync(descriptor)
    assert mounted.store.blocks
    os.close(descriptor)
    wait_until(lambda: collected(mounted), 30, "the file's blocks to be deleted")
