"""`FuseClient`: FUSE requests through the queues of a machine, as a guest's kernel would make them.

A READ or WRITE names the caller's buffer in guest memory, as 4 KiB pages with a descriptor each (as Linux
does) or as one run. The descriptors of a buffer are made once and kept.

Headers, arguments, the table of descriptors and room for a short answer lie on a *desk*. A desk serves one
request at a time; there are DESKS_MAX at most. The desk of a request that was given up stays with the device.
"""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agent.bench.virtio_driver import fuse_wire as wire
from agent.bench.virtio_driver.faults import DeviceSilent
from agent.bench.virtio_driver.fuse_wire import Agreed, FuseReplyError, Node, Opcode
from agent.bench.virtio_driver.guest_memory import PAGE_BYTES, GuestMemory, Room, pages_of
from agent.bench.virtio_driver.request_queue import WAIT_SECONDS, RequestQueue, Waiter
from agent.virtio.split_ring import DESCRIPTOR, DESCRIPTOR_BYTES, DescriptorFlag

Data: TypeAlias = "Room | Sequence[Room]"
"""Where data lie: in one run, or in rooms that are scattered."""

DESKS_MAX: Final = 512
DATA_SPANS_MAX: Final = 1024
"""Descriptors of the data of one request: 1 MiB is 256 pages, 257 where it begins within one."""
BODY_BYTES: Final = 4096
LAYOUTS_MAX: Final = 4096
"""Buffers whose descriptors are kept; beyond that they are forgotten and made anew."""

_NEXT: Final[int] = DescriptorFlag.NEXT.value
_WRITE: Final[int] = DescriptorFlag.WRITE.value
_descriptor = DESCRIPTOR.pack_into
_READ_ARGUMENTS: Final[int] = wire.READ_IN.size
_WRITE_ARGUMENTS: Final[int] = wire.WRITE_IN.size
_ARGUMENTS_AT: Final = 64
_REPLY_AT: Final = 4096
_ARGUMENTS_MAX: Final = _REPLY_AT - _ARGUMENTS_AT
_BODY_AT: Final = _REPLY_AT + 64
_DESK_BYTES: Final = 2 * 4096 + BODY_BYTES
_ROW: Final = np.dtype([("address", "<u8"), ("length", "<u4"), ("flags", "<u2"), ("next", "<u2")])
assert _ROW.itemsize == DESCRIPTOR_BYTES


@dataclass(frozen=True, slots=True)
class Laid:
    """A buffer as the middle or the end of a table: descriptors from index 2 on, from index 3 on."""

    size: int
    count: int
    readable: bytes
    writable: bytes


class _Desk:
    """What one request under way has to itself."""

    __slots__ = ("address", "laid", "table", "table_address", "view")

    def __init__(self, memory: GuestMemory) -> None:
        room = memory.room(_DESK_BYTES)
        table = memory.room((4 + DATA_SPANS_MAX) * DESCRIPTOR_BYTES, DESCRIPTOR_BYTES)
        self.address, self.view = room.address, room.view
        self.table_address, self.table = table.address, table.view
        self.laid: object = None


class Call:
    """A request under way: `finish` waits for its answer."""

    __slots__ = ("_client", "desk", "opcode", "queue", "unique", "waiter")

    def __init__(
        self, client: "FuseClient", desk: _Desk, queue: RequestQueue, opcode: Opcode, unique: int
    ) -> None:
        self._client = client
        self.desk = desk
        self.queue = queue
        self.opcode = opcode
        self.unique = unique
        self.waiter = Waiter()

    def finish(self, timeout: float = WAIT_SECONDS) -> int:
        """Bytes behind the header of the answer. OSError is the device's refusal, with its errno.

        DeviceSilent where none came in time; it may be asked for again.
        """
        return self._settle(timeout)[0]

    def body(self) -> bytes:
        """The answer's body, where it is short enough for the desk."""
        return self._settle(WAIT_SECONDS, wanted=True)[1]

    def _settle(self, timeout: float, wanted: bool = False) -> tuple[int, bytes]:
        written = self.queue.wait(self.waiter, timeout)
        view = self.desk.view
        header = wire.OUT_HEADER.unpack_from(view, _REPLY_AT)
        try:
            length = wire.check_reply(header, self.unique, written, self.opcode)
            return length, bytes(view[_BODY_AT : _BODY_AT + length]) if wanted else b""
        finally:
            self._client._desks.append(self.desk)  # from here on it is somebody else's


class FuseClient:
    """Requests over `queues` (the high-priority queue first). Any thread; `pages`: see the module."""

    def __init__(self, memory: GuestMemory, queues: Sequence[RequestQueue], *, pages: bool = True) -> None:
        self._memory = memory
        self.urgent, self._queues = queues[0], list(queues[1:])
        self._pages = pages
        self._uniques = itertools.count(2, 2)
        self._desks: list[_Desk] = []
        self._desks_made = itertools.count(1)
        self._laid: dict[tuple[int, int, int], Laid] = {}

    # Requests about names and files.

    def init(self) -> Agreed:
        """INIT, which a guest sends once in its life and not after a restart of the device."""
        return wire.decode_init(self._ask(Opcode.INIT, 0, wire.encode_init(), wire.INIT_OUT.size))

    def lookup(self, parent: int, name: bytes) -> Node:
        return wire.decode_entry(self._ask(Opcode.LOOKUP, parent, name + b"\0", wire.ENTRY_BYTES))

    def walk(self, path: str) -> Node:
        """LOOKUP of each name of a path from the root on."""
        node = Node(wire.ROOT_NODE, 0, 0)
        for name in path.strip("/").split("/"):
            node = self.lookup(node.number, os.fsencode(name))
        return node

    def open(self, node: int, flags: int = os.O_RDONLY) -> int:
        return handle_in(self._ask(Opcode.OPEN, node, wire.OPEN_IN.pack(flags, 0), wire.OPEN_OUT.size))

    def release(self, node: int, handle: int) -> None:
        self._ask(Opcode.RELEASE, node, wire.RELEASE_IN.pack(handle, 0, 0, 0), 0)

    # Data.

    def read_into(self, node: int, handle: int, offset: int, into: Data) -> int:
        """READ into guest memory; how many bytes came."""
        return self.start_read(node, handle, offset, self.laid(into)).finish()

    def write_from(self, node: int, handle: int, offset: int, data: Data) -> int:
        """WRITE out of guest memory; how many bytes were taken."""
        call = self.start_write(node, handle, offset, self.laid(data))
        (taken, _padding) = wire.WRITE_OUT.unpack(call.body())
        return int(taken)

    def start_read(
        self, node: int, handle: int, offset: int, into: Laid, queue: RequestQueue | None = None
    ) -> Call:
        """READ, given to the device; `queue`: the one with the least to do where none is named."""
        desk, table = self._desk_for(into)
        wire.READ_IN.pack_into(desk.view, _ARGUMENTS_AT, handle, offset, into.size, 0, 0, 0, 0)
        if table:
            self._lay_request(desk, _READ_ARGUMENTS)
            _descriptor(table, 32, desk.address + _REPLY_AT, wire.OUT_HEADER_BYTES, _NEXT | _WRITE, 3)
            table[48 : 48 + len(into.writable)] = into.writable
            desk.laid = (Opcode.READ, into)
        room = wire.OUT_HEADER_BYTES + into.size
        return self._submit(desk, Opcode.READ, node, _READ_ARGUMENTS, 3 + into.count, room, queue)

    def start_write(
        self, node: int, handle: int, offset: int, data: Laid, queue: RequestQueue | None = None
    ) -> Call:
        desk, table = self._desk_for(data, Opcode.WRITE)
        wire.WRITE_IN.pack_into(desk.view, _ARGUMENTS_AT, handle, offset, data.size, 0, 0, 0, 0)
        if table:
            self._lay_request(desk, _WRITE_ARGUMENTS)
            table[32 : 32 + len(data.readable)] = data.readable
            last = 2 + data.count
            at = last * DESCRIPTOR_BYTES
            header, body = wire.OUT_HEADER_BYTES, wire.WRITE_OUT.size
            _descriptor(table, at, desk.address + _REPLY_AT, header, _NEXT | _WRITE, last + 1)
            _descriptor(table, at + DESCRIPTOR_BYTES, desk.address + _BODY_AT, body, _WRITE, 0)
            desk.laid = (Opcode.WRITE, data)
        room = wire.OUT_HEADER_BYTES + wire.WRITE_OUT.size
        arguments = _WRITE_ARGUMENTS + data.size
        return self._submit(desk, Opcode.WRITE, node, arguments, 4 + data.count, room, queue)

    def getxattr_into(self, node: int, name: bytes, into: Room) -> int:
        """GETXATTR into guest memory, which is one run of it, as Linux has it; how many bytes came."""
        data = self._laid_in_steps(into, into.size)
        desk, table = self._desk_for(data, Opcode.GETXATTR)
        head = wire.GETXATTR_IN.pack(data.size, 0)
        arguments = b"%b%b\0" % (head, name)
        desk.view[_ARGUMENTS_AT : _ARGUMENTS_AT + len(arguments)] = arguments
        self._lay_request(desk, len(arguments))  # names differ in length
        if table:
            _descriptor(table, 32, desk.address + _REPLY_AT, wire.OUT_HEADER_BYTES, _NEXT | _WRITE, 3)
            table[48 : 48 + len(data.writable)] = data.writable
            desk.laid = (Opcode.GETXATTR, data)
        room = wire.OUT_HEADER_BYTES + data.size
        return self._submit(desk, Opcode.GETXATTR, node, len(arguments), 3 + data.count, room, None).finish()

    def laid(self, data: Data) -> Laid:
        """The descriptors of a buffer; kept for a run, made anew for scattered rooms."""
        if not isinstance(data, Room):
            rooms = [page for room in data for page in pages_of(room)] if self._pages else data
            spans = np.array([(room.address, room.size) for room in rooms], np.uint64).reshape(-1, 2)
            return _lay(spans[:, 0], spans[:, 1])
        return self._laid_in_steps(data, PAGE_BYTES if self._pages else data.size)

    def _laid_in_steps(self, data: Room, step: int) -> Laid:
        key = (data.address, data.size, step)
        found = self._laid.get(key)
        if found is None:
            if len(self._laid) >= LAYOUTS_MAX:
                self._laid.clear()
            found = self._laid[key] = lay_run(data.address, data.size, step)
        return found

    # Inner matters.

    def _ask(self, opcode: Opcode, node: int, arguments: bytes, room: int) -> bytes:
        return self.start(opcode, node, arguments, room).body()

    def start(
        self, opcode: Opcode, node: int, arguments: bytes, room: int, queue: RequestQueue | None = None
    ) -> Call:
        """Any request whose answer has at most `room` bytes (BODY_BYTES at most) behind its header."""
        if len(arguments) > _ARGUMENTS_MAX or room > BODY_BYTES:
            raise ValueError(f"{len(arguments)} bytes of arguments and {room} of answer are no desk's work")
        desk = self._take_desk()
        desk.laid = None
        desk.view[_ARGUMENTS_AT : _ARGUMENTS_AT + len(arguments)] = arguments
        self._lay_request(desk, len(arguments))
        more = _NEXT if room else 0
        _descriptor(
            desk.table, 32, desk.address + _REPLY_AT, wire.OUT_HEADER_BYTES, more | _WRITE, 3 if room else 0
        )
        if room:
            _descriptor(desk.table, 48, desk.address + _BODY_AT, room, _WRITE, 0)
        count = 4 if room else 3
        return self._submit(desk, opcode, node, len(arguments), count, wire.OUT_HEADER_BYTES + room, queue)

    def _submit(
        self, desk: _Desk, opcode: Opcode, node: int, arguments: int, count: int, room: int,
        queue: RequestQueue | None,
    ) -> Call:  # fmt: skip
        unique = next(self._uniques)
        wire.IN_HEADER.pack_into(
            desk.view, 0, wire.IN_HEADER_BYTES + arguments, opcode, unique, node, 0, 0, 1, 0, 0
        )
        if queue is None:
            queue = self._queues[0]
            for other in self._queues:
                if other.outstanding < queue.outstanding:
                    queue = other
        call = Call(self, desk, queue, opcode, unique)
        queue.submit_table(desk.table_address, count, room, call.waiter)
        return call

    def _desk_for(self, data: Laid, opcode: Opcode = Opcode.READ) -> tuple[_Desk, memoryview | None]:
        """A desk, and its table where that is not yet laid out for this request and this buffer."""
        desk = self._take_desk()
        laid = desk.laid
        if isinstance(laid, tuple) and laid[1] is data and laid[0] is opcode:
            return desk, None
        return desk, desk.table

    def _lay_request(self, desk: _Desk, arguments: int) -> None:
        """The first two descriptors: header and arguments, which Linux has in two places as well."""
        _descriptor(desk.table, 0, desk.address, wire.IN_HEADER_BYTES, _NEXT, 1)
        _descriptor(desk.table, 16, desk.address + _ARGUMENTS_AT, arguments, _NEXT, 2)

    def _take_desk(self) -> _Desk:
        try:
            return self._desks.pop()
        except IndexError:
            if next(self._desks_made) > DESKS_MAX:
                raise DeviceSilent(f"{DESKS_MAX} requests are under way or were given up") from None
            return _Desk(self._memory)


def lay_run(address: int, size: int, step: int) -> Laid:
    """The descriptors of `size` bytes that lie in a row, `step` bytes each."""
    starts = np.arange(0, size, step, dtype=np.uint64)
    return _lay(starts + np.uint64(address), np.minimum(np.uint64(step), np.uint64(size) - starts))


def _lay(addresses: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> Laid:
    """The descriptors of pieces that follow each other in a request, whichever way the data go."""
    count = len(addresses)
    if not 1 <= count <= DATA_SPANS_MAX:
        raise ValueError(f"the data of a request lie in 1 to {DATA_SPANS_MAX} pieces, not {count}")
    rows = np.empty(count, _ROW)
    rows["address"], rows["length"] = addresses, sizes
    rows["flags"], rows["next"] = _NEXT, np.arange(3, 3 + count)
    readable = rows.tobytes()
    rows["flags"], rows["next"] = _NEXT | _WRITE, np.arange(4, 4 + count)
    rows[-1] = (addresses[-1], sizes[-1], _WRITE, 0)
    return Laid(int(sizes.sum()), count, readable, rows.tobytes())


def handle_in(body: bytes) -> int:
    if len(body) < wire.OPEN_OUT.size:
        raise FuseReplyError(f"an opened file of {len(body)} bytes")
    return int(wire.OPEN_OUT.unpack_from(body)[0])
