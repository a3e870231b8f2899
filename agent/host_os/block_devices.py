"""What Linux says of a block device: its size, and the file behind it where it is a loop device (loop(4)).

A loop device and the file behind it are one medium by two names. The kernel names the file by device and
inode, so a hard link or a rename hides nothing.
"""

import fcntl
import os
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

_BLKGETSIZE64: Final = 0x80081272
_LOOP_GET_STATUS64: Final = 0x4C05
_LOOP_INFO_BYTES: Final = 232
"""`struct loop_info64` (linux/loop.h): `lo_device` and `lo_inode` are its first two fields."""
_LOOP_FILES: Final = "block/loop*/loop/backing_file"
_SYSTEM: Final = Path("/sys")
_DEVICES: Final = Path("/dev")
_MOUNTS: Final = Path("/proc/self/mountinfo")


def device_bytes(descriptor: int) -> int:
    found = os.fstat(descriptor)
    if stat.S_ISBLK(found.st_mode):
        (size,) = struct.unpack("Q", fcntl.ioctl(descriptor, _BLKGETSIZE64, bytes(8)))
        return int(size)
    return found.st_size


def is_device_folder(folder: Path, devices: Path = _DEVICES, mounts: Path = _MOUNTS) -> bool:
    """Whether a folder is for devices: in /dev, or of a devtmpfs. A file made there would lie in memory."""
    if Path(os.path.realpath(folder)).is_relative_to(devices):
        return True
    with suppress(OSError):
        number = os.stat(folder).st_dev
        wanted = f"{os.major(number)}:{os.minor(number)}"
        for line in mounts.read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted and after.split()[0] == "devtmpfs":
                return True
    return False


def backing_file(descriptor: int) -> int:
    """A descriptor of the file behind an open loop device, for the caller to close. -1: it is no loop device,
    or this process cannot reach its file by name."""
    found = os.fstat(descriptor)
    wanted = _behind(descriptor) if stat.S_ISBLK(found.st_mode) else None
    if wanted is None:
        return -1
    number = f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
    with suppress(OSError):
        name = (_SYSTEM / "dev/block" / number / "loop/backing_file").read_text().rstrip("\n")
        behind = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if _identity(os.fstat(behind)) == wanted:
            return behind
        os.close(behind)
    return -1


def loop_over(
    path: Path, file: os.stat_result, system: Path = _SYSTEM, devices: Path = _DEVICES
) -> str | None:
    """The loop device over a file that has this path, and other names perhaps."""
    wanted = os.path.realpath(path)
    for backing in system.glob(_LOOP_FILES):
        name = backing.parts[-3]
        with suppress(OSError):
            if backing.read_text().rstrip("\n") == wanted:
                return f"/dev/{name}"
            loop = os.open(devices / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if _behind(loop) == _identity(file):
                    return f"/dev/{name}"
            finally:
                os.close(loop)
    return None


def _behind(loop: int) -> tuple[int, int, int] | None:
    """Which file is behind it; None where it is no loop device, or has no file."""
    try:
        status = fcntl.ioctl(loop, _LOOP_GET_STATUS64, bytes(_LOOP_INFO_BYTES))
    except OSError:
        return None
    device, inode = struct.unpack_from("=QQ", status)
    # As huge_encode_dev of the kernel has it (linux/kdev_t.h).
    return (device >> 8) & 0xFFF, (device & 0xFF) | ((device >> 12) & 0xFFF00), inode


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return os.major(found.st_dev), os.minor(found.st_dev), found.st_ino
