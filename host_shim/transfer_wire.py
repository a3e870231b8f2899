"""The bytes of transfers: values between the pool and memory that client and agent have both mapped.

Read control_wire.py first; this is the second way by which a session's values move. A client on the agent's
own machine *registers* memory: a memfd that cannot shrink. The agent maps it too, and from then on opens
values straight into it and seals them straight out of it. What crosses the mount is one ioctl(2) on the
session's file, which says where.

* The ioctls are of type `IOCTL_TYPE` and carry up to 16,383 bytes in and out, as FUSE has it.
* REGISTER names a descriptor of the caller's process; the answer is the region's number in this session and
  the byte of the memfd which the agent keeps locked (fcntl(2), F_OFD_SETLK) while it may touch the memory.
  So a client whose call the kernel has ended without an answer (the mount was taken away) waits for that lock
  before it believes that the memory is its own again. The lock of an agent that dies is gone with it.
* LOAD and STORE move one value, of a key or of a ticket that was bound, to or from parts of regions. As with
  a read(2), what the parts hold after a miss is not said; a put's bytes must not change until it returns.
* A region ends with UNREGISTER or with its session.

Any errno for REGISTER means that there is no such way here; the session works without it. So it is where the
mount is a guest's, and with an agent that does not see the client's process or may not look into it.

Layout of REGISTER, little-endian, 16 bytes:
     0  4  descriptor               answer: number of the region
     4  4  zero                     answer: zero
     8  8  length of the region     answer: the byte that the agent has locked
Layout of UNREGISTER: number of the region, 4 bytes, and 12 zero bytes.
Layout of LOAD and STORE:
     0 16  key; zero where a ticket is given
    16  4  ticket, `NO_TICKET` where a key is given
    20  4  time to live in seconds, 0 for the volume's own (STORE of a key)
    24  2  length of the volume's name in bytes, 0 with a ticket
    26  2  number of parts
    28  4  zero
    32  …  the parts, 16 bytes each (4: number of the region, 4: length, 8: offset in the region), then the
           volume's name in UTF-8
  and of their answers:
     0  4  `Outcome` (STORE: HIT; a put that was not stored is an errno)
     4  4  LOAD: the length of the value, which may be more than the parts have room for
Layout of LOAD_MANY and STORE_MANY, which move many values, each to or from one part of a region:
     0  4  number of values
     4  2  length of the volume's name in bytes
     6  2  zero
     8  4  time to live in seconds, 0 for the volume's own (STORE_MANY)
    12  4  zero
    16  …  the values, 32 bytes each (16: key, 4: number of the region, 4: length, 8: offset in the region),
           then the volume's name in UTF-8
  and of their answers: for each value `Outcome` and length as of a LOAD, one behind the other. Of STORE_MANY
  the outcome is HIT, or why the value was not stored; UNKNOWN: nothing was done for it, and it may be stored
  alone. The length is then 0, or what a slot of the volume holds where the value is longer (REFUSED). Each
  value has an outcome of its own. EOPNOTSUPP: values of this volume are better moved one by one now.
"""

import enum
import os
import struct
from collections.abc import Sequence
from typing import Final

from host_shim.control_wire import (
    KEY_BYTES,
    TICKETS_MAX,
    VALUE_BYTES_MAX,
    VOLUME_NAME_BYTES_MAX,
    MalformedControl,
)

IOCTL_TYPE: Final = ord("g")
IOCTL_BYTES_MAX: Final = (1 << 14) - 1
"""What the number of an ioctl has room for (_IOC_SIZEBITS)."""
PARTS_MAX: Final = 1000
NO_TICKET: Final = 0xFFFF_FFFF

SET_LOCK: Final = 37
"""F_OFD_SETLK of fcntl(2), which the fcntl module does not name; SET_LOCK_WAITING is F_OFD_SETLKW."""
SET_LOCK_WAITING: Final = 38
_FLOCK: Final = struct.Struct("@hhqqi4x")  # struct flock

_REGISTER: Final = struct.Struct("<IIQ")
_UNREGISTER: Final = struct.Struct("<I12x")
_TRANSFER: Final = struct.Struct("<16sIIHHI")
_PART: Final = struct.Struct("<IIQ")
_DONE: Final = struct.Struct("<II")
_MANY: Final = struct.Struct("<IHHII")
_VALUE: Final = struct.Struct("<16sIIQ")
REGISTER_BYTES: Final = 16
TRANSFER_HEADER_BYTES: Final = 32
PART_BYTES: Final = 16
DONE_BYTES: Final = 8
MANY_HEADER_BYTES: Final = 16
VALUE_BYTES: Final = 32
SHORT_BYTES: Final = 1 << 17
"""Of a value that moves with others: a longer one has a call of its own, and several threads make these side
by side. For more STORE_MANY is refused."""
TOGETHER_BYTES: Final = 2 << 20
"""Of the values of one request, each rounded up to pages."""
MANY_MAX: Final = 64
"""Values of one LOAD_MANY or STORE_MANY: one worker serves them, and others wait for it."""
assert _REGISTER.size == _UNREGISTER.size == REGISTER_BYTES
assert _TRANSFER.size == TRANSFER_HEADER_BYTES
assert _PART.size == PART_BYTES
assert _DONE.size == DONE_BYTES
assert _MANY.size == MANY_HEADER_BYTES
assert _VALUE.size == VALUE_BYTES
assert MANY_HEADER_BYTES + MANY_MAX * VALUE_BYTES + VOLUME_NAME_BYTES_MAX <= IOCTL_BYTES_MAX
assert TRANSFER_HEADER_BYTES + PARTS_MAX * PART_BYTES + VOLUME_NAME_BYTES_MAX <= IOCTL_BYTES_MAX


class Ioctl(enum.IntEnum):
    """The numbers within `IOCTL_TYPE`."""

    REGISTER = 1
    UNREGISTER = 2
    LOAD = 3
    STORE = 4
    LOAD_MANY = 5
    STORE_MANY = 6


_IOCTLS: Final = {each.value: each for each in Ioctl}


def ioctl_command(which: Ioctl, size: int) -> int:
    """The number to call ioctl(2) with: `size` bytes go in and come out (_IOWR of asm-generic/ioctl.h)."""
    return 3 << 30 | size << 16 | IOCTL_TYPE << 8 | which


def ioctl_of(command: int) -> Ioctl | None:
    """Which of ours a number is; None for any other."""
    if command >> 30 != 3 or command >> 8 & 0xFF != IOCTL_TYPE:
        return None
    return _IOCTLS.get(command & 0xFF)


def encode_register(descriptor: int, size: int) -> bytearray:
    """The bytes of REGISTER: `size` bytes of the memfd that the caller knows by `descriptor`."""
    return bytearray(_REGISTER.pack(descriptor, 0, size))


def encode_registered(region: int, locked_byte: int) -> bytes:
    return _REGISTER.pack(region, 0, locked_byte)


Part = tuple[int, int, int]
"""Number of the region, offset in it, length: where some bytes of a value are."""


class Transfer:
    """LOAD or STORE of one value, by its key (`ticket` is None) or by a ticket."""

    __slots__ = ("key", "parts", "ticket", "ttl_seconds", "volume")

    def __init__(
        self, volume: str, key: bytes, ticket: int | None, parts: Sequence[Part], ttl_seconds: int = 0
    ) -> None:
        self.volume = volume
        self.key = key
        self.ticket = ticket
        self.parts = parts
        self.ttl_seconds = ttl_seconds


def encode_transfer(
    volume: str, key: bytes, ticket: int | None, parts: Sequence[Part], ttl_seconds: int = 0
) -> bytearray:
    """The bytes of a LOAD or STORE; of volume, key and time to live only where there is no ticket."""
    count, name = len(parts), b""
    parts_end = TRANSFER_HEADER_BYTES + count * PART_BYTES
    if ticket is None:
        name = volume.encode()
        data = bytearray(parts_end + len(name))
        _TRANSFER.pack_into(data, 0, key, NO_TICKET, ttl_seconds, len(name), count, 0)
        data[parts_end:] = name
    else:
        data = bytearray(parts_end)
        _TRANSFER.pack_into(data, 0, bytes(KEY_BYTES), ticket, 0, 0, count, 0)
    at = TRANSFER_HEADER_BYTES
    for region, offset, length in parts:
        _PART.pack_into(data, at, region, length, offset)
        at += PART_BYTES
    return data


def encode_lock(kind: int, byte: int) -> bytes:
    """What fcntl(2) takes to lock one byte (F_RDLCK, F_WRLCK) or to unlock it (F_UNLCK)."""
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)


def decode_register_untrusted(data: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Descriptor and size of what a client wants to register. Raises MalformedControl."""
    if len(data) != REGISTER_BYTES:
        raise MalformedControl(f"REGISTER has {REGISTER_BYTES} bytes, this one {len(data)}")
    descriptor, zero, size = _REGISTER.unpack(data)
    if zero:
        raise MalformedControl("a reserved field that is not zero")
    return descriptor, size


def decode_registered_untrusted(data: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Region and locked byte of the agent's answer. Raises MalformedControl."""
    if len(data) != REGISTER_BYTES:
        raise MalformedControl(f"the answer to REGISTER has {REGISTER_BYTES} bytes")
    region, zero, locked_byte = _REGISTER.unpack(data)
    if zero or locked_byte >= 1 << 63:
        raise MalformedControl("no answer to REGISTER")
    return region, locked_byte


def decode_unregister_untrusted(data: bytes | bytearray | memoryview) -> int:
    """The number of the region that ends. Raises MalformedControl."""
    if len(data) != REGISTER_BYTES or any(data[4:]):
        raise MalformedControl("no UNREGISTER")
    number: int = _UNREGISTER.unpack(data)[0]
    return number


def decode_transfer_untrusted(data: bytes | bytearray | memoryview) -> Transfer:
    """A LOAD or STORE. Bad bytes raise MalformedControl, and nothing else."""
    if len(data) < TRANSFER_HEADER_BYTES:
        raise MalformedControl(f"a transfer has {TRANSFER_HEADER_BYTES} bytes of header")
    key: bytes
    ticket: int
    ttl_seconds: int
    name_bytes: int
    count: int
    key, ticket, ttl_seconds, name_bytes, count, zero = _TRANSFER.unpack_from(data)
    parts_end = TRANSFER_HEADER_BYTES + count * PART_BYTES
    if zero or not 0 < count <= PARTS_MAX or name_bytes > VOLUME_NAME_BYTES_MAX:
        raise MalformedControl(f"{count} parts (1 to {PARTS_MAX}) and a volume's name of {name_bytes} bytes")
    if len(data) != parts_end + name_bytes:
        raise MalformedControl(f"{len(data)} bytes where the header announces {parts_end + name_bytes}")
    by_ticket = ticket != NO_TICKET
    if by_ticket and (ticket >= TICKETS_MAX or name_bytes or ttl_seconds or any(key)):
        raise MalformedControl("a ticket has its volume, key and time to live by its binding")
    total = 0
    parts: list[Part] = []
    for at in range(TRANSFER_HEADER_BYTES, parts_end, PART_BYTES):
        region, length, offset = _PART.unpack_from(data, at)
        if not length:
            raise MalformedControl("an empty part")
        total += length
        parts.append((region, offset, length))
    if total > VALUE_BYTES_MAX:
        raise MalformedControl(f"a value has 1 to {VALUE_BYTES_MAX} bytes")
    try:
        volume = bytes(data[parts_end:]).decode()
    except UnicodeDecodeError:
        raise MalformedControl("the volume's name is not UTF-8") from None
    return Transfer(volume, key, ticket if by_ticket else None, parts, ttl_seconds)


def encode_done(outcome: int, length: int) -> bytes:
    return _DONE.pack(outcome, length)


def decode_done_untrusted(data: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Outcome and length. Raises MalformedControl."""
    if len(data) < DONE_BYTES:
        raise MalformedControl(f"an answer has {DONE_BYTES} bytes")
    outcome, length = _DONE.unpack_from(data)
    return outcome, length


class ManyTransfers:
    """LOAD_MANY or STORE_MANY: keys of one volume, and the part of a region where each value goes or lies."""

    __slots__ = ("keys", "parts", "ttl_seconds", "volume")

    def __init__(
        self, volume: str, keys: Sequence[bytes], parts: Sequence[Part], ttl_seconds: int = 0
    ) -> None:
        self.volume = volume
        self.keys = keys
        self.parts = parts
        self.ttl_seconds = ttl_seconds


def encode_many(volume: str, keys: Sequence[bytes], parts: Sequence[Part], ttl_seconds: int = 0) -> bytearray:
    """The bytes of a LOAD_MANY or STORE_MANY, of as many keys as parts."""
    name = volume.encode()
    values_end = MANY_HEADER_BYTES + len(keys) * VALUE_BYTES
    data = bytearray(values_end + len(name))
    _MANY.pack_into(data, 0, len(keys), len(name), 0, ttl_seconds, 0)
    at = MANY_HEADER_BYTES
    for key, (region, offset, length) in zip(keys, parts, strict=True):
        _VALUE.pack_into(data, at, key, region, length, offset)
        at += VALUE_BYTES
    data[values_end:] = name
    return data


def decode_many_untrusted(data: bytes | bytearray | memoryview) -> ManyTransfers:
    """A LOAD_MANY or STORE_MANY. Bad bytes raise MalformedControl, and nothing else."""
    if len(data) < MANY_HEADER_BYTES:
        raise MalformedControl(f"many transfers have {MANY_HEADER_BYTES} bytes of header")
    count: int
    name_bytes: int
    ttl_seconds: int
    count, name_bytes, zero, ttl_seconds, more_zero = _MANY.unpack_from(data)
    if zero or more_zero or not 0 < count <= MANY_MAX or name_bytes > VOLUME_NAME_BYTES_MAX:
        raise MalformedControl(f"{count} values (1 to {MANY_MAX}) and a volume's name of {name_bytes} bytes")
    values_end = MANY_HEADER_BYTES + count * VALUE_BYTES
    if len(data) != values_end + name_bytes:
        raise MalformedControl(f"{len(data)} bytes where the header announces {values_end + name_bytes}")
    keys: list[bytes] = []
    parts: list[Part] = []
    total = 0
    for key, region, length, offset in _VALUE.iter_unpack(memoryview(data)[MANY_HEADER_BYTES:values_end]):
        if not length:
            raise MalformedControl("an empty part")
        total += length
        keys.append(key)
        parts.append((region, offset, length))
    if total > VALUE_BYTES_MAX:
        raise MalformedControl(f"{total} bytes of values; {VALUE_BYTES_MAX} is the most")
    try:
        volume = bytes(data[values_end:]).decode()
    except UnicodeDecodeError:
        raise MalformedControl("the volume's name is not UTF-8") from None
    return ManyTransfers(volume, keys, parts, ttl_seconds)


def encode_done_many(done: Sequence[int], size: int) -> bytes:
    """The answer to LOAD_MANY or STORE_MANY, as long as the request; `done`: outcome and length of each value
    in turn."""
    return struct.pack(f"<{len(done)}I", *done).ljust(size, b"\0")


def decode_done_many_untrusted(data: bytes | bytearray | memoryview, count: int) -> list[tuple[int, int]]:
    """Outcome and length of each of `count` values. Raises MalformedControl."""
    if len(data) < count * DONE_BYTES:
        raise MalformedControl(f"an answer of {count} values has {count * DONE_BYTES} bytes")
    return list(_DONE.iter_unpack(memoryview(data)[: count * DONE_BYTES]))
