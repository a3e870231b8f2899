"""Both doors on real mounts: an ordinary tree, and everything that must not take the mount down."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pyfuse3
import pytest

from agent.fs.doors import mounting
from agent.fs.doors.make_door import DoorKind, make_door
from agent.fs.doors.mounting import MountError
from agent.fs.interface import NOBODY, FsError, LockOwner
from tests.support.fs.memory_filesystem import FaultyFileSystem, MemoryFileSystem
from tests.support.fs.mounted import KINDS, mounted, python
from tests.support.needs import needs_mount_as_root
from tests.support.pool.inline_runner import inline_runner
from tests.support.waiting import wait_until

pytestmark = [
    needs_mount_as_root,
    # A RELEASE that the unmount overtakes: libfuse says so, nobody waits for it.
    pytest.mark.expects_log("pyfuse3: fuse_release.* fuse_reply_.* failed"),
]

REPOSITORY = Path(__file__).parents[3]
HOLDER = "import os,sys,time; f=os.open(sys.argv[1],os.O_RDWR); print('held',flush=True); time.sleep(600)"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> DoorKind:
    chosen: DoorKind = request.param
    return chosen


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "mount"


def hold(path: Path) -> subprocess.Popen[str]:
    """A process that has the file open."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def fsync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def refused(code: int, function: Any, *arguments: Any) -> None:
    with pytest.raises(OSError) as caught:
        function(*arguments)
    assert caught.value.errno == code


def test_an_ordinary_tree(kind: DoorKind, place: Path) -> None:
    filesystem = MemoryFileSystem()
    with mounted(kind, place, filesystem):
        data = os.urandom(3_333_333)
        (place / "d").mkdir(mode=0o750)
        (place / "d" / "f").write_bytes(data)
        assert (place / "d" / "f").read_bytes() == data
        assert stat.S_IMODE((place / "d").stat().st_mode) == 0o750
        os.symlink("d/f", place / "l")
        assert os.readlink(place / "l") == "d/f"
        assert (place / "l").stat().st_size == len(data)
        os.link(place / "d" / "f", place / "g")
        assert (place / "g").stat().st_nlink == 2
        os.rename(place / "g", place / "d" / "g")
        assert sorted(os.listdir(place / "d")) == ["f", "g"]
        os.utime(place / "d", ns=(-5_000_000_001, 7_000_000_008))
        assert (place / "d").stat().st_atime_ns == -5_000_000_001
        assert (place / "d").stat().st_mtime_ns == 7_000_000_008
        os.mkfifo(place / "p")
        assert stat.S_ISFIFO((place / "p").stat().st_mode)
        os.setxattr(place / "d", "user.x", b"value")
        assert os.getxattr(place / "d", "user.x") == b"value"
        assert os.listxattr(place / "d") == ["user.x"]
        os.removexattr(place / "d", "user.x")
        refused(errno.ENODATA, os.getxattr, place / "d", "user.x")
        assert os.statvfs(place).f_bsize == 65536
        with open(place / "d" / "f", "r+b") as file:
            os.unlink(place / "d" / "f")
            os.unlink(place / "d" / "g")
            file.truncate(10)
            file.flush()
            os.fsync(file.fileno())
            assert os.fstat(file.fileno()).st_nlink == 0
            assert file.read() == data[:10]
        os.rmdir(place / "d")
        for index in range(700):
            (place / f"file {index}").touch()
        assert len(os.listdir(place)) == 702
        wait_until(lambda: filesystem.open_handles == 0, what="the releases, which no close waits for")


def test_odd_names(kind: DoorKind, place: Path) -> None:
    with mounted(kind, place):
        root = os.fsencode(place)
        names = [
            b"\xff\xfe\x80",
            b"...",
            b" ",
            b"\n",
            b"%2e%2e",
            b"..\\..",
            b"n" * 255,
            b"-rf",
            b"\xe2\x80\xae",
        ]
        for name in names:
            with open(root + b"/" + name, "wb") as file:
                file.write(name)
        assert sorted(os.listdir(root)) == sorted(names)
        for name in names:
            with open(root + b"/" + name, "rb") as file:
                assert file.read() == name
        refused(errno.ENAMETOOLONG, os.open, root + b"/" + b"n" * 256, os.O_CREAT)
        refused(errno.ENAMETOOLONG, os.mkdir, root + b"/" + b"n" * 256)
        refused(errno.ENAMETOOLONG, os.rename, root + b"/...", root + b"/" + b"n" * 256)
        refused(errno.ENAMETOOLONG, os.stat, root + b"/" + b"n" * 1025)
        os.mkdir(root + b"/d")
        assert os.path.samefile(root + b"/d/..", root)
        assert os.path.samefile(root + b"/d/../..", os.path.dirname(root))
        os.symlink("../../../../../../etc/hostname", place / "out")  # resolved by the kernel, not by us
        assert os.readlink(place / "out").startswith("../")


def test_huge_sizes_and_offsets(kind: DoorKind, place: Path) -> None:
    with mounted(kind, place):
        file = os.open(place / "f", os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(file, 1 << 62)
            assert os.fstat(file).st_size == 1 << 62
            assert os.pread(file, 100, (1 << 62) - 50) == bytes(50)
            assert os.pwrite(file, b"far", (1 << 61) + 1) == 3
            assert os.pread(file, 5, 1 << 61) == b"\0far\0"
            assert os.pread(file, 5, (1 << 63) - 6) == b""
            os.ftruncate(file, (1 << 63) - 1)
            for offset in ((1 << 63) - 2, (1 << 63) - 1):
                with pytest.raises(OSError):
                    os.pwrite(file, b"too far", offset)
            os.ftruncate(file, 0)
            assert os.fstat(file).st_size == 0
        finally:
            os.close(file)
        assert os.listdir(place) == ["f"]


@pytest.mark.expects_log("answered EIO")
@pytest.mark.parametrize(
    "fault", [ValueError("a bug"), MemoryError(), SystemExit(3)], ids=lambda fault: repr(fault)
)
def test_a_handler_that_raises_takes_nothing_down(kind: DoorKind, place: Path, fault: BaseException) -> None:
    filesystem = FaultyFileSystem(MemoryFileSystem())
    with mounted(kind, place, filesystem):
        (place / "f").write_bytes(b"fine")
        (place / "d").mkdir()
        calls: dict[str, Any] = {
            "lookup": lambda: os.stat(place / "other"),
            "getattr": lambda: os.stat(place / "f"),
            "setattr": lambda: os.truncate(place / "f", 1 << 62),
            "mkdir": lambda: os.mkdir(place / "e"),
            "unlink": lambda: os.unlink(place / "f"),
            "rmdir": lambda: os.rmdir(place / "d"),
            "rename": lambda: os.rename(place / "f", place / "g"),
            "symlink": lambda: os.symlink("x", place / "l"),
            "link": lambda: os.link(place / "f", place / "g"),
            "mknod": lambda: os.mkfifo(place / "p"),
            "create": lambda: (place / "new").touch(),
            "open": lambda: (place / "f").read_bytes(),
            "read": lambda: (place / "f").read_bytes(),
            "write": lambda: (place / "f").write_bytes(b"x"),
            "opendir": lambda: os.listdir(place),
            "readdir": lambda: os.listdir(place),
            "statfs": lambda: os.statvfs(place),
            "getxattr": lambda: os.getxattr(place / "f", "user.x"),
            "setxattr": lambda: os.setxattr(place / "f", "user.x", b""),
            "listxattr": lambda: os.listxattr(place / "f"),
            "fsync": lambda: fsync(place / "f"),
        }
        for name, call in calls.items():
            before = filesystem.raised
            filesystem.faults = {name: lambda: fault}
            refused(errno.EIO, call)
            assert filesystem.raised > before, name
            filesystem.faults = {}
        filesystem.faults = {name: lambda: fault for name in ("flush", "release", "forget", "releasedir")}
        for _ in range(3):
            with pytest.raises(OSError):
                (place / "f").read_text()
            os.listdir(place)
        filesystem.faults = {}
        (place / "f").write_bytes(b"still here")
        assert (place / "f").read_bytes() == b"still here"


def test_a_refusal_is_what_the_caller_sees(kind: DoorKind, place: Path) -> None:
    filesystem = FaultyFileSystem(MemoryFileSystem())
    with mounted(kind, place, filesystem):
        for code, seen in ((errno.ENOSPC, errno.ENOSPC), (errno.EDQUOT, errno.EDQUOT), (99_999, errno.EIO)):
            filesystem.faults = {"mkdir": lambda code=code: FsError(code)}
            refused(seen, os.mkdir, place / "d")
        filesystem.faults = {}


def test_a_mapped_file_reads_also_where_io_is_direct(kind: DoorKind, place: Path) -> None:
    with mounted(kind, place, MemoryFileSystem(direct_io=True)):
        (place / "f").write_bytes(b"m" * 100_000)
        for share in ("MAP_PRIVATE", "MAP_SHARED"):
            code = (
                "import mmap,os,sys; f=os.open(sys.argv[1],os.O_RDONLY);"
                f"m=mmap.mmap(f,0,flags=mmap.{share},prot=mmap.PROT_READ); print(m[:]==b'm'*100000)"
            )
            done = python(code, place / "f")
            if kind == "pyfuse3" and share == "MAP_SHARED":
                assert "No such device" in done.stderr  # libfuse 3.14 cannot ask for it
            else:
                assert done.stdout == "True\n", done.stderr


def test_direct_reads_and_writes_of_one_mebibyte(place: Path) -> None:
    code = """
import mmap, os, sys
buffer = mmap.mmap(-1, 4 << 20); buffer.write(os.urandom(4 << 20))
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_DIRECT)
assert os.pwritev(file, [buffer], 0) == 4 << 20
again = mmap.mmap(-1, 4 << 20)
assert os.preadv(file, [again], 0) == 4 << 20
assert again[:] == buffer[:]
"""

    class Counts(MemoryFileSystem):
        sizes: list[int]

        def __init__(self) -> None:
            super().__init__()
            self.sizes = []

        def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Any:
            self.sizes.append(len(into))
            return super().read(ino, handle, offset, into)

        def write(self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY) -> Any:
            self.sizes.append(len(data))
            return super().write(ino, handle, offset, data)

    filesystem = Counts()
    with mounted("dev_fuse", place, filesystem):
        done = python(code, place / "f")
        assert done.returncode == 0, done.stderr
    assert filesystem.sizes == [1 << 20] * 8


def test_many_at_once(kind: DoorKind, place: Path) -> None:
    failures: list[BaseException] = []
    with mounted(kind, place, workers=4):

        def use(index: int) -> None:
            try:
                folder = place / f"user {index}"
                folder.mkdir()
                for round_ in range(30):
                    data = bytes([index]) * (5000 * round_ + 1)
                    (folder / "f").write_bytes(data)
                    os.rename(folder / "f", folder / "g")
                    assert (folder / "g").read_bytes() == data
                    assert os.listdir(folder) == ["g"]
                    os.unlink(folder / "g")
                folder.rmdir()
            except BaseException as failure:
                failures.append(failure)

        users = [threading.Thread(target=use, args=(index,)) for index in range(8)]
        for user in users:
            user.start()
        for user in users:
            user.join()
        assert failures == []
        assert os.listdir(place) == []


@pytest.mark.expects_log("is busy", "Transport endpoint|fuse_reply")
def test_unmounting_while_busy(kind: DoorKind, place: Path) -> None:
    filesystem = MemoryFileSystem()
    place.mkdir()
    door = make_door(kind, filesystem, place, 3, inline_runner)
    door.start()
    (place / "f").write_bytes(b"x" * 100)
    holder = hold(place / "f")
    ours = os.open(place / "f", os.O_RDONLY)
    try:
        door.stop(grace_seconds=0.1)
        assert door.wait(0)
        assert not mounting.is_mounted(place)
        assert os.listdir(place) == []
        refused(errno.ENOTCONN, os.pread, ours, 10, 0)
        with mounted(kind, place):
            assert os.listdir(place) == []
    finally:
        end(holder)
        with pytest.raises(OSError):
            os.close(ours)


@pytest.mark.expects_log("is busy", "fuse_reply|Transport endpoint|ended")
def test_unmounting_while_an_operation_waits(kind: DoorKind, place: Path) -> None:
    """The caller gets an error at once; the door waits for its own operation, which has a deadline."""
    entered, may_go = threading.Event(), threading.Event()
    may_go.set()  # the door looks at its mount as it starts

    class Waits(MemoryFileSystem):
        def statfs(self, ino: int) -> Any:
            entered.set()
            may_go.wait(60)
            return super().statfs(ino)

    place.mkdir()
    door = make_door(kind, Waits(), place, 2, inline_runner)
    door.start()
    entered.clear()
    may_go.clear()
    code = "import os,sys; os.statvfs(sys.argv[1])"
    caller = subprocess.Popen([sys.executable, "-c", code, place], stderr=subprocess.DEVNULL)
    try:
        assert entered.wait(60)
        stopper = threading.Thread(target=door.stop, args=(0.1,))
        stopper.start()
        assert caller.wait(60) == 1
        may_go.set()
        stopper.join(60)
        assert not stopper.is_alive()
        assert door.wait(0)
    finally:
        may_go.set()
        caller.kill()
        caller.wait()


def test_a_killed_process_gives_its_files_back(kind: DoorKind, place: Path) -> None:
    filesystem = MemoryFileSystem()
    with mounted(kind, place, filesystem):
        (place / "f").write_bytes(b"x")
        wait_until(lambda: filesystem.open_handles == 0)
        holder = hold(place / "f")
        assert filesystem.open_handles == 1
        os.unlink(place / "f")
        os.kill(holder.pid, signal.SIGKILL)
        end(holder)
        wait_until(lambda: filesystem.open_handles == 0, what="the release of a killed process's file")
        wait_until(lambda: len(filesystem.nodes) == 1, what="the orphan to go")


def test_who_unmounts_by_hand_ends_the_door(kind: DoorKind, place: Path) -> None:
    with mounted(kind, place) as door:
        assert not door.wait(0.05)
        subprocess.run(["umount", place], check=True)
        assert door.wait(60)


def test_an_aborted_connection_ends_the_door(kind: DoorKind, place: Path, tmp_path: Path) -> None:
    """An operator's `echo > /sys/fs/fuse/connections/N/abort`."""
    control = tmp_path / "connections"
    control.mkdir()
    with mounted(kind, place) as door:
        device = mounting.device_of(place)
        assert device is not None
        subprocess.run(["mount", "-t", "fusectl", "none", control], check=True)
        try:
            (control / device.partition(":")[2] / "abort").write_text("1")
        finally:
            subprocess.run(["umount", control], check=True)
        assert door.wait(60)


def test_a_read_that_the_kernel_answers_with_an_abort_ends_the_door_of_libfuse(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = pyfuse3.main

    async def aborted(**bounds: int) -> None:
        await serve(**bounds)
        raise ExceptionGroup("nursery", [ConnectionAbortedError(errno.ECONNABORTED, "aborted")])

    monkeypatch.setattr(pyfuse3, "main", aborted)
    with mounted("pyfuse3", place) as door:
        mounting.unmount(place)
        assert door.wait(60)


def test_a_second_mount_on_the_same_place_is_refused(kind: DoorKind, place: Path) -> None:
    with mounted("dev_fuse", place):
        with pytest.raises(MountError, match="already mounted"):
            make_door(kind, MemoryFileSystem(), place, 1, inline_runner).start()
        (place / "f").write_bytes(b"undisturbed")


def test_a_place_that_is_none(kind: DoorKind, tmp_path: Path) -> None:
    with pytest.raises(MountError, match="not a directory"):
        make_door(kind, MemoryFileSystem(), tmp_path / "nowhere", 1, inline_runner).start()


SERVER = """
import os, subprocess, sys; from dataclasses import replace
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from agent.fs.doors.make_door import make_door
from agent.host_os.workers_on_duty import Roster
from tests.support.pool.inline_runner import inline_runner
from tests.support.fs.memory_filesystem import MemoryFileSystem
class Believed(MemoryFileSystem):  # the kernel has the attributes of the root at hand, as an agent's
    def getattr(self, caller, ino, handle):
        return replace(super().getattr(caller, ino, handle), valid_seconds=60.0 if ino == 1 else 0.0)
door = make_door(sys.argv[3], Believed(), Path(sys.argv[2]), 2, inline_runner, roster=Roster(2))
door.start()
(Path(sys.argv[2]) / "f").write_bytes(b"served")
os.stat(sys.argv[2])
print("ready", flush=True)
if sys.argv[4] == "busy":
    holder = subprocess.Popen([sys.executable, "-c", sys.argv[5], Path(sys.argv[2]) / "f"], stdout=-1)
    holder.stdout.readline()
    door.stop(0.1)
    print(os.listdir(sys.argv[2]), door.wait(0), flush=True)
    holder.kill()
    holder.wait()
    sys.exit()
if sys.stdin.readline():
    door.stop()
    print(os.listdir(sys.argv[2]), door.wait(0), flush=True)
"""


@pytest.mark.expects_log("whose agent is dead")
def test_the_mount_of_a_killed_agent_is_cleared(kind: DoorKind, place: Path) -> None:
    place.mkdir()
    command = [sys.executable, "-c", SERVER, REPOSITORY, place, kind, "idle", HOLDER]
    for _ in range(2):
        agent = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        try:
            assert agent.stdout is not None
            assert agent.stdout.readline() == "ready\n"
        finally:
            agent.kill()
            agent.wait()
            for pipe in (agent.stdout, agent.stdin):
                if pipe is not None:
                    pipe.close()
        refused(errno.ENOTCONN, os.listdir, place)
    with mounted(kind, place):
        assert os.listdir(place) == []
    refused(errno.ENOENT, os.stat, place / "f")


@pytest.mark.parametrize("how", ["idle", "busy"])
def test_without_root(kind: DoorKind, how: str) -> None:
    """As nobody, through fusermount3. Other distributions open /dev/fuse to all, so the test brings a node
    of its own, in a mount namespace of its own."""
    with tempfile.TemporaryDirectory(prefix="g35-nobody-") as folder:
        place, node = Path(folder) / "mount", Path(folder) / "fuse"
        place.mkdir()
        os.chmod(folder, 0o755)
        os.chown(place, 65534, 65534)
        os.mknod(node, stat.S_IFCHR | 0o666, os.stat("/dev/fuse").st_rdev)
        os.chmod(node, 0o666)
        become = 'mount --bind "$0" /dev/fuse && exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"'
        command = ["unshare", "--mount", "sh", "-c", become, node, sys.executable, "-c", SERVER, REPOSITORY]
        environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [*command, place, kind, how, HOLDER],
            input="stop\n",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=environment,
        )
        assert done.stdout == "ready\n[] True\n", done.stderr
