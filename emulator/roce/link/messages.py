"""Several datagrams by one call: recvmmsg and sendmmsg of the C library, which Python's sockets lack.

For a burst of 60 KiB the kernel takes some 10 us, and Python half as much again to call it. The call makes
arguments, lets the interpreter lock go and takes it, makes text of the sender's address, and raises where
nothing is there.
So a link receives as much as it can hold with one call, and sends a volley with one. The kernel's structures
(linux/socket.h) lie in memory that is laid out once: only changed pointers are written.
"""

import ctypes
import socket
import struct
from functools import lru_cache
from typing import Final

SOL_UDP: Final = 17
UDP_SEGMENT: Final = 103
UDP_GRO: Final = 104
"""Of linux/udp.h; Python's socket module lacks them."""

_HEADER: Final = struct.Struct("@PIPNPNi0PI0P")
"""struct mmsghdr: name and its length, vector and its length, control and its length, flags; bytes moved."""
_MOVED: Final = struct.Struct(
    f"@{struct.calcsize('@P')}xI{struct.calcsize('@PIPNP') - struct.calcsize('@PI')}xNi0PI0P"
)
"""The fields that the kernel writes: length of the name, of the control data, flags, bytes moved."""
_PART: Final = struct.Struct("@PN")
"""struct iovec."""
_CONTROL_HEADER: Final = "@Nii"
"""struct cmsghdr: its length with the data, level, type."""
_ALIGNED: Final = struct.calcsize("@N")
"""Control messages begin at multiples of this."""
_GRO: Final = struct.Struct(_CONTROL_HEADER + "i0N")
_SEGMENT: Final = struct.Struct(_CONTROL_HEADER + "H0N")
_SEGMENT_CONTROL_BYTES: Final = struct.calcsize(_CONTROL_HEADER + "H")

_CONTROL_AT: Final = struct.calcsize(_CONTROL_HEADER)
_CONTROL: Final = struct.Struct(_CONTROL_HEADER)
CONTROL_SPACE: Final = 2 * _GRO.size
"""Room for two control messages with an int each: size of segments, and the type of service."""

IP_TOS: Final = 1
IPV6_TCLASS: Final = 67
"""The byte of an IP header whose lower two bits are the ECN field, as a control message brings it."""
ECN_BITS: Final = 0b11
ECN_CAPABLE: Final = 0b10
"""ECT(0): the sender takes part in congestion control (RFC 3168)."""
CONGESTION_EXPERIENCED: Final = 0b11

_IPV4_NAME: Final = struct.Struct("!2xH4s8x")
_IPV6_NAME: Final = struct.Struct("!2xH4x16s4x")
_NAME_BYTES: Final = 28
"""struct sockaddr_in and sockaddr_in6, whose family is in the machine's byte order; the longer of the two."""
_FAMILY: Final = struct.Struct("=H")

MAX_NAMES: Final = 4096
"""Destinations of which the name is remembered."""

_DONT_WAIT: Final = int(socket.MSG_DONTWAIT)
_TRUNCATED: Final = int(socket.MSG_TRUNC)
"""As plain numbers: to combine flags of an enum costs ten times as much."""

_LIBRARY: Final = ctypes.CDLL(None, use_errno=True)
_receive_messages: Final = _LIBRARY.recvmmsg
_receive_messages.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p)
_send_messages: Final = _LIBRARY.sendmmsg
_send_messages.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int)
_errno: Final = ctypes.get_errno
_byte_at: Final = ctypes.c_char.from_buffer
_address: Final = ctypes.addressof


def address_of(memory: memoryview | bytearray) -> int:
    """Where writable, contiguous memory lies. TypeError for other memory."""
    return int(_address(_byte_at(memory)))


@lru_cache(maxsize=MAX_NAMES)
def name_of(ip: str, port: int) -> bytes:
    """The struct sockaddr of an address. OSError for one that has a zone, or is none."""
    if ":" in ip:
        packed = _IPV6_NAME.pack(port, socket.inet_pton(socket.AF_INET6, ip))
        return _FAMILY.pack(socket.AF_INET6) + packed[_FAMILY.size :]
    packed = _IPV4_NAME.pack(port, socket.inet_pton(socket.AF_INET, ip))
    return _FAMILY.pack(socket.AF_INET) + packed[_FAMILY.size :]


def address_in(name: bytes | bytearray) -> tuple[str, int]:
    """The IP address and the port in a struct sockaddr, of IPv6 where it is as long."""
    if len(name) == _IPV6_NAME.size:
        port, packed = _IPV6_NAME.unpack(name)
        return socket.inet_ntop(socket.AF_INET6, packed), port
    port, packed = _IPV4_NAME.unpack(name)
    return socket.inet_ntop(socket.AF_INET, packed), port


class Inbox:
    """Places for `count` bursts of up to `size` bytes in `memory`, which has twice the room for them.

    The first half is for bursts of `stride` bytes, side by side, so that those which are as long, one after
    the other, lie there as one. A longer one has its own place in the second half.
    """

    def __init__(self, count: int, size: int) -> None:
        self.memory = memoryview(bytearray(2 * count * size))
        self.error = 0
        """Why `receive` gave nothing."""
        self._count = count
        self._size = size
        self.stride = size
        self._at = address_of(self.memory)
        self._parts = bytearray(2 * count * _PART.size)
        self._names = bytearray(count * _NAME_BYTES)
        self._controls = bytearray(count * CONTROL_SPACE)
        parts, names, controls = map(address_of, (self._parts, self._names, self._controls))
        headers = [
            _HEADER.pack(
                names + i * _NAME_BYTES, _NAME_BYTES, parts + 2 * i * _PART.size, 2,
                controls + i * CONTROL_SPACE, CONTROL_SPACE, 0, 0,
            )
            for i in range(count)
        ]  # fmt: skip
        self._fresh = b"".join(headers)
        """The headers before a call, which writes into them."""
        self._headers = bytearray(self._fresh)
        self._headers_at = address_of(self._headers)
        self.lay_out(size)

    def lay_out(self, stride: int) -> None:
        """From now on bursts lie `stride` bytes apart. Bursts received before become invalid."""
        self.stride = stride
        size, second = self._size, self._at + self._count * self._size
        for i in range(self._count):
            at = 2 * i * _PART.size
            _PART.pack_into(self._parts, at, self._at + i * stride, stride)
            _PART.pack_into(self._parts, at + _PART.size, second + i * size + stride, size - stride)

    def receive(self, descriptor: int) -> int:
        """How many bursts the socket had; 0 with an errno in `error`. Never waits."""
        self._headers[:] = self._fresh
        count: int = _receive_messages(descriptor, self._headers_at, self._count, _DONT_WAIT, None)
        if count > 0:
            return count
        self.error = _errno()
        return 0

    def burst(self, index: int) -> tuple[int, int, int, bytearray, bool]:
        """Where one begins in `memory`, its bytes, the size of its segments, its sender's name (for
        `address_in`), and whether it was cut off."""
        moved: tuple[int, int, int, int] = _MOVED.unpack_from(self._headers, index * _HEADER.size)
        name_bytes, control_bytes, flags, count = moved
        segment_size = count or 1
        if control_bytes:
            _, level, kind, value = _GRO.unpack_from(self._controls, index * CONTROL_SPACE)
            if level == SOL_UDP and kind == UDP_GRO:
                segment_size = value
        at = index * _NAME_BYTES
        name = self._names[at : at + name_bytes]
        stride = self.stride
        start = index * stride
        if count > stride:
            first, start = start, (self._count + index) * self._size
            self.memory[start : start + stride] = self.memory[first : first + stride]
        return start, count, segment_size, name, flags & _TRUNCATED != 0

    def is_marked(self, index: int) -> bool:
        """Whether a burst was marked on its way (congestion experienced), where the socket tells it."""
        moved: tuple[int, int, int, int] = _MOVED.unpack_from(self._headers, index * _HEADER.size)
        at, end = index * CONTROL_SPACE, index * CONTROL_SPACE + moved[1]
        while at + _CONTROL_AT < end:
            length, level, kind = _CONTROL.unpack_from(self._controls, at)
            if (level, kind) in ((socket.IPPROTO_IP, IP_TOS), (socket.IPPROTO_IPV6, IPV6_TCLASS)):
                # A byte of IPv4, an int of IPv6, of which only the lowest byte is not 0.
                value = self._controls[at + _CONTROL_AT : at + length]
                return max(value, default=0) & ECN_BITS == CONGESTION_EXPERIENCED
            at += max(-(-length // _ALIGNED) * _ALIGNED, _CONTROL_AT)
        return False


class Outbox:
    """Sends up to `count` bursts of segments that lie side by side, with one call."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.error = 0
        """Why `send` sent nothing."""
        self._parts = bytearray(count * _PART.size)
        self._parts_at = address_of(self._parts)
        self._name = bytearray(_NAME_BYTES)
        self._control = bytearray(_SEGMENT.size)
        self._headers = bytearray(count * _HEADER.size)
        self._headers_at = address_of(self._headers)
        self._to: tuple[bytes, int] = b"", 0
        self._what: tuple[int, int, int] = 0, 0, 0

    def send(
        self, descriptor: int, data: memoryview, size: int, most: int, segment_size: int, name: bytes
    ) -> int:
        """How many bursts of `most` bytes (the last may be shorter) of the first `size` bytes of `data`, cut
        into segments, to `name`, the socket has taken; 0 with an errno in `error`. TypeError where the memory
        is read-only. There are `count` of them at most."""
        bursts = (size + most - 1) // most
        to, what = (name, segment_size), (address_of(data), size, most)
        if to != self._to:
            self._address(name, segment_size)
            self._to = to
        if what != self._what:
            for i in range(bursts):
                length = min(most, size - i * most)
                _PART.pack_into(self._parts, i * _PART.size, what[0] + i * most, length)
            self._what = what
        count: int = _send_messages(descriptor, self._headers_at, bursts, _DONT_WAIT)
        if count > 0:
            return count
        self.error = _errno()
        return 0

    def _address(self, name: bytes, segment_size: int) -> None:
        self._name[: len(name)] = name
        _SEGMENT.pack_into(self._control, 0, _SEGMENT_CONTROL_BYTES, SOL_UDP, UDP_SEGMENT, segment_size)
        name_at, control_at = address_of(self._name), address_of(self._control)
        for i in range(self.count):
            _HEADER.pack_into(
                self._headers, i * _HEADER.size, name_at, len(name), self._parts_at + i * _PART.size, 1,
                control_at, _SEGMENT.size, 0, 0,
            )  # fmt: skip
