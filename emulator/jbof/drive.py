"""One drive: a medium, a model of its speed, its faults and its counters, behind the seam of a controller.

Read `nvmeof/controller/storage.py` first: a drive is a `Storage`. Then `medium`, `drive_model` and `faults`,
which this file joins.

Many connection threads call at once. One lock guards the model, the faults' source of chance and the
counters; it is held for a few assignments, never around the moving of bytes. Bytes themselves have no lock:
as on a real drive, a read that overlaps a write in flight may see either.
"""

from __future__ import annotations

import errno
import threading
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from emulator.jbof.drive_model import DriveModel, DriveModelSettings
from emulator.jbof.faults import DriveFaults, ErrorFault, FlipFault, choose_bits
from emulator.jbof.medium import Medium
from nvmeof.controller.storage import HELD, Operation, Scratch, StorageError
from nvmeof.wire.status import Status

_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_MOST_COPIED: Final = 64 << 20
_WRITING: Final = frozenset({Operation.WRITE, Operation.WRITE_ZEROES})


@dataclass(slots=True)
class DriveCounters:
    """What a drive did since it was made. Bytes are payload; commands include failed ones."""

    read_commands: int = 0
    read_bytes: int = 0
    write_commands: int = 0
    write_bytes: int = 0
    flush_commands: int = 0
    compare_commands: int = 0
    write_zeroes_commands: int = 0
    write_zeroes_bytes: int = 0
    deallocate_commands: int = 0
    deallocate_bytes: int = 0
    failed_commands: int = 0
    faults_injected: dict[str, int] = field(default_factory=dict)


_COMMAND_COUNTER: Final = {
    Operation.READ: "read_commands",
    Operation.WRITE: "write_commands",
    Operation.FLUSH: "flush_commands",
    Operation.COMPARE: "compare_commands",
    Operation.WRITE_ZEROES: "write_zeroes_commands",
    Operation.DEALLOCATE: "deallocate_commands",
}


class Drive:
    """A namespace's medium. `number` is its place in the enclosure, from 0; its NSID is one more."""

    def __init__(
        self,
        number: int,
        medium: Medium,
        *,
        nguid: bytes,
        lba_bytes: int = 4096,
        model: DriveModelSettings | None = None,
        seed: int = 0,
    ) -> None:
        if medium.size <= 0 or medium.size % lba_bytes:
            raise ValueError(f"a drive of {medium.size} bytes is no whole number of {lba_bytes}-byte blocks")
        if len(nguid) != 16 or not any(nguid):
            raise ValueError("an NGUID has 16 bytes, not all of them zero")
        self.number = number
        self.medium = medium
        self.nguid = nguid
        self.lba_bytes = lba_bytes
        self.block_count = medium.size // lba_bytes
        self.counters = DriveCounters()
        self.faults = DriveFaults(seed)
        self._lock = threading.Lock()
        self._faulty = False  # faults.any_active, kept here so that a healthy drive pays one test
        self._model: DriveModel | None = None
        self.set_model(model or DriveModelSettings())

    # --- the seam: nvmeof.controller.storage.Storage ---------------------------------------------------

    def used_blocks(self) -> int:
        return min(self.block_count, -(-self.medium.used_bytes() // self.lba_bytes))

    def admit(self, operation: Operation, offset: int, length: int, now: float) -> float:
        with self._lock:
            counters = self.counters
            if operation is Operation.READ:
                counters.read_commands += 1
            elif operation is Operation.WRITE:
                counters.write_commands += 1
            else:
                name = _COMMAND_COUNTER[operation]
                setattr(counters, name, getattr(counters, name) + 1)
            due = now
            if self._model is not None:
                is_read = operation in (Operation.READ, Operation.COMPARE)
                due = self._model.due(is_read=is_read, length=length, now=now)
            if self._faulty:
                due = self._admit_faulty(operation, due)
            return due

    def _admit_faulty(self, operation: Operation, due: float) -> float:
        faults = self.faults
        if faults.hung:
            self._count_fault("hang")
            return HELD
        error = faults.failing(operation)
        if error is not None:
            self._count_fault("error")
            self.counters.failed_commands += 1
            raise StorageError(error.status, "a fault set for this drive", do_not_retry=error.do_not_retry)
        if faults.full and operation in _WRITING:
            self._count_fault("full")
            self.counters.failed_commands += 1
            raise StorageError(Status.CAPACITY_EXCEEDED, "the drive is full (a fault)")
        if faults.extra_latency_s:
            self._count_fault("slow")
            due += faults.extra_latency_s
        return due

    def held_until(self, now: float) -> float:
        with self._lock:
            return HELD if self.faults.hung else now

    def read(self, offset: int, length: int, scratch: Scratch) -> memoryview:
        view = self.medium.window(offset, length)
        if view is None:
            view = scratch.take(length)
            try:
                self.medium.read_into(offset, view)
            except OSError as error:
                raise self._failed(error, Status.UNRECOVERED_READ_ERROR) from error
        with self._lock:
            self.counters.read_bytes += length
            if not self._faulty:
                return view
            flips = self.faults.bits_to_flip(offset, length)
            if flips:
                self._count_fault("flip_on_read")
        if flips:
            copy = bytearray(view)
            for position, mask in flips:
                copy[position] ^= mask
            view = memoryview(copy)
        return view

    def write_window(self, offset: int, length: int) -> memoryview | None:
        # A write that is to be refused or lost goes to scratch, so that it changes nothing. One that fails
        # with an error status may have been stored or not, as on a real drive.
        if self._faulty and (self.faults.full or self.faults.lose_writes):
            return None
        return self.medium.window(offset, length)

    def write(self, offset: int, data: memoryview, *, placed: bool) -> None:
        with self._lock:
            if self._faulty:
                if self.faults.full:
                    return  # Not stored; `admit`, which comes next, says so.
                if self.faults.lose_writes and self.faults.loses_this_write():
                    self._count_fault("lose_writes")
                    self.counters.write_bytes += len(data)
                    return
        if not placed:
            self._store(offset, data)
        with self._lock:
            self.counters.write_bytes += len(data)

    def _store(self, offset: int, data: memoryview | bytes) -> None:
        try:
            self.medium.write(offset, data)
        except OSError as error:
            raise self._failed(error, Status.WRITE_FAULT) from error

    def flush(self) -> None:
        try:
            self.medium.flush()
        except OSError as error:
            raise self._failed(error, Status.WRITE_FAULT) from error

    def write_zeroes(self, offset: int, length: int, *, deallocate: bool) -> None:
        """Zeros are always made by giving room back: to a host the two cannot be told apart."""
        self._punch(offset, length)
        with self._lock:
            self.counters.write_zeroes_bytes += length

    def deallocate(self, offset: int, length: int) -> None:
        self._punch(offset, length)
        with self._lock:
            self.counters.deallocate_bytes += length

    def _punch(self, offset: int, length: int) -> None:
        try:
            self.medium.punch(offset, length)
        except OSError as error:
            raise self._failed(error, Status.WRITE_FAULT) from error

    def _failed(self, error: OSError, otherwise: Status) -> StorageError:
        """The status of an error of the world: a full disk is full, anything else is a media error."""
        with self._lock:
            self.counters.failed_commands += 1
        full = error.errno in _FULL_ERRNOS
        return StorageError(Status.CAPACITY_EXCEEDED if full else otherwise, f"drive {self.number}: {error}")

    # --- what the control socket does to a drive ----------------------------------------------------------

    def set_model(self, settings: DriveModelSettings) -> None:
        """Imitate another drive from the next command on."""
        with self._lock:
            self._model = None if settings.is_off else DriveModel(settings)

    def set_slow(self, latency_s: float) -> None:
        """Add `latency_s` seconds to every command; 0 takes it away."""
        if not 0 <= latency_s <= 3600:
            raise ValueError("a latency is between 0 and 3600 seconds")
        with self._lock:
            self.faults.extra_latency_s = latency_s
            self._faulty = self.faults.any_active

    def set_hung(self, hung: bool) -> None:
        with self._lock:
            self.faults.hung = hung
            self._faulty = self.faults.any_active

    def set_full(self, full: bool) -> None:
        with self._lock:
            self.faults.full = full
            self._faulty = self.faults.any_active

    def set_error(self, fault: ErrorFault | None) -> None:
        with self._lock:
            self.faults.error = fault
            self._faulty = self.faults.any_active

    def set_flip_on_read(self, fault: FlipFault | None) -> None:
        with self._lock:
            self.faults.flip_on_read = fault
            self._faulty = self.faults.any_active

    def set_lose_writes(self, probability: float) -> None:
        if not 0 <= probability <= 1:
            raise ValueError("a probability is between 0 and 1")
        with self._lock:
            self.faults.lose_writes = probability
            self._faulty = self.faults.any_active

    def heal(self) -> None:
        """No faults any more. What was damaged at rest stays damaged."""
        with self._lock:
            self.faults.heal()
            self._faulty = False

    def flip_at_rest(self, offset: int, length: int, bits: int) -> list[int]:
        """Flip `bits` different bits of the range in the medium itself; the offsets of the bytes hit."""
        self._check_range(offset, length)
        if bits <= 0 or bits > 1 << 20:
            raise ValueError("flip between 1 and 1048576 bits")
        with self._lock:
            chosen = choose_bits(self.faults.chance, offset, length, bits)
            self._count_fault("flip_at_rest")
        one = bytearray(1)
        for position, mask in chosen:
            self.medium.read_into(position, memoryview(one))
            one[0] ^= mask
            self.medium.write(position, bytes(one))
        return sorted({position for position, _ in chosen})

    def zero_at_rest(self, offset: int, length: int) -> None:
        """Lose a range: it reads as zeros, as after a dropped write or a trim gone wrong."""
        self._check_range(offset, length)
        with self._lock:
            self._count_fault("zero_at_rest")
        self.medium.punch(offset, length)

    def copy_at_rest(self, source: int, offset: int, length: int) -> None:
        """Put the bytes at `source` to `offset` as well: a misplaced or stale write with right checksums."""
        self._check_range(source, length)
        self._check_range(offset, length)
        if length > _MOST_COPIED:
            raise ValueError(f"copy at most {_MOST_COPIED} bytes at a time")
        with self._lock:
            self._count_fault("copy_at_rest")
        moved = bytearray(length)
        self.medium.read_into(source, memoryview(moved))
        self.medium.write(offset, memoryview(moved))

    def _check_range(self, offset: int, length: int) -> None:
        if offset < 0 or length <= 0 or offset + length > self.medium.size:
            raise ValueError(f"bytes {offset}..{offset + length} are not in a drive of {self.medium.size}")

    def _count_fault(self, kind: str) -> None:
        injected = self.counters.faults_injected
        injected[kind] = injected.get(kind, 0) + 1

    def stats(self) -> dict[str, Any]:
        """Counters and state as JSON (`docs/reference`)."""
        with self._lock:
            counters = asdict(self.counters)
            faults = self.faults.as_json()
        return {
            "drive": self.number,
            "nsid": self.number + 1,
            "nguid": self.nguid.hex(),
            "size": self.medium.size,
            "lba_bytes": self.lba_bytes,
            "used_bytes": self.medium.used_bytes(),
            "faults": faults,
            **counters,
        }

    def close(self) -> None:
        self.medium.close()
