"""Mounting and unmounting FUSE on Linux: with mount(2) where CAP_SYS_ADMIN allows it, or through fusermount3.

A mount is a file descriptor of /dev/fuse; it lives until it is unmounted or the last copy of the descriptor
is closed. After an agent was killed, its mount point answers ENOTCONN ("a dead mount"): see
`clear_dead_mount`.
"""

import array
import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.errors import G35Error
from agent.host_os.hung_agent import AgentHangs, asked
from agent.host_os.own_descriptors import receive_from_ours

log = logging.getLogger(__name__)

DEV_FUSE = "/dev/fuse"
SUBTYPE = "g35"
PROCESS_SUBTYPE = "g35-process"
"""The subtype of a mount inside an agent's mount; the inner mount reaches one process of the agent."""
FILESYSTEM_TYPE = f"fuse.{SUBTYPE}"

MS_NOSUID, MS_NODEV = 2, 4
MNT_FORCE, MNT_DETACH = 1, 2
FUSE_DEV_IOC_CLONE = 0x8004E500
"""_IOR(229, 0, uint32_t): make this descriptor of /dev/fuse another queue of the same mount."""

STACKED_MOUNTS_MAX = 16
"""Dead mounts on top of each other that we clear before giving up."""
PROBE_SECONDS = 3.0
POLL_SECONDS = 0.02

_libc = ctypes.CDLL(None, use_errno=True)


class MountError(G35Error):
    """A mount or unmount that cannot be done here."""


@dataclass(frozen=True, slots=True)
class MountOptions:
    """`allow_other`: None means yes where it is allowed, that is, as root.

    `read_ahead_bytes`: as much as INIT allows (fuse/session.py). It is four requests, so several workers
    read along a file at once. The kernel reads as much around each fault of a mapped file, so more would be
    read in vain where such a file is read here and there.
    """

    allow_other: bool | None = None
    transfer_bytes: int = 1 << 20
    read_ahead_bytes: int = 4 << 20
    subtype: str = SUBTYPE
    """The word behind `fuse.` in the kernel's table of mounts."""


_CAP_SYS_ADMIN = 1 << 21


def may_mount() -> bool:
    """Whether this process has CAP_SYS_ADMIN, root or not: then it needs no fusermount3."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) & _CAP_SYS_ADMIN)
    return os.geteuid() == 0


def mount(mountpoint: Path, options: MountOptions) -> int:
    """Mount and return the descriptor to serve; the kernel's INIT request already waits in it."""
    clear_dead_mount(mountpoint)
    if not mountpoint.is_dir():
        raise MountError(f"{mountpoint} is not a directory")
    return _mount_by_syscall(mountpoint, options) if may_mount() else _mount_by_helper(mountpoint, options)


def clone(descriptor: int) -> int:
    """Another queue of the same mount; the same queue once more where /dev/fuse may not be opened."""
    try:
        return own_clone(descriptor)
    except OSError as error:
        log.warning("workers share one queue: %s cannot be opened (%s)", DEV_FUSE, error.strerror)
        return os.dup(descriptor)


def own_clone(descriptor: int) -> int:
    """Another queue of the same mount: what is read there ends with it. OSError where /dev/fuse may not be
    opened."""
    copy = os.open(DEV_FUSE, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(copy, FUSE_DEV_IOC_CLONE, array.array("I", [descriptor]))
    except OSError as error:
        os.close(copy)
        raise MountError(f"cannot clone {DEV_FUSE}: {error.strerror}") from error
    return copy


def unmount(mountpoint: Path, *, lazy: bool = False, force: bool = False) -> bool:
    """Unmount; False where it is busy. `lazy` leaves open files alone; `force` ends the connection (root
    only)."""
    if may_mount():
        flags = (MNT_DETACH if lazy else 0) | (MNT_FORCE if force else 0)
        return _umount2(mountpoint, flags)
    helper = _helper()
    arguments = [helper, "-u", *(["-z"] if lazy else []), "--", str(mountpoint)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode == 0 or not is_mounted(mountpoint):
        return True
    if "busy" in done.stderr:
        return False
    raise MountError(f"{helper} could not unmount {mountpoint}: {done.stderr.strip()}")


def unmount_when_idle(mountpoint: Path, grace_seconds: float) -> bool:
    """Unmount, waiting up to `grace_seconds` for its last users; False where it stayed busy."""
    deadline = time.monotonic() + grace_seconds
    while not unmount(mountpoint):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def is_mounted(mountpoint: Path) -> bool:
    return device_of(mountpoint) is not None


def device_of(mountpoint: Path) -> str | None:
    """`major:minor` of the topmost file system mounted there, by the kernel's table: a hung mount holds
    nobody."""
    wanted = os.path.realpath(mountpoint.parent) + "/" + mountpoint.name
    found = None
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields = line.split()
            if _unescaped(fields[4]) == os.path.normpath(wanted):
                found = fields[2]
    return found


def is_connected(device: str) -> bool:
    """Whether the kernel keeps the file system of this `major:minor`, mounted here or in another mount
    namespace. False where there is no sysfs to ask."""
    return Path(f"/sys/class/bdi/{device}").exists()


def mounts_of_agents(table: Path = Path("/proc/self/mountinfo")) -> list[Path]:
    """Where this machine's agents are mounted, or were as they died; asks only the kernel's table, too."""
    with open(table, encoding="utf-8", errors="surrogateescape") as lines:
        # The number of fields before the dash varies; the type of the file system comes after it.
        halves = [line.split(" - ", 1) for line in lines]
    return [
        Path(_unescaped(first.split()[4])) for first, last in halves if last.split()[0] == FILESYSTEM_TYPE
    ]


def dead_mount_advice(mounts: Sequence[Path]) -> str:
    """What a person does about mounts whose agents have died (ENOTCONN)."""
    away = "umount -l" if may_mount() else "fusermount3 -uz"
    return f"the next start of the agent there clears it, or {away} {shlex.join(map(str, mounts))}"


def refuse_to_cover(mountpoint: Path) -> None:
    """Raises G35Error where files lie in the folder: a mount would hide them."""
    if not os.path.ismount(mountpoint) and any(mountpoint.iterdir()):
        raise G35Error(
            f"{mountpoint} is not empty, and mounting would hide what is in it", "name an empty folder"
        )


def clear_dead_mount(mountpoint: Path) -> None:
    """Take away what killed agents left mounted here; `MountError` where something alive is."""
    for _ in range(STACKED_MOUNTS_MAX):
        if not is_mounted(mountpoint):
            return
        answer = probe(mountpoint)
        if answer is None:
            raise MountError(f"{mountpoint} is mounted, and who serves it does not answer; unmount it first")
        if answer == 0:
            raise MountError(f"{mountpoint} is already mounted; unmount it first")
        if answer != errno.ENOTCONN:
            raise MountError(f"{mountpoint}: {os.strerror(answer)}")
        log.warning("unmounting %s, whose agent is dead", mountpoint)
        unmount(mountpoint, lazy=True)
    raise MountError(f"{mountpoint} has more than {STACKED_MOUNTS_MAX} dead mounts")


def set_read_ahead(mountpoint: Path, read_ahead_bytes: int) -> None:
    """Raise the read-ahead of the mount, which INIT can only lower. Needs root; without, 128 KiB stay."""
    device = device_of(mountpoint)
    if device is None or not may_mount():
        return
    with contextlib.suppress(OSError):  # a container's read-only /sys: slower, not wrong
        Path(f"/sys/class/bdi/{device}/read_ahead_kb").write_text(f"{read_ahead_bytes >> 10}\n")


def probe(mountpoint: Path) -> int | None:
    """The errno of a look at the mount point, 0 where it answers, None where nothing comes in time."""

    def look() -> None:
        os.stat(mountpoint)
        # The kernel answers a stat by what it believes of the root, for as long as that holds
        # (FOLDER_SECONDS), also once the agent is dead. This it asks the agent each time.
        os.statvfs(mountpoint)

    try:
        asked(mountpoint, look, PROBE_SECONDS)
    except AgentHangs:
        return None
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _mount_by_syscall(mountpoint: Path, options: MountOptions) -> int:
    try:
        descriptor = os.open(DEV_FUSE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise MountError(f"{DEV_FUSE}: {error.strerror}; is the fuse module loaded?") from error
    data = f"fd={descriptor},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},{_common(options)}"
    if options.allow_other is not False:
        data += ",allow_other"
    subtype = options.subtype
    arguments = (subtype.encode(), os.fsencode(mountpoint), f"fuse.{subtype}".encode())
    if _libc.mount(*arguments, ctypes.c_ulong(MS_NOSUID | MS_NODEV), data.encode()) != 0:
        code = ctypes.get_errno()
        os.close(descriptor)
        raise MountError(f"mount {mountpoint}: {os.strerror(code)}")
    return descriptor


def _mount_by_helper(mountpoint: Path, options: MountOptions) -> int:
    """fusermount3 mounts for us and sends the descriptor over a socket (SCM_RIGHTS)."""
    wanted = f"fsname={options.subtype},subtype={options.subtype},{_common(options)}"
    if options.allow_other:
        wanted += ",allow_other"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        done = subprocess.run(
            [_helper(), "-o", wanted, "--", str(mountpoint)],
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise MountError(f"fusermount3: {done.stderr.strip() or 'failed'}")
        theirs.close()
        _, descriptors = receive_from_ours(ours, 1, 1)
    if not descriptors:
        raise MountError("fusermount3 mounted but sent no descriptor")
    return descriptors[0]


def _common(options: MountOptions) -> str:
    return f"default_permissions,max_read={options.transfer_bytes}"


def _helper() -> str:
    found = shutil.which("fusermount3") or shutil.which("fusermount")
    if found is None:
        raise MountError("mounting without root needs fusermount3: install the package fuse3")
    return found


def _umount2(mountpoint: Path, flags: int) -> bool:
    if _libc.umount2(os.fsencode(mountpoint), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EBUSY:
        return False
    if code in (errno.EINVAL, errno.ENOENT):
        return True  # not mounted any more: somebody was faster
    raise MountError(f"unmount {mountpoint}: {os.strerror(code)}")


def _unescaped(field: str) -> str:
    """mountinfo writes space, tab, newline and backslash in octal."""
    for octal, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(octal, plain)
    return field
