"""A drive of the Key Value command set: `kv_values` and `conditions` as a `KvStorage` (`nvmeof.controller`).

A value takes whole units of 4 KiB and at least one, so a drive has room for capacity / 4 KiB keys (MNKS). A
Store that replaces a value needs room for both until the new one is there. The index (a key and a length for
every value) is in memory.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Final

from emulator.jbof.conditions import CommonCounters, DriveConditions
from emulator.jbof.drive_model import DriveModelSettings
from emulator.jbof.faults import choose_bits
from emulator.jbof.kv_values import StagedValue, Values
from nvmeof.controller.storage import Scratch, StorageError
from nvmeof.wire.kv import KEY_BYTES_MAX, KvFormat, StoreOption
from nvmeof.wire.status import Status

UNIT_BYTES: Final = 4096


@dataclass(slots=True)
class KvCounters(CommonCounters):
    """Counters since the drive was made. Bytes are values; commands include failed ones."""

    store_commands: int = 0
    store_bytes: int = 0
    retrieve_commands: int = 0
    retrieve_bytes: int = 0
    list_commands: int = 0
    delete_commands: int = 0
    exist_commands: int = 0
    flush_commands: int = 0


def room_of(length: int) -> int:
    """Bytes that a value of `length` bytes takes up."""
    return max(1, -(-length // UNIT_BYTES)) * UNIT_BYTES


class KvDrive(DriveConditions):
    """ValueError where the present values do not fit."""

    def __init__(
        self,
        number: int,
        values: Values,
        *,
        nguid: bytes,
        capacity_bytes: int,
        value_max: int,
        model: DriveModelSettings | None = None,
        seed: int = 0,
    ) -> None:
        if capacity_bytes <= 0 or capacity_bytes % UNIT_BYTES:
            raise ValueError(f"a KV drive's capacity is a multiple of {UNIT_BYTES} bytes")
        if not 0 < value_max < 1 << 32:
            raise ValueError("the longest value has 1 byte to 4 GiB less one")
        self.counters = KvCounters()
        super().__init__(number, self.counters, nguid=nguid, model=model, seed=seed)
        self.size_bytes = self.capacity_bytes = capacity_bytes
        self.reach = value_max
        self.format = KvFormat(KEY_BYTES_MAX, value_max, min(capacity_bytes // UNIT_BYTES, 0xFFFF_FFFF))
        self._values = values
        self._lengths = values.lengths()
        self._used = sum(map(room_of, self._lengths.values()))
        self._reserved = 0
        self._sorted: list[bytes] | None = None
        if self._used > capacity_bytes:
            raise ValueError(f"the values there take {self._used} bytes, the drive has {capacity_bytes}")

    # --- the seam: nvmeof.controller.storage.KvStorage ---------------------------------------------------

    def used_bytes(self) -> int:
        return self._used

    def stage(self, length: int) -> "Staged":
        room = room_of(length)
        with self._lock:
            if self._used + self._reserved + room > self.capacity_bytes:
                self.counters.failed_commands += 1
                raise StorageError(
                    Status.CAPACITY_EXCEEDED, f"drive {self.number} has no room for {length} bytes"
                )
            self._reserved += room
        try:
            return Staged(self, self._values.stage(length), length)
        except OSError as error:
            self._unreserve(length)
            raise self._failed(error, Status.WRITE_FAULT) from error

    def _unreserve(self, length: int) -> None:
        with self._lock:
            self._reserved -= room_of(length)

    def _commit(self, value: StagedValue, length: int, key: bytes, options: StoreOption) -> bool:
        """Whether the value was kept, and its room used. Raises StorageError and OSError."""
        with self._lock:
            old = self._lengths.get(key)
            if old is None and options & StoreOption.ONLY_IF_PRESENT:
                raise StorageError(Status.KEY_NOT_FOUND, "no such key")
            if old is not None and options & StoreOption.ONLY_IF_ABSENT:
                raise StorageError(Status.KEY_EXISTS, "the key exists")
            self.counters.store_bytes += length
            if self._faulty and self.faults.lose_writes and self.faults.loses_this_write():
                self._count_fault("lose_writes")
                return False
            value.keep(key)
            self._lengths[key] = length
            self._used += room_of(length) - (0 if old is None else room_of(old))
            self._reserved -= room_of(length)
            if old is None:
                self._sorted = None
            return True

    def value_bytes(self, key: bytes) -> int:
        return self._lengths.get(key, 0)

    def retrieve(self, key: bytes, limit: int, scratch: Scratch) -> tuple[memoryview, int]:
        try:
            view, length = self._values.read(key, limit, scratch)
        except KeyError:
            raise StorageError(Status.KEY_NOT_FOUND, "no such key") from None
        except OSError as error:
            raise self._failed(error, Status.UNRECOVERED_ERROR) from error
        with self._lock:
            self.counters.retrieve_bytes += len(view)
        return self._flipped(view, 0) if self._faulty else view, length

    def exists(self, key: bytes) -> bool:
        return key in self._lengths

    def delete(self, key: bytes) -> None:
        try:
            with self._lock:
                length = self._lengths.get(key)
                if length is None:
                    raise StorageError(Status.KEY_NOT_FOUND, "no such key")
                self._values.remove(key)
                del self._lengths[key]
                self._used -= room_of(length)
                self._sorted = None
        except (OSError, KeyError) as error:
            failure = error if isinstance(error, OSError) else OSError("its value has gone from under it")
            raise self._failed(failure, Status.UNRECOVERED_ERROR) from error

    def keys_from(self, first: bytes, count: int) -> list[bytes]:
        keys = self._keys()
        start = bisect_left(keys, first)
        return keys[start : start + count]

    def _keys(self) -> list[bytes]:
        """All keys in order, in a list that never changes."""
        with self._lock:
            if self._sorted is None:
                self._sorted = sorted(self._lengths)
            return self._sorted

    def flush(self) -> None:
        try:
            self._values.flush()
        except OSError as error:
            raise self._failed(error, Status.WRITE_FAULT) from error

    def flip_at_rest(self, offset: int, length: int, bits: int) -> list[int]:
        """Flip `bits` bits in a range of one random value; the offsets of the changed bytes.

        ValueError where no value has the range.
        """
        if bits <= 0 or bits > 1 << 20:
            raise ValueError("flip between 1 and 1048576 bits")
        long_enough = [key for key in self._keys() if self._lengths.get(key, 0) > offset]
        if offset < 0 or length <= 0 or not long_enough:
            raise ValueError(f"no value has bytes {offset}..{offset + length}")
        with self._lock:
            key = self.faults.chance.choice(long_enough)
            room = min(length, self._lengths[key] - offset)
            chosen = choose_bits(self.faults.chance, offset, room, bits)
            self._count_fault("flip_at_rest")
        for position, mask in chosen:
            self._values.flip(key, position, mask)
        return sorted({position for position, _ in chosen})

    def zero_at_rest(self, offset: int, length: int) -> None:
        """A drive without addresses cannot do it: ValueError."""
        raise ValueError(f"drive {self.number} has keys and no addresses; flip hits a value that it chooses")

    def copy_at_rest(self, source: int, offset: int, length: int) -> None:
        """A drive without addresses cannot do it: ValueError."""
        self.zero_at_rest(offset, length)

    def _described(self) -> dict[str, Any]:
        return {
            "command_set": "kv",
            "size": self.size_bytes,
            "value_max": self.format.value_max,
            "keys": len(self._lengths),
            "used_bytes": self._used,
        }

    def close(self) -> None:
        self._values.close()


class Staged:
    """A value on its way into a drive: nvmeof.controller.storage.Staged. Used by one thread."""

    def __init__(self, drive: KvDrive, value: StagedValue, length: int) -> None:
        self._drive = drive
        self._value: StagedValue | None = value
        self._length = length
        self.window = value.window

    def put(self, offset: int, data: memoryview) -> None:
        assert self._value is not None
        try:
            self._value.put(offset, data)
        except OSError as error:
            raise self._drive._failed(error, Status.WRITE_FAULT) from error

    def commit(self, key: bytes, options: StoreOption) -> None:
        assert self._value is not None
        try:
            kept = self._drive._commit(self._value, self._length, key, options)
        except OSError as error:
            raise self._drive._failed(error, Status.WRITE_FAULT) from error
        if kept:
            self._value = None
        else:
            self.discard()

    def discard(self) -> None:
        value, self._value = self._value, None
        if value is not None:
            value.drop()
            self._drive._unreserve(self._length)
