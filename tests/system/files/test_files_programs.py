"""/fs mounted, and ordinary programs on it that know nothing of g35.

The store is in memory, with the slot sizes of a real pool; staging memory is small, so that files are
sealed and fetched back while the programs run. Most tests end with a second face on the same metadata and
store, as after a restart of the agent, and look again.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agent.fs.doors.make_door import make_door
from agent.fs.files import suspect_blocks
from agent.fs.files.face import FilesFace
from agent.fs.files.options import FilesOptions
from agent.fs.interface import RootFileSystem
from tests.support.fs.files_calls import ROOT
from tests.support.needs import needs_mount_as_root
from tests.support.pool.inline_runner import inline_runner
from tests.support.pool.memory_blocks import MemoryBlockStore
from tests.support.waiting import wait_until

MIB = 1 << 20
CAPACITIES = (64 << 10, MIB, 4 * MIB)

pytestmark = needs_mount_as_root


def inside(folder: Path, *command: str | Path) -> list[str]:
    """The command, to be run in that folder. It is the shell that goes there: were it `subprocess`, this
    process would wait for its own mount between fork and exec, with the interpreter locked."""
    return ["sh", "-c", 'cd "$0" && exec "$@"', str(folder), *map(str, command)]


class Mounted:
    """A mount of /fs that can be started again on what it left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mountpoint = folder / "mount"
        self.mountpoint.mkdir()
        self.path = self.mountpoint / "fs"
        self.store = MemoryBlockStore(CAPACITIES)
        self.options = FilesOptions(staging_bytes=16 * MIB, workers=4)
        self.start()

    def start(self) -> None:
        self.face = FilesFace(self.folder / "files.sqlite", self.store, self.options)
        tree = RootFileSystem({b"fs": (ROOT, self.face)})
        after = self.face.after_reply
        self.door = make_door("dev_fuse", tree, self.mountpoint, 4, inline_runner, after_reply=after)
        self.door.start()

    def stop(self) -> None:
        self.door.stop()
        self.face.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    def run(self, *command: str | Path, cwd: Path | None = None, timeout: float = 240) -> str:
        environment = {**os.environ, "HOME": str(self.folder), "GIT_CONFIG_NOSYSTEM": "1"}
        done = subprocess.run(
            inside(cwd or self.path, *command),
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    made = Mounted(tmp_path)
    try:
        yield made
    finally:
        made.stop()


def random_file(path: Path, size: int, seed: int = 35) -> bytes:
    content = random.Random(seed).randbytes(size)
    path.write_bytes(content)
    return content


def need(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program} on this machine: apt-get install {program}")


def test_cp_mv_cmp_and_rm(mounted: Mounted, tmp_path: Path) -> None:
    content = random_file(tmp_path / "source", 9 * MIB + 4321)
    mounted.run("cp", "--preserve=all", tmp_path / "source", "copy")
    mounted.run("cp", "copy", "again")
    mounted.run("mv", "again", "moved")
    mounted.run("cmp", "copy", "moved")
    source, copy = (tmp_path / "source").stat(), (mounted.path / "copy").stat()
    assert (copy.st_mtime_ns, copy.st_mode, copy.st_size) == (
        source.st_mtime_ns,
        source.st_mode,
        len(content),
    )
    mounted.restart()
    assert (mounted.path / "moved").read_bytes() == content
    assert sorted(path.name for path in mounted.path.iterdir()) == ["copy", "moved"]
    mounted.run("rm", "copy", "moved")
    assert list(mounted.path.iterdir()) == []


def test_a_write_returns_while_blocks_are_stored_and_fsync_when_they_are(mounted: Mounted) -> None:
    """Two blocks are under way when the program calls fsync, which waits for them and for nothing else."""
    under_way, may_go_on = threading.Semaphore(0), threading.Event()

    def store_waits(step: str) -> None:
        if step == "put":
            under_way.release()
            assert may_go_on.wait(60)

    mounted.store.before = store_waits
    content = random.Random(35).randbytes(8 * MIB)
    code = (
        "import os, sys; file = open(sys.argv[1], 'wb', 0); data = sys.stdin.buffer.read()\nstep = 1 << 20\n"
    )
    code += "for at in range(0, len(data), step): assert file.write(data[at : at + step]) == step\n"
    code += "print('written', flush=True); os.fsync(file); print('synced', flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", code, mounted.path / "file"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        try:
            program.stdin.write(content)
            program.stdin.close()
            assert program.stdout.readline() == b"written\n"
            assert under_way.acquire(timeout=60)
            assert under_way.acquire(timeout=60)
            assert mounted.store.puts == 0
            assert mounted.face.after_reply.under_way == 2
        finally:
            may_go_on.set()
        assert program.stdout.readline() == b"synced\n"
        assert mounted.store.puts == 2
    assert (mounted.path / "file").read_bytes() == content
    mounted.restart()
    assert (mounted.path / "file").read_bytes() == content


@pytest.mark.parametrize("flag", ["O_RDONLY", "O_DIRECT"])
def test_parts_of_a_file_that_is_read_on_are_under_way_at_once(mounted: Mounted, flag: str) -> None:
    """The first parts come when the second is asked for, and not before."""
    content = random_file(mounted.path / "file", 16 * MIB)
    mounted.restart()
    under_way, two_are = threading.Semaphore(1), threading.Event()

    def store_waits(step: str) -> None:
        if step == "get" and not under_way.acquire(blocking=False):
            two_are.set()
        assert two_are.wait(60)

    mounted.store.before = store_waits
    code = "import hashlib, mmap, os, sys\nroom, found = mmap.mmap(-1, 4 << 20), hashlib.sha256()\n"
    code += "file = os.open(sys.argv[1], getattr(os, sys.argv[2]))\n"
    code += "while count := os.readv(file, [room]): found.update(room[:count])\nprint(found.hexdigest())"
    found = mounted.run(sys.executable, "-c", code, mounted.path / "file", flag)
    assert found.strip() == hashlib.sha256(content).hexdigest()


def test_dd_with_direct_io(mounted: Mounted, tmp_path: Path) -> None:
    content = random_file(tmp_path / "source", 8 * MIB)
    mounted.run("dd", f"if={tmp_path / 'source'}", "of=file", "bs=1M", "oflag=direct")
    mounted.run("dd", "if=file", f"of={tmp_path / 'back'}", "bs=1M", "iflag=direct")
    assert (tmp_path / "back").read_bytes() == content
    mounted.run(
        "dd",
        f"if={tmp_path / 'source'}",
        "of=file",
        "bs=4k",
        "count=3",
        "seek=511",
        "oflag=direct",
        "conv=notrunc",
    )
    expected = content[: 511 * 4096] + content[: 3 * 4096] + content[514 * 4096 :]
    assert (mounted.path / "file").read_bytes() == expected


def test_tar_there_and_back(mounted: Mounted, tmp_path: Path) -> None:
    need("tar")
    tree = tmp_path / "tree"
    (tree / "deep" / "er").mkdir(parents=True)
    for number in range(200):
        (tree / f"file{number}").write_bytes(random.Random(number).randbytes(number * 97))
    (tree / "deep" / "er" / "link").symlink_to("../../file7")
    os.link(tree / "file9", tree / "deep" / "hard")
    with open(tree / "sparse", "wb") as sparse:
        sparse.seek(20 * MIB)
        sparse.write(b"end")
    mounted.run("tar", "-C", tmp_path, "-cSf", "tree.tar", "tree")
    mounted.run("tar", "-xSf", "tree.tar")
    mounted.run("diff", "-r", tree, "tree")
    mounted.restart()
    mounted.run("diff", "-r", tree, "tree")
    assert (mounted.path / "tree/sparse").stat().st_blocks * 512 <= MIB
    assert (mounted.path / "tree/file9").stat().st_nlink == 2
    mounted.run("rm", "-r", "tree", "tree.tar")
    assert mounted.face.gauges().inodes <= 400


def test_git(mounted: Mounted) -> None:
    need("git")
    repository = mounted.path / "repository"
    repository.mkdir()
    git: Sequence[str] = ("git", "-c", "user.name=g", "-c", "user.email=g@example.org")
    mounted.run(*git, "init", "-q", cwd=repository)
    for number in range(5):
        (repository / f"file{number}").write_text("line\n" * 1000 * (number + 1))
        mounted.run(*git, "add", ".", cwd=repository)
        mounted.run(*git, "commit", "-qm", f"commit {number}", cwd=repository)
    mounted.run(*git, "gc", "-q", cwd=repository)
    mounted.restart()
    mounted.run(*git, "fsck", "--strict", cwd=repository)
    assert mounted.run(*git, "status", "--porcelain", cwd=repository) == ""
    assert len(mounted.run(*git, "log", "--oneline", cwd=repository).splitlines()) == 5


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_sqlite(mounted: Mounted, journal: str) -> None:
    """In a process of its own: locks and, with WAL, shared memory through mmap."""
    program = f"""
import sqlite3
db = sqlite3.connect("data.sqlite")
got = db.execute("PRAGMA journal_mode = {journal}").fetchone()
db.execute("CREATE TABLE t (k INTEGER PRIMARY KEY, v BLOB)")
for start in range(0, 1000, 100):
    with db:
        rows = [(k, bytes([k % 251]) * 2000) for k in range(start, start + 100)]
        db.executemany("INSERT INTO t VALUES (?, ?)", rows)
with db:
    db.execute("DELETE FROM t WHERE k % 3 = 0")
assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
db.close()
"""
    mounted.run(sys.executable, "-c", program)
    mounted.restart()
    shutil.copy(mounted.path / "data.sqlite", mounted.folder / "data.sqlite")
    database = sqlite3.connect(mounted.folder / "data.sqlite")
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert database.execute("SELECT COUNT(*), SUM(length(v)) FROM t").fetchone() == (666, 1332000)
    database.close()


@pytest.mark.parametrize(("mode", "sizes"), [("write", "4k-64k"), ("randwrite", "12k"), ("randrw", "16k")])
def test_fio_verifies_what_it_wrote(mounted: Mounted, mode: str, sizes: str) -> None:
    """One size where offsets are random: fio's own bookkeeping of overlaps fails on any file system."""
    need("fio")
    mounted.run(
        "fio", "--name=verify", f"--rw={mode}", f"--bs={sizes}", "--size=12m", "--numjobs=2", "--thread",
        "--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--fsync=200", "--randseed=35",
        "--ioengine=psync", "--fallocate=none",
    )  # fmt: skip


def test_append_with_several_writers(mounted: Mounted) -> None:
    """O_APPEND from several processes: no line is lost and none is torn."""
    program = """
import os, sys
file = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for number in range(200):
    os.write(file, f"{sys.argv[1]} {number:05} {'x' * 80}\\n".encode())
"""
    writers = [
        subprocess.Popen(inside(mounted.path, sys.executable, "-c", program, str(number)))
        for number in range(3)
    ]
    assert [writer.wait(240) for writer in writers] == [0, 0, 0]
    lines = (mounted.path / "log").read_text().splitlines()
    assert sorted(lines) == sorted(f"{n} {k:05} {'x' * 80}" for n in range(3) for k in range(200))


def test_mmap_for_reading_and_writing(mounted: Mounted, tmp_path: Path) -> None:
    content = random_file(mounted.path / "file", 5 * MIB + 17)
    program = """
import mmap, sys
with open("file", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
    sys.stdout.buffer.write(mapped)
with open("file", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
    mapped[1 << 20 : (1 << 20) + 5] = b"hello"
    mapped.flush()
"""
    # In a process of its own: a page fault waits for the mount with the interpreter locked.
    mounted.run("sh", "-c", f'"{sys.executable}" -c "$0" >"{tmp_path}/seen"', program)
    assert (tmp_path / "seen").read_bytes() == content
    mounted.restart()
    found = (mounted.path / "file").read_bytes()
    assert found == content[:MIB] + b"hello" + content[MIB + 5 :]


def test_a_file_that_was_open_before_shows_what_a_program_writes_that_only_writes(mounted: Mounted) -> None:
    """Such writes pass the kernel's page cache by."""
    program = """
import mmap, os
writer = os.open("file", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
reader = os.open("file", os.O_RDONLY)
os.write(writer, b"a" * 5000)
assert os.pread(reader, 9000, 0) == b"a" * 5000
with mmap.mmap(reader, 5000, prot=mmap.PROT_READ) as mapped:
    assert mapped[:] == b"a" * 5000
    os.pwrite(writer, b"b" * 3000, 1000)
    assert mapped[:] == b"a" * 1000 + b"b" * 3000 + b"a" * 1000
    assert os.pread(reader, 9000, 0) == b"a" * 1000 + b"b" * 3000 + b"a" * 1000
    os.write(writer, b"c" * 5000)
    assert os.pread(reader, 20000, 4000) == b"a" * 1000 + b"c" * 5000
os.ftruncate(writer, 4500)
assert os.pread(reader, 20000, 4000) == b"a" * 500
os.pwrite(writer, b"d", 5000)
assert os.pread(reader, 20000, 4000) == b"a" * 500 + bytes(500) + b"d"
"""
    mounted.run(sys.executable, "-c", program)


def test_unlinked_open_and_renamed_over(mounted: Mounted) -> None:
    content = random_file(mounted.path / "file", 5 * MIB)
    with open(mounted.path / "file", "r+b") as file:
        (mounted.path / "file").unlink()
        assert not (mounted.path / "file").exists()
        file.seek(MIB)
        file.write(b"changed")
        file.flush()
        file.seek(0)
        assert file.read() == content[:MIB] + b"changed" + content[MIB + 7 :]
        assert os.fstat(file.fileno()).st_nlink == 0
    (mounted.path / "a").write_text("a")
    (mounted.path / "b").write_text("b")
    os.rename(mounted.path / "a", mounted.path / "b")
    assert (mounted.path / "b").read_text() == "a"


def test_what_a_file_system_is_asked_besides(mounted: Mounted) -> None:
    folder = mounted.path
    (folder / "dir").mkdir()
    os.chmod(folder / "dir", 0o2775)
    os.chown(folder / "dir", 12, 34)
    (folder / "dir" / "below").mkdir()
    assert (folder / "dir" / "below").stat().st_gid == 34
    assert (folder / "dir" / "below").stat().st_mode & stat.S_ISGID
    file = folder / "dir" / "file"
    file.write_bytes(b"x" * 100_000)
    os.truncate(file, 10)
    os.truncate(file, 100)
    assert file.read_bytes() == b"x" * 10 + bytes(90)
    os.utime(file, ns=(123, 456))
    assert (file.stat().st_atime_ns, file.stat().st_mtime_ns) == (123, 456)
    os.setxattr(file, "user.colour", b"green")
    assert os.getxattr(file, "user.colour") == b"green"
    assert os.listxattr(file) == ["user.colour"]
    os.removexattr(file, "user.colour")
    with open(file, "r+b") as handle:
        os.posix_fallocate(handle.fileno(), 0, 5 * MIB)
    assert file.stat().st_size == 5 * MIB
    os.mkfifo(folder / "fifo")
    assert stat.S_ISFIFO((folder / "fifo").stat().st_mode)
    with pytest.raises(OSError) as refusal:
        (folder / "dir").rmdir()
    assert refusal.value.errno == errno.ENOTEMPTY
    with pytest.raises(OSError) as refusal:
        (folder / ("x" * 256)).write_text("")
    assert refusal.value.errno == errno.ENAMETOOLONG
    shown = os.statvfs(folder)
    assert shown.f_namemax == 255
    assert 0 < shown.f_bavail <= shown.f_blocks


def test_a_directory_with_thousands_of_names(mounted: Mounted) -> None:
    for number in range(3000):
        (mounted.path / f"name-{number:05}-{'x' * 40}").touch()
    names = os.listdir(mounted.path)
    assert len(names) == len(set(names)) == 3000
    mounted.run("rm", "-r", *[mounted.path / name for name in names[:1500]])
    assert len(os.listdir(mounted.path)) == 1500


def test_full_is_enospc_for_programs_too(mounted: Mounted) -> None:
    mounted.store.slots = dict.fromkeys(CAPACITIES, 0) | {4 * MIB: 3}
    done = subprocess.run(
        inside(mounted.path, "dd", "if=/dev/zero", "of=file", "bs=1M", "count=20"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert (mounted.path / "file").stat().st_size == 12 * MIB
    # The kernel tells of a program's last close when it pleases, and what is open keeps its blocks.
    wait_until(lambda: mounted.face.gauges().open_files == 0, what="the program's file to be closed")
    (mounted.path / "file").unlink()
    (mounted.path / "other").write_bytes(b"x" * 10 * MIB)


@pytest.mark.expects_log("lost a block")
def test_a_lost_block_is_eio_until_that_is_certain_and_then_the_file_is_gone(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspect_blocks, "LOOK_SECONDS", 0.0)
    (mounted.path / "file").write_bytes(b"x" * 3 * MIB)
    mounted.restart()
    mounted.store.blocks.clear()
    with pytest.raises(OSError) as refusal:
        (mounted.path / "file").read_bytes()
    assert refusal.value.errno == errno.EIO
    assert os.listdir(mounted.path) == ["file"]
    inline_runner(0).run(mounted.face.collect())
    assert os.listdir(mounted.path) == []
    with pytest.raises(FileNotFoundError):
        (mounted.path / "file").read_bytes()
