"""A device of this machine as a local namespace: a block device or a file, opened for this process alone.

`open_device` refuses what would harm somebody: a device that is mounted or in use, a folder, one that holds
other data. It writes a label (label.py) on one that begins with zeros, and on no other.

One process at a time has the device: Linux grants one exclusive lock of it (flock(2)), and an exclusive open
of a block device (open(2), O_EXCL). The lock goes with the process, and a process does not end while one of
its writes is under way. So a write of a killed agent never lands behind those of its successor.
"""

import errno
import fcntl
import logging
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.config.local_section import LocalSection
from agent.errors import G35Error, UserError
from agent.host_os.block_devices import backing_file, device_bytes, is_device_folder, loop_over
from agent.host_os.payload_memory import payload_memory
from agent.local.label import (
    BLOCK_BYTES,
    LABEL_BYTES,
    NAMESPACE_START,
    Label,
    NoLabel,
    decode_label_untrusted,
)
from agent.local.remembered_labels import FILE as LABELS_FILE
from agent.pool.volume.settings import LOCAL_NGUID
from agent.sizes import typed_size

log = logging.getLogger(__name__)

NAMESPACE_BYTES_MIN: Final = 2 << 20
"""The pool map's room and one more mebibyte. A volume wants far more, and says so itself."""


class DeviceInUse(G35Error):
    """Another process has it, or Linux itself: mounted, or part of another device."""


class DeviceMissing(UserError):
    """There is nothing at the path. It may come."""


class NotMade(UserError):
    """It is blank, or a file that may be made, and nothing is to be made."""


@dataclass(slots=True)
class Device:
    """An open device. `direct` and `buffered` are descriptors of it; the same where it has no O_DIRECT."""

    path: Path
    label: Label
    direct: int
    buffered: int
    behind: int = -1
    """Of the file behind a loop device, held for its lock alone."""

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes go past the page cache."""
        return self.direct != self.buffered

    def close(self) -> None:
        for descriptor in {self.direct, self.buffered, self.behind} - {-1}:
            os.close(descriptor)


def same_device(paths: list[Path]) -> tuple[Path, Path] | None:
    """Two of them that lead to one device or file, by whatever names."""
    seen: dict[tuple[str, int, int], Path] = {}
    for path in paths:
        with suppress(OSError):
            found = os.stat(path)
            is_block = stat.S_ISBLK(found.st_mode)
            key = ("block", found.st_rdev, 0) if is_block else ("file", found.st_dev, found.st_ino)
            if key in seen:
                return seen[key], path
            seen[key] = path
    return None


def read_label(path: Path) -> Label:
    """The label of a device that another process may have. Raises G35Error where it cannot be read, or is
    none."""
    try:
        with open(path, "rb", buffering=0) as device:
            return decode_label_untrusted(device.read(LABEL_BYTES))
    except OSError as failed:
        raise G35Error(f"{path}: {failed.strerror or failed}", "see the path of [[local]]") from None
    except NoLabel as lacks:
        raise G35Error(f"{path} carries no local namespace but {lacks}", "see docs/tier0.md") from None


def open_device(section: LocalSection, had: str = "", *, make: bool = True) -> Device:
    """Open the device of a section, and make its label where it is blank. A file is made where there is none
    and the section has a size.

    `had`: the NGUID (hex) of the namespace that this path led to before. Then no new one is made there.
    `make`: whether anything may be made at all.

    Raises `DeviceInUse`, `DeviceMissing`, `NotMade`, UserError for a device that may not be used so, and
    G35Error.
    """
    path = section.path
    flags = os.O_RDWR | os.O_CLOEXEC
    kind = _kind(path)
    if kind is None:
        _want_makeable(section, had, make)
        flags |= os.O_CREAT | os.O_EXCL
    elif stat.S_ISBLK(kind):
        flags |= os.O_EXCL
    try:
        buffered = os.open(path, flags, 0o600)
    except OSError as failed:
        if failed.errno in (errno.EBUSY, errno.ETXTBSY):
            raise DeviceInUse(
                f"{path} is in use: by another agent, mounted, or part of another device",
                "see lsblk; a device of [[local]] belongs to g35 alone",
            ) from None
        raise G35Error(f"cannot open {path}: {failed.strerror or failed}", "see its mode and owner") from None
    behind, is_ours_to_remove = -1, False
    try:
        _lock(path, buffered)
        # Without the lock it may be another agent's by now, which came between.
        is_ours_to_remove = kind is None
        if not _leads_to(path, buffered, kind):
            is_ours_to_remove = False
            raise G35Error(f"{path} was replaced while it was opened", "try again")
        behind = _lock_behind(path, buffered)
        label = _label_of(section, buffered, had, make)
        return Device(path, label, _direct(path, buffered), buffered, behind)
    except BaseException:
        if is_ours_to_remove:
            path.unlink(missing_ok=True)
        for descriptor in {buffered, behind} - {-1}:
            os.close(descriptor)
        raise


def _kind(path: Path) -> int | None:
    """The mode of what is there; None where nothing is. Raises UserError where it is no device."""
    try:
        kind = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    except OSError as failed:
        raise G35Error(f"{path}: {failed.strerror or failed}", "see the path of [[local]]") from None
    if stat.S_ISDIR(kind):
        raise UserError(f"{path} is a folder", "name a block device, or a file in that folder")
    if not stat.S_ISBLK(kind) and not stat.S_ISREG(kind):
        raise UserError(f"{path} is neither a block device nor a file", "name one that is")
    return kind


def _leads_to(path: Path, descriptor: int, kind: int | None) -> bool:
    """Whether the path still leads to what was opened, and that is of the kind that was looked at. A file
    that another agent made and removed again has a lock to give, and no name."""
    opened = os.fstat(descriptor)
    if stat.S_IFMT(opened.st_mode) != stat.S_IFMT(kind or stat.S_IFREG):
        return False
    try:
        now = os.stat(path)
    except OSError:
        return False
    if stat.S_ISBLK(opened.st_mode):
        return now.st_rdev == opened.st_rdev
    return (now.st_dev, now.st_ino) == (opened.st_dev, opened.st_ino)


def _want_makeable(section: LocalSection, had: str, make: bool) -> None:
    """Raises DeviceMissing or NotMade where no file may be made. There is nothing at the path."""
    path = section.path
    if had:
        raise _lost(path, had, "it is gone", DeviceMissing)
    if not section.size:
        raise DeviceMissing(
            f"{path} does not exist", "name a device or a file; a file is made where `size` says how large"
        )
    if path.is_symlink():
        raise DeviceMissing(f"{path} is a link to nothing", "bring back what it leads to, or remove it")
    if is_device_folder(path.parent):
        # A file there would be memory, and stand in the way of the SSD when it comes.
        raise DeviceMissing(f"{path} does not exist", "bring the device back; no file is made among devices")
    if not make:
        raise NotMade(f"{path} is not made yet", "start the agent, or format the pool")


def _lost(path: Path, had: str, what: str, kind: type[UserError] = UserError) -> UserError:
    return kind(
        f"{path} had local namespace {had}: {what}, and no new one is made in its place",
        f"bring it back; if its values are given up, take its row out of {LABELS_FILE} in the state folder",
    )


def _lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as failed:
        if failed.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise G35Error(f"cannot lock {path}: {failed.strerror or failed}", "see docs/tier0.md") from None
        raise DeviceInUse(
            f"another process uses {path}", f"end it, or name another device; fuser -v {path} names it"
        ) from None
    if (loop := loop_over(path, os.fstat(descriptor))) is not None:
        raise DeviceInUse(f"{path} is the file behind {loop}", f"detach it first: losetup -d {loop}")


def _lock_behind(path: Path, descriptor: int) -> int:
    """Lock the file behind a loop device, which another agent could have by its name. -1: there is none."""
    behind = backing_file(descriptor)
    if behind >= 0:
        try:
            fcntl.flock(behind, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(behind)
            raise DeviceInUse(
                f"another process uses the file behind {path}", f"end it; losetup {path} names the file"
            ) from None
    return behind


def _head(descriptor: int, wanted: int) -> bytes:
    """The first bytes of a device, all `wanted` of them. Raises OSError: what cannot be read is not blank."""
    head = bytearray()
    while len(head) < wanted:
        got = os.pread(descriptor, wanted - len(head), len(head))
        if not got:
            raise OSError(errno.EIO, f"it has {wanted} bytes, and no more than {len(head)} are read")
        head += got
    return bytes(head)


def _label_of(section: LocalSection, descriptor: int, had: str, make: bool) -> Label:
    """The label that is there, or a new one on a blank device."""
    path = section.path
    try:
        there = device_bytes(descriptor)
        head = _head(descriptor, min(there, NAMESPACE_START))
        if not any(head):
            if had:
                raise _lost(path, had, "it is empty")
            if not make:
                raise NotMade(f"{path} has no namespace yet", "start the agent, or format the pool")
            is_new_file = there == 0 and stat.S_ISREG(os.fstat(descriptor).st_mode)
            return _new_label(section, descriptor, section.size if is_new_file else there)
        label = decode_label_untrusted(head[:LABEL_BYTES])
    except NoLabel as lacks:
        raise UserError(
            f"{path} is not blank, it carries {lacks}; it was not touched",
            "if nothing there is wanted, make its first mebibyte zeros: "
            f"dd if=/dev/zero of={path} bs=1M count=1 conv=notrunc",
        ) from None
    except OSError as failed:
        raise G35Error(f"cannot use {path}: {failed.strerror or failed}", "see the device") from None
    if NAMESPACE_START + label.size > there:
        raise UserError(
            f"{path} has {there} bytes, and its label says {NAMESPACE_START + label.size}: it was cut short",
            "bring back the device as it was; its values can be lost to no other",
        )
    if section.size and _fitting(section.size) != label.size:
        raise UserError(
            f"{path} was made with size = {NAMESPACE_START + label.size}, and `size` says {section.size} now",
            "a local namespace keeps its size: leave `size` out, or set it back",
        )
    return label


def _fitting(device_bytes: int) -> int:
    """The size of the namespace on a device."""
    return (device_bytes - NAMESPACE_START) // BLOCK_BYTES * BLOCK_BYTES


def _new_label(section: LocalSection, descriptor: int, there: int) -> Label:
    if section.size > there:
        raise UserError(
            f"{section.path} has {there} bytes, and `size` says {section.size}", "set a `size` that it has"
        )
    size = _fitting(section.size or there)
    if size < NAMESPACE_BYTES_MIN:
        least = NAMESPACE_START + NAMESPACE_BYTES_MIN
        raise UserError(
            f"{section.path} has {section.size or there} bytes, too few for a local namespace",
            f"give it {typed_size(least)} at the least, and far more to be of use",
        )
    if stat.S_ISREG(os.fstat(descriptor).st_mode) and not os.fstat(descriptor).st_size:
        os.ftruncate(descriptor, there)
    label = Label(LOCAL_NGUID + os.urandom(16 - len(LOCAL_NGUID)), size)
    os.pwrite(descriptor, label.encode(), 0)
    os.fdatasync(descriptor)
    log.info("%s is local namespace %s from now on, %d bytes", section.path, label.nguid.hex(), size)
    return label


def _direct(path: Path, buffered: int) -> int:
    """A descriptor with O_DIRECT; `buffered` where the file system has none."""
    direct = -1
    with suppress(OSError):
        direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        one, other = os.fstat(direct), os.fstat(buffered)
        is_it = (one.st_dev, one.st_ino, one.st_rdev) == (other.st_dev, other.st_ino, other.st_rdev)
        if is_it and os.preadv(direct, [payload_memory(BLOCK_BYTES)], 0) == BLOCK_BYTES:
            return direct
    if direct >= 0:
        os.close(direct)
    log.info("%s has no direct I/O (O_DIRECT): it goes through the page cache", path)
    return buffered
