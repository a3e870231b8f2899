"""Registered memory: what the owner of a queue registered, and buffers that are lent where he did not.

Payload moves straight from and to memory that was registered with `register`. Everything else (a few KiB in
bytes objects, scattered parts, the answer to Identify) goes through a loan, a registered buffer of a power of
two bytes that is copied from or to. Loans are kept for the next use up to `SPARE_BYTES`.

A view is found again by its address, so slices of registered memory are as good as the whole.
"""

import ctypes
import mmap
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from nvmeof.rdma.work import Access, Region, Registrar, Span

Buffer: TypeAlias = bytes | bytearray | memoryview

LEAST_LOAN: Final = 4096
SPARE_BYTES: Final = 16 << 20
"""Loans that wait for their next use."""

MOST_REGIONS: Final = 1024
"""Registrations of the owner; every drive of an enclosure and every buffer of a worker is one."""


def address_of(view: memoryview) -> int:
    """Where writable, contiguous memory lies. TypeError for other memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Place(NamedTuple):
    """Registered memory for one transfer."""

    span: Span
    rkey: int


class Loan:
    """A lent buffer; `view` is as long as was asked for."""

    __slots__ = ("region", "view")

    def __init__(self, region: Region, size: int) -> None:
        self.region = region
        self.view = region.view[:size]

    @property
    def place(self) -> Place:
        region = self.region
        return Place(Span(region.address, len(self.view), region.lkey), region.rkey)


class RegisteredBuffers:
    """All registered memory of one protection domain. Used by one thread."""

    def __init__(self, registrar: Registrar, access: Access) -> None:
        self._registrar = registrar
        self._access = access
        self._regions: list[Region] = []
        self._spare: dict[int, list[Region]] = {}
        self._spare_bytes = 0
        self.lent_bytes = 0

    def register(self, view: memoryview) -> Region:
        """Make a buffer known; once is enough, also for its slices."""
        if len(self._regions) >= MOST_REGIONS:
            raise ValueError(f"more than {MOST_REGIONS} registered buffers")
        region = self._registrar.register(view, self._access)
        self._regions.append(region)
        return region

    def forget(self, view: memoryview) -> None:
        """Take back what `register` was given."""
        address = address_of(view)
        for region in self._regions:
            if region.address == address:
                self._regions.remove(region)
                self._registrar.deregister(region)
                return

    def find(self, view: Buffer) -> Place | None:
        """The place of registered memory; None if it is not (all) registered."""
        if not isinstance(view, memoryview) or view.readonly or not self._regions:
            return None
        address = address_of(view)
        size = len(view)
        for region in self._regions:
            offset = address - region.address
            if 0 <= offset <= len(region.view) - size:
                return Place(Span(address, size, region.lkey), region.rkey)
        return None

    def borrow(self, size: int) -> Loan:
        """A buffer for `size` bytes; what it holds is left over from its last use. Raises as `Registrar`."""
        room = max(LEAST_LOAN, 1 << (size - 1).bit_length())
        spare = self._spare.get(room)
        if spare:
            self._spare_bytes -= room
            region = spare.pop()
        else:
            memory = memoryview(mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            region = self._registrar.register(memory, self._access)
        self.lent_bytes += room
        return Loan(region, size)

    def give_back(self, loan: Loan) -> None:
        """It is free: nobody here or on the other side uses it any more."""
        region = loan.region
        room = len(region.view)
        self.lent_bytes -= room
        if self._spare_bytes + room <= SPARE_BYTES:
            self._spare.setdefault(room, []).append(region)
            self._spare_bytes += room
        else:
            self._registrar.deregister(region)


def gather(parts: Sequence[Buffer], into: memoryview) -> None:
    at = 0
    for part in parts:
        into[at : at + len(part)] = part
        at += len(part)
