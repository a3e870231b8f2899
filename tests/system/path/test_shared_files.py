"""`/shared` through real mounts of two agents on one pool: what engines do with a folder, and what breaks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.fs.two_agents import TwoAgents, data_of
from tests.support.pool_up import SHARED_POOL, PoolUp
from tests.support.processes import Processes
from tests.support.waiting import wait_until

MIB = 1 << 20


def write_direct(path: Path, data: bytes) -> None:
    """As an engine with O_DIRECT: memory and sizes of whole pages, cut to length at last."""
    room = mmap.mmap(-1, -(-len(data) // 4096) * 4096)
    room[: len(data)] = data
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    try:
        assert os.write(descriptor, memoryview(room)) == len(room)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def read_direct(path: Path) -> bytes:
    size = path.stat().st_size
    room = mmap.mmap(-1, -(-size // 4096) * 4096 + 4096)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        assert os.readv(descriptor, [memoryview(room)]) == size
    finally:
        os.close(descriptor)
    return room[:size]


def read_direct_on(path: Path) -> bytes:
    """By as many reads as it takes."""
    room, found = mmap.mmap(-1, 4 * MIB), b""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        while got := os.preadv(descriptor, [memoryview(room)], len(found)):
            found += room[:got]
    finally:
        os.close(descriptor)
    return found


@pytest.mark.parametrize("size", [0, 5, 12_000, MIB, 2 * MIB, 5 * MIB + 777])
def test_a_file_is_on_both_mounts_whole_after_its_close(
    two: TwoAgents, folder: str, size: int, seed: int
) -> None:
    data = data_of(seed, size)
    for writer, reader in ((two.one, two.two), (two.two, two.one)):
        file = writer / folder / f"by {writer.parts[-4]}"
        with open(file, "wb", buffering=0) as out:
            out.write(data[: size // 2])
            assert not (reader / folder / file.name).exists()
            out.write(data[size // 2 :])
        assert (reader / folder / file.name).read_bytes() == data
        assert file.read_bytes() == data
        assert (reader / folder / file.name).stat().st_size == size


@pytest.mark.parametrize("size", [4096, 2 * MIB, 3 * MIB + 4096, MIB + 5, 5 * MIB + 7])
def test_o_direct_and_the_page_cache_see_the_same(two: TwoAgents, folder: str, size: int, seed: int) -> None:
    data = data_of(seed, size)
    write_direct(two.one / folder / "direct", data)
    (two.one / folder / "cached").write_bytes(data)
    for name in ("direct", "cached"):
        assert (two.two / folder / name).read_bytes() == data
        assert read_direct(two.two / folder / name) == data
        with (
            open(two.two / folder / name, "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        ):
            assert mapped[:] == data


def test_engines_write_beside_the_name_and_rename(two: TwoAgents, seed: int) -> None:
    two.settle()
    base = two.one / "engine" / "abc" / "de_g0"
    os.makedirs(base)
    for number in range(4):
        data = data_of(seed + number, 2 * MIB)
        for overwrite in (False, True):
            if overwrite:
                data = data[::-1]
            temporary = base / f"{number}.tmp.1"
            write_direct(temporary, data)
            os.replace(temporary, base / str(number))
            seen = two.two / "engine/abc/de_g0" / str(number)
            assert os.access(seen, os.R_OK, effective_ids=True)
            assert seen.read_bytes() == data
            assert not (two.two / "engine/abc/de_g0" / temporary.name).exists()


def test_a_file_made_beforehand_is_filled_by_threads(two: TwoAgents, folder: str, seed: int) -> None:
    data = data_of(seed, 16 * MIB)
    path = two.one / folder / "f"
    with open(path, "wb") as made:
        made.truncate(len(data))
    descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)

    def fill(number: int) -> None:
        room = mmap.mmap(-1, MIB)
        room[:] = data[number * MIB : (number + 1) * MIB]
        assert os.pwrite(descriptor, memoryview(room), number * MIB) == MIB

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(fill, range(16)))
    os.close(descriptor)
    assert (two.two / folder / "f").read_bytes() == data
    os.truncate(two.two / folder / "f", 3 * MIB + 5)
    assert path.read_bytes() == data[: 3 * MIB + 5]


def test_programs_work_on_it(two: TwoAgents, folder: str, tmp_path: Path, seed: int) -> None:
    source = tmp_path / "tree"
    for number in range(3):
        (source / str(number)).mkdir(parents=True)
        (source / str(number) / "file").write_bytes(data_of(seed + number, 300_000 + number))
    there = two.one / folder / "tree"
    subprocess.run(["cp", "-a", source, there], check=True)
    assert not subprocess.run(["diff", "-r", source, there], capture_output=True, check=True).stdout
    for number in range(3):
        subprocess.run(
            ["cmp", source / str(number) / "file", two.two / folder / "tree" / str(number) / "file"],
            check=True,
        )
    subprocess.run(f"cat {there}/0/file > {there}/piped; echo more >> {there}/piped", shell=True, check=True)
    assert (two.two / folder / "tree/piped").read_bytes() == (source / "0/file").read_bytes() + b"more\n"
    subprocess.run(["dd", f"if={source}/1/file", f"of={there}/dd", "bs=64k"], check=True, capture_output=True)
    subprocess.run(["mv", there / "dd", there / "moved"], check=True)
    subprocess.run(["cmp", source / "1/file", two.two / folder / "tree/moved"], check=True)
    assert sorted(os.listdir(there)) == ["0", "1", "2", "moved", "piped"]
    shutil.rmtree(there)
    assert not (two.two / folder / "tree/moved").exists()


def test_a_writer_that_is_killed_leaves_nothing(two: TwoAgents, folder: str) -> None:
    program = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(fd, bytes(3 << 20))
os.kill(os.getpid(), 9)
"""
    path = two.one / folder / "half"
    done = subprocess.run([sys.executable, "-c", program, path], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not path.exists()
    assert not (two.two / folder / "half").exists()


def test_a_name_that_is_open_in_both_mounts_is_two_files(two: TwoAgents, folder: str) -> None:
    """The number of the one is never that of the other, by which a close tells who has it open still."""
    paths = [two.one / folder / "both", two.two / folder / "both"]
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT, 0o644) for path in paths)
    try:
        assert os.fstat(first).st_ino != os.fstat(second).st_ino
        os.write(first, b"first" * 1000)
        os.close(first)
        assert paths[0].stat().st_size == 5000
    finally:
        with contextlib.suppress(OSError):  # ESTALE: the other was stored first
            os.close(second)


def test_what_is_open_is_read_on_after_it_was_replaced_and_removed(
    two: TwoAgents, folder: str, seed: int
) -> None:
    data = data_of(seed, 3 * MIB)
    path = two.one / folder / "f"
    path.write_bytes(data)
    with open(path, "rb", buffering=0) as old, open(path, "rb", buffering=0) as older:
        path.write_bytes(b"new")
        assert path.read_bytes() == b"new"
        assert (two.two / folder / "f").read_bytes() == b"new"
        path.unlink()
        assert old.read(4 * MIB) == data
        os.posix_fadvise(older.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert older.read(4 * MIB) == data
    assert not (two.two / folder / "f").exists()


def test_calls_that_a_cache_refuses(two: TwoAgents, folder: str) -> None:
    path = two.one / folder / "f"
    path.write_bytes(b"f")
    refused = {
        errno.EPERM: [
            lambda: os.link(path, path.with_name("g")),
            lambda: os.symlink("f", path.with_name("g")),
        ],
        errno.EXDEV: [
            lambda: os.rename(path, two.pool.mount / "fs/f"),
            lambda: os.rename(path.parent, path.parent.with_name("moved")),
        ],
        errno.EISDIR: [lambda: os.open(path.parent, os.O_WRONLY)],
        errno.EEXIST: [lambda: os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY), lambda: os.mkdir(path)],
        errno.ENOTEMPTY: [lambda: os.rmdir(path.parent)],
        errno.ENOTSUP: [lambda: os.setxattr(path, "user.a", b"b")],
        errno.ENAMETOOLONG: [lambda: os.mkdir(path.parent / ("n" * 256))],
        errno.ENOENT: [lambda: os.open(path.parent / "no/f", os.O_CREAT | os.O_WRONLY)],
        errno.ENOSPC: [lambda: os.truncate(path, 1 << 50)],
    }
    for number, calls in refused.items():
        for call in calls:
            with pytest.raises(OSError) as raised:
                call()
            assert raised.value.errno == number, os.strerror(raised.value.errno)
    assert path.read_bytes() == b"f"


def test_two_agents_that_replace_one_name_at_once_leave_one_whole(two: TwoAgents, folder: str) -> None:
    """Or none: where two agents write one directory of flash at once, an entry may be lost."""

    def write(number: int) -> None:
        side = (two.one, two.two)[number % 2] / folder
        content = bytes([number]) * (2 * MIB)
        with contextlib.suppress(FileNotFoundError):
            (side / f"tmp{number}").write_bytes(content)
            os.replace(side / f"tmp{number}", side / "f")

    def seen(side: Path) -> bytes | None:
        try:
            return (side / folder / "f").read_bytes()
        except FileNotFoundError:
            return None

    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            list(threads.map(write, range(8)))
            two.settle()  # else a delete comes between the two looks, and takes a name away
            one, other = seen(two.one), seen(two.two)
            assert one == other
            assert one is None or (len(set(one)) == 1 and len(one) == 2 * MIB)


@pytest.mark.parametrize("size", [20_000, MIB + 500_000])
def test_a_write_amid_a_close_is_kept(two: TwoAgents, folder: str, size: int) -> None:
    """A close lets go of the file's lock while it stores chunks. What another thread changes then is kept."""
    path = two.one / folder / "file"
    wrong = []
    for attempt in range(40):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(file, b"k" * size)
        with ThreadPoolExecutor(1) as other:
            adding = other.submit(add, path, size + 500, attempt % 4 / 1000)
            os.close(file)
            adding.result()
        if path.read_bytes() != b"k" * size + bytes(500) + b"z" * 1000:
            wrong.append(attempt)
    assert wrong == []


def add(path: Path, at: int, seconds: float) -> None:
    """Write `z` at an offset, some time later: the close that is under way takes a few milliseconds."""
    threading.Event().wait(seconds)
    file = os.open(path, os.O_WRONLY)
    os.pwrite(file, b"z" * 1000, at)
    os.close(file)


def test_a_child_that_writes_on_while_its_parent_ends_loses_nothing(two: TwoAgents, folder: str) -> None:
    program = """
import os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
for at in range(8):
    os.pwrite(file, b"k" * 300_000, (at << 20) + 100)
if os.fork():
    os._exit(0)
os.pwrite(file, b"z" * 5000, 9 << 20)
os.close(file)
"""
    for attempt in range(8):
        path = two.one / folder / str(attempt)
        subprocess.run([sys.executable, "-c", program, path], check=True, timeout=60)
        wait_until(lambda path=path: path.exists() and path.stat().st_size == (9 << 20) + 5000, 30, "the end")  # type: ignore[misc]
        data = path.read_bytes()
        assert data[9 << 20 :] == b"z" * 5000
        assert all(data[(at << 20) + 100 :][:300_000] == b"k" * 300_000 for at in range(8))


def test_a_name_that_is_removed_while_a_close_publishes_stays_away(two: TwoAgents, folder: str) -> None:
    path = two.one / folder / "file"
    for _ in range(40):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.write(file, b"k" * (MIB + 500_000))
        with ThreadPoolExecutor(1) as other:
            closing = other.submit(os.close, file)
            path.unlink()
            closing.result()
        assert not path.exists()


def test_a_file_that_has_lost_a_chunk_is_begun_anew_or_not_there(two: TwoAgents, folder: str) -> None:
    """Files beyond the volume's room evict those that were written first."""
    for name in "fgh":
        (two.one / folder / name).write_bytes(bytes(16 * MIB))
    slots = os.statvfs(two.one).f_blocks * os.statvfs(two.one).f_frsize // MIB
    for number in range(slots + 64):
        (two.two / folder / str(number)).write_bytes(b"k" * 20_000)
    for name, flags in (("f", os.O_RDWR), ("h", os.O_RDONLY)):
        with pytest.raises(FileNotFoundError):
            os.open(two.one / folder / name, flags)
    descriptor = os.open(two.one / folder / "g", os.O_RDWR | os.O_CREAT)
    assert os.fstat(descriptor).st_size == 0
    os.write(descriptor, b"new")
    os.close(descriptor)
    assert (two.two / folder / "g").read_bytes() == b"new"
    shutil.rmtree(two.two / folder)


def test_random_calls_do_what_they_do_on_tmpfs(two: TwoAgents, folder: str, seed: int) -> None:
    rng = random.Random(f"like fsx {seed}")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as reference:
        ours = [two.one / folder / "f", two.two / folder / "f"]
        theirs = Path(reference) / "f"
        for round_ in range(12):
            two.settle()  # the other agent's turn may be next
            mine = rng.choice(ours)
            flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if rng.random() < 0.2 else 0)
            pair = [os.open(path, flags, 0o644) for path in (mine, theirs)]
            for _ in range(25):
                one_call(rng, pair)
            for descriptor in pair:
                os.close(descriptor)
            wanted = theirs.read_bytes()
            for path in ours:
                assert path.read_bytes() == wanted, f"round {round_}"


def one_call(rng: random.Random, pair: list[int]) -> None:
    """The same call on both files, with the same result."""
    what, offset = rng.random(), rng.choice([rng.randrange(6 * MIB), rng.randrange(6) * MIB])
    size = rng.choice([rng.randrange(1, 9000), rng.randrange(1, 3 * MIB), MIB, 2 * MIB])
    if what < 0.45:
        data = rng.randbytes(size)
        got = [os.pwrite(each, data, offset) for each in pair]
    elif what < 0.55:
        got = [os.ftruncate(each, offset) for each in pair]  # type: ignore[func-returns-value]
    elif what < 0.6:
        got = [os.posix_fallocate(each, offset, size) for each in pair]  # type: ignore[func-returns-value]
    elif what < 0.65:
        data = rng.randbytes(size)
        for each in pair:
            fcntl.fcntl(each, fcntl.F_SETFL, fcntl.fcntl(each, fcntl.F_GETFL) | os.O_APPEND)
        got = [os.write(each, data) for each in pair]
        for each in pair:
            fcntl.fcntl(each, fcntl.F_SETFL, fcntl.fcntl(each, fcntl.F_GETFL) & ~os.O_APPEND)
    elif what < 0.7:
        got = [os.fstat(each).st_size for each in pair]
    else:
        got = [os.pread(each, size, offset) for each in pair]  # type: ignore[misc]
    assert got[0] == got[1]


def test_statvfs_tells_the_volume_and_bounds_are_shown(two: TwoAgents, folder: str) -> None:
    def rows() -> dict[str, dict[str, int]]:
        return {row["name"]: row for row in two.pool.status()["bounds"]}

    before = os.statvfs(two.one)
    assert before.f_blocks * before.f_frsize > 100 * MIB
    path = two.one / folder / "f"
    path.write_bytes(bytes(range(256)) * (8 * MIB // 256))
    path.unlink()
    wait_until(lambda: os.statvfs(two.one).f_bfree >= before.f_bfree, 30, "the room to come back")
    names = {"shared-open", "shared-writers", "shared-nodes", "shared-names", "shared-staged-bytes"}
    assert names <= set(rows())


def test_the_reference_door_serves_the_same(processes: Processes, tmp_path: Path, seed: int) -> None:
    pool = PoolUp(processes, tmp_path / "state", *SHARED_POOL, "--door", "pyfuse3")
    try:
        base = pool.mount / "shared/shared/a/b"
        os.makedirs(base)
        data = data_of(seed, 3 * MIB + 5)
        write_direct(base / "f.tmp", data)
        os.replace(base / "f.tmp", base / "f")
        assert (base / "f").read_bytes() == read_direct(base / "f") == data
        with open(base / "f", "r+b") as file:
            file.seek(MIB)
            file.write(b"over")
        assert (base / "f").read_bytes() == data[:MIB] + b"over" + data[MIB + 4 :]
        assert os.listdir(base) == ["f"]
        shutil.rmtree(pool.mount / "shared/shared/a")
        assert os.listdir(pool.mount / "shared/shared") == []
    finally:
        assert pool.down() == 0


def test_a_pool_whose_agent_is_killed_has_what_was_closed(
    processes: Processes, tmp_path: Path, seed: int
) -> None:
    pool = PoolUp(processes, tmp_path / "state", *SHARED_POOL)
    try:
        base = pool.mount / "shared/shared/a"
        base.mkdir()
        data = data_of(seed, 3 * MIB + 5)
        (base / "closed").write_bytes(data)
        descriptor = os.open(base / "open", os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, data)
        old = pool.kill("agent-process")
        with pytest.raises(OSError, match=r"abort|not connected"):
            os.close(descriptor)
        pool.wait_restarted("agent-process", old)
        assert (base / "closed").read_bytes() == data
        assert not (base / "open").exists()
    finally:
        assert pool.down() == 0


def test_files_lie_in_chunks_that_are_longer_than_a_write(
    processes: Processes, tmp_path: Path, seed: int
) -> None:
    options = [each if each != "1G" else "2G" for each in SHARED_POOL]
    pool = PoolUp(processes, tmp_path / "state", *options, "--chunk-size", "4M")
    try:
        base, rng = pool.mount / "shared/shared/a", random.Random(f"long chunks {seed}")
        base.mkdir()
        for size in (4 * MIB, 8 * MIB, 9 * MIB + 777, 3 * MIB, 300_000):
            data = data_of(seed, size)
            (base / "f.tmp").write_bytes(data)
            os.replace(base / "f.tmp", base / "f")
            write_direct(base / "g", data)
            shutil.copy(base / "f", base / "h")
            assert (
                (base / "f").read_bytes() == (base / "h").read_bytes() == read_direct_on(base / "g") == data
            )
            (base / "g").unlink()
        theirs = tmp_path / "theirs"
        for _ in range(4):
            pair = [os.open(path, os.O_RDWR | os.O_CREAT, 0o644) for path in (base / "fsx", theirs)]
            for _ in range(25):
                one_call(rng, pair)
            for descriptor in pair:
                os.close(descriptor)
            assert (base / "fsx").read_bytes() == theirs.read_bytes()
        descriptor = os.open(base / "open", os.O_WRONLY | os.O_CREAT)
        assert os.write(descriptor, data_of(seed, 2 * MIB)) == 2 * MIB
        old = pool.kill("agent-process")
        with pytest.raises(OSError, match=r"abort|not connected"):
            os.close(descriptor)
        pool.wait_restarted("agent-process", old)
        assert (base / "fsx").read_bytes() == theirs.read_bytes()
        assert not (base / "open").exists()
    finally:
        assert pool.down() == 0


def test_bits_that_flip_on_flash_are_never_served(processes: Processes, tmp_path: Path, seed: int) -> None:
    pool = PoolUp(processes, tmp_path / "state", *SHARED_POOL)
    try:
        base = pool.mount / "shared/shared"
        contents = {f"f{number}": data_of(seed + number, 2 * MIB - number) for number in range(8)}
        for name, data in contents.items():
            (base / name).write_bytes(data)
        for enclosure in range(2):
            pool.fault(enclosure, "flip", drive=0, on_read=True, bits=2, offset=MIB, probability=0.3)
        failed = 0
        for name, data in itertools.islice(itertools.cycle(contents.items()), 20 * len(contents)):
            if failed and name == "f0":
                break  # of this round or an earlier one: which reads are damaged is left to chance
            try:
                with open(base / name, "rb") as file:
                    # A read that met a lost chunk gives what came before it, and the next one EIO.
                    assert file.read() == data
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                # With O_DIRECT, too; but two chunks, and no more, are asked for at once: all comes, or EIO.
                reads = read_direct if len(data) <= 2 * MIB else read_direct_on
                assert reads(base / name) == data
            except OSError as refused:
                failed += refused.errno in (errno.EIO, errno.ENOENT)
        assert failed
        for enclosure in range(2):
            pool.fault(enclosure, "heal", drive=0)
    finally:
        assert pool.down() == 0
