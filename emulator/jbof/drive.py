"""A drive of logical blocks: `medium` and `conditions` as a `Storage` (`nvmeof/controller/storage.py`).

Many connection threads call at once. Bytes have no lock: as on a real drive, a read that overlaps a write in
flight may see either.
"""

from dataclasses import dataclass
from typing import Any, Final

from emulator.jbof.conditions import CommonCounters, DriveConditions
from emulator.jbof.drive_model import DriveModelSettings
from emulator.jbof.faults import choose_bits
from emulator.jbof.medium import Medium
from nvmeof.controller.storage import Operation, Scratch
from nvmeof.wire.status import Status

_MOST_COPIED: Final = 64 << 20


@dataclass(slots=True)
class DriveCounters(CommonCounters):
    """Counters since the drive was made. Bytes are payload; commands include failed ones."""

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


class Drive(DriveConditions):
    """A namespace's medium."""

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
        self.counters = DriveCounters()
        super().__init__(number, self.counters, nguid=nguid, model=model, seed=seed)
        self.size_bytes = self.reach = medium.size
        self.medium = medium
        self.lba_bytes = lba_bytes
        self.block_count = medium.size // lba_bytes

    def _count_command(self, operation: Operation) -> None:
        if operation is Operation.READ:
            self.counters.read_commands += 1
        elif operation is Operation.WRITE:
            self.counters.write_commands += 1
        else:
            super()._count_command(operation)

    # --- the seam: nvmeof.controller.storage.Storage ---------------------------------------------------

    def used_blocks(self) -> int:
        return min(self.block_count, -(-self.medium.used_bytes() // self.lba_bytes))

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
        return self._flipped(view, offset) if self._faulty else view

    def write_window(self, offset: int, length: int) -> memoryview | None:
        # A write that will be refused or lost goes to scratch, so that it changes nothing. A write that fails
        # with an error status may be stored or not, as on a real drive.
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
            try:
                self.medium.write(offset, data)
            except OSError as error:
                raise self._failed(error, Status.WRITE_FAULT) from error
        with self._lock:
            self.counters.write_bytes += len(data)

    def flush(self) -> None:
        try:
            self.medium.flush()
        except OSError as error:
            raise self._failed(error, Status.WRITE_FAULT) from error

    def write_zeroes(self, offset: int, length: int, *, deallocate: bool) -> None:
        """Zeros are always made by deallocation: a host cannot tell the difference."""
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

    def flip_at_rest(self, offset: int, length: int, bits: int) -> list[int]:
        """Flip `bits` different bits of the range in the medium; the offsets of the changed bytes."""
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
        """Make a range read as zeros, as after a dropped write."""
        self._check_range(offset, length)
        with self._lock:
            self._count_fault("zero_at_rest")
        self.medium.punch(offset, length)

    def copy_at_rest(self, source: int, offset: int, length: int) -> None:
        """Copy a range: a misplaced or stale write with right checksums."""
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

    def _described(self) -> dict[str, Any]:
        used = self.medium.used_bytes()
        return {"size": self.size_bytes, "lba_bytes": self.lba_bytes, "used_bytes": used}

    def close(self) -> None:
        self.medium.close()
