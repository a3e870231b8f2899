"""The medium of a local namespace (`nvmeof/controller/storage.py`): pread(2) and pwrite(2) on a device.

The threads of the agent beside it and those of other agents' connections use one and the same object. Direct
I/O wants memory, offset and length at block boundaries. Payload of a connection may lie elsewhere: it is
copied to such a place, or, where it is part of a block only, goes through the page cache, which Linux keeps
in step with direct I/O.

Writes to one place take turns. A write that hangs holds up later ones there, until their deadline; so it
never lands behind one that was acknowledged.
"""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

from agent.host_os.payload_memory import payload_memory
from agent.local.device import Device
from agent.local.label import BLOCK_BYTES, NAMESPACE_START
from nvmeof.controller.storage import Operation, Scratch, StorageError
from nvmeof.wire.status import Status

_GONE: Final = frozenset({errno.ENODEV, errno.ENXIO, errno.ESHUTDOWN})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
CLOSE_SECONDS: Final = 2.0
"""How long the end waits for reads and writes under way. After that the device stays open, as the process
ends: a descriptor that is closed under a write could be another file's when it goes on."""
_ZEROS: Final = memoryview(payload_memory(1 << 20)).toreadonly()


class DeviceStorage:
    """`Storage` of one device. Safe from any thread."""

    lba_bytes = BLOCK_BYTES

    def __init__(self, device: Device) -> None:
        self.device = device
        self.nguid = device.label.nguid
        self.block_count = device.label.size // BLOCK_BYTES
        self.read_bytes = 0
        self.written_bytes = 0
        """Since the start, by this agent and by others; added without a lock, so a few may be lost."""
        self._changed = threading.Condition()
        self._writing: list[tuple[int, int]] = []
        """First byte and end of writes under way: as many as threads write."""
        self._users = 0
        self._open = True

    def admit(self, operation: Operation, offset: int, length: int, now: float) -> float:
        return now

    def held_until(self, now: float) -> float:
        return now

    def used_blocks(self) -> int:
        return self.block_count

    def read(self, offset: int, length: int, scratch: Scratch) -> memoryview:
        view = scratch.take(length)
        descriptor = self.device.direct if not offset % BLOCK_BYTES else self.device.buffered
        rest, at = view, NAMESPACE_START + offset
        with self._use(Status.UNRECOVERED_READ_ERROR):
            while rest:
                got = os.preadv(descriptor, [rest], at)
                if got == 0:
                    raise OSError(errno.EIO, "the device has become shorter")
                rest, at = rest[got:], at + got
        self.read_bytes += length
        return view

    def write_window(self, offset: int, length: int) -> memoryview | None:
        return None

    def write(self, offset: int, data: memoryview, *, placed: bool) -> None:
        assert not placed  # There is no window.
        descriptor = self.device.buffered
        if self.device.is_direct and not offset % BLOCK_BYTES and not len(data) % BLOCK_BYTES:
            descriptor = self.device.direct
            if _address(data) % BLOCK_BYTES:
                there = payload_memory(len(data))
                there[:] = data
                data = there
        with self._turn(offset, offset + len(data)), self._use(Status.WRITE_FAULT):
            rest, at = data, NAMESPACE_START + offset
            while rest:
                put = os.pwrite(descriptor, rest, at)
                rest, at = rest[put:], at + put
        self.written_bytes += len(data)

    @contextmanager
    def _turn(self, first: int, end: int) -> Iterator[None]:
        """No other write to these bytes is under way meanwhile."""
        mine = (first, end)
        with self._changed:
            while any(one < end and first < other for one, other in self._writing):
                self._changed.wait()
            self._writing.append(mine)
        try:
            yield
        finally:
            with self._changed:
                self._writing.remove(mine)
                self._changed.notify_all()

    @contextmanager
    def _use(self, fault: Status) -> Iterator[None]:
        """The device stays open meanwhile. Raises StorageError for OSError, with `fault` where nothing says
        more."""
        with self._changed:
            if not self._open:
                raise StorageError(Status.NAMESPACE_NOT_READY, "the device is being closed")
            self._users += 1
        try:
            yield
        except OSError as failed:
            raise _error(failed, fault) from failed
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def flush(self) -> None:
        with self._use(Status.WRITE_FAULT):
            os.fdatasync(self.device.buffered)

    def write_zeroes(self, offset: int, length: int, *, deallocate: bool) -> None:
        for at in range(offset, offset + length, len(_ZEROS)):
            self.write(at, _ZEROS[: min(len(_ZEROS), offset + length - at)], placed=False)

    def deallocate(self, offset: int, length: int) -> None:
        """Nothing: room on the device is the namespace's for good, and what is read there is nobody's."""

    def close(self) -> None:
        """The end; idempotent."""
        with self._changed:
            was_open, self._open = self._open, False
            is_idle = self._changed.wait_for(lambda: not self._users, CLOSE_SECONDS)
        if was_open and is_idle:
            self.device.close()


def _address(data: memoryview) -> int:
    found = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"]
    return int(found[0])


def _error(failed: OSError, status: Status) -> StorageError:
    """What a host is told: that the device is gone, that it has no room, or that its medium failed."""
    if failed.errno in _GONE:
        return StorageError(Status.NAMESPACE_NOT_READY, f"the device is gone: {failed.strerror or failed}")
    if failed.errno in _FULL:
        return StorageError(Status.CAPACITY_EXCEEDED, f"no room: {failed.strerror or failed}")
    return StorageError(status, failed.strerror or str(failed))
