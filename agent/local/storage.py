"""The medium of a local namespace (`nvmeof/controller/storage.py`): pread(2) and pwrite(2) on a device.

The threads of the agent beside it and those of other agents' connections use one and the same object. Direct
I/O wants memory, offset and length at block boundaries. Payload of a connection may lie elsewhere: it is
copied to such a place, or, where it is part of a block only, goes through the page cache, which Linux keeps
in step with direct I/O.

Writes to one place take turns, in the order in which they came. A write that hangs holds up later ones
there; so it never lands behind one that was acknowledged, nor does one that waited and was given up. A write
that has waited for `TURN_SECONDS` is refused: the fence of its host stands for longer than that.
"""

import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
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
"""How long the end waits for reads and writes under way. After that the device stays open, at the end of the
process too: a descriptor that is closed under a write could be another file's when it goes on."""
TURN_SECONDS: Final = 10.0
"""The longest that a write waits for earlier ones to its place. Less than the time for which a host that lost
its connection sends no other write there (`LOST_SECONDS`, agent/remote/fence.py)."""
HUNG_SECONDS: Final = 10.0
HUNG_MOST: Final = 8
"""With so many reads and writes under way for so long the device hangs, and new ones are refused. Each of
them would hold a thread of the agent for as long; hosts connect anew, and send more."""
_ZEROS: Final = memoryview(payload_memory(1 << 20)).toreadonly()


class DeviceStorage:
    """`Storage` of one device. Safe from any thread."""

    lba_bytes = BLOCK_BYTES

    def __init__(self, device: Device) -> None:
        self.device = device
        self.nguid = device.label.nguid
        self.block_count = device.label.size // BLOCK_BYTES
        self._changed = threading.Condition()
        self._tickets = 0
        self._turns: dict[int, tuple[int, int]] = {}
        """First byte and end of writes under way and of those that wait, by ticket, in the order in which
        they came: as many as threads write."""
        self._begun: dict[int, float] = {}
        """When each read, write and flush under way began, by ticket; the oldest first."""
        self._open = True
        self._is_closed = False
        self._is_block = stat.S_ISBLK(os.fstat(device.buffered).st_mode)

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
            _put(descriptor, data, NAMESPACE_START + offset)

    @contextmanager
    def _turn(self, first: int, end: int) -> Iterator[None]:
        """No other write to these bytes is under way meanwhile, and none that came earlier waits. Raises
        StorageError after `TURN_SECONDS`."""
        with self._changed:
            ticket = self._ticket()
            self._turns[ticket] = (first, end)
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self._is_first(ticket), TURN_SECONDS):
                    raise StorageError(
                        Status.NAMESPACE_NOT_READY, f"an earlier write there hangs for {TURN_SECONDS:g} s"
                    )
            yield
        finally:
            with self._changed:
                del self._turns[ticket]
                self._changed.notify_all()

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _is_first(self, ticket: int) -> bool:
        """Whether no earlier write meets the bytes of this one."""
        first, end = self._turns[ticket]
        for earlier, (one, other) in self._turns.items():
            if earlier == ticket:
                break
            if one < end and first < other:
                return False
        return True

    @contextmanager
    def _use(self, fault: Status) -> Iterator[None]:
        """The device stays open meanwhile. Raises StorageError for OSError, with `fault` where nothing says
        more."""
        now = time.monotonic()
        with self._changed:
            if not self._open:
                raise StorageError(Status.NAMESPACE_NOT_READY, "the device is being closed")
            if self._hangs(now):
                raise StorageError(Status.NAMESPACE_NOT_READY, f"the device hangs for {HUNG_SECONDS:g} s")
            ticket = self._ticket()
            self._begun[ticket] = now
        try:
            yield
        except OSError as failed:
            raise self._error(failed, fault) from failed
        finally:
            with self._changed:
                del self._begun[ticket]
                self._changed.notify_all()

    def _hangs(self, now: float) -> bool:
        if len(self._begun) < HUNG_MOST:
            return False
        latest = next(islice(self._begun.values(), HUNG_MOST - 1, None))
        return now - latest >= HUNG_SECONDS

    def _error(self, failed: OSError, fault: Status) -> StorageError:
        """What a host is told: that the device is gone, that it has no room, or that its medium failed."""
        said = failed.strerror or str(failed)
        if failed.errno in _GONE or self.is_gone():
            return StorageError(Status.NAMESPACE_NOT_READY, f"the device is gone: {said}")
        if failed.errno in _FULL:
            return StorageError(Status.CAPACITY_EXCEEDED, f"no room: {said}")
        return StorageError(fault, said)

    def is_gone(self) -> bool:
        """Whether it is a block device without its room. Linux sets the size of one that was pulled to zero,
        while a process has it open; reads find its end there, and writes no room. Reads nothing."""
        if not self._is_block or self._is_closed:
            return False
        try:
            return os.lseek(self.device.buffered, 0, os.SEEK_END) < NAMESPACE_START + self.device.label.size
        except OSError:
            return True

    def flush(self) -> None:
        with self._use(Status.WRITE_FAULT):
            os.fdatasync(self.device.buffered)

    def write_zeroes(self, offset: int, length: int, *, deallocate: bool) -> None:
        end = offset + length
        with self._turn(offset, end), self._use(Status.WRITE_FAULT):
            for at in range(offset, end, len(_ZEROS)):
                _put(self.device.direct, _ZEROS[: min(len(_ZEROS), end - at)], NAMESPACE_START + at)

    def deallocate(self, offset: int, length: int) -> None:
        """Nothing: room on the device is the namespace's for good, and what is read there is nobody's."""

    def end(self) -> None:
        """Refuse all reads and writes from now on. Those under way go on."""
        with self._changed:
            self._open = False

    def close(self) -> bool:
        """The end. False: something under way hangs, and the device stays open; call it again. Idempotent."""
        with self._changed:
            self._open = False
            if not self._changed.wait_for(lambda: not self._begun, CLOSE_SECONDS):
                return False
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self.device.close()
        return True


def _address(data: memoryview) -> int:
    found = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"]
    return int(found[0])


def _put(descriptor: int, rest: memoryview, at: int) -> None:
    """Write all of it at a place of the device."""
    while rest:
        put = os.pwrite(descriptor, rest, at)
        rest, at = rest[put:], at + put
