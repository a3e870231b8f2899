"""`GuestMemory`: the memory of the driver's machine, regions of shared memory behind memfds.

A driver names buffers by guest-physical addresses, the front-end names rings by addresses of its process.
Both are made up, and differ, so that a device that confuses them fails. A gap lies between two regions.
Room is handed out from the bottom up and never taken back.
"""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from agent.bench.virtio_driver.faults import OutOfGuestMemory

PAGE_BYTES: Final = 4096
GUEST_BASE: Final = 0x4000_0000
USER_BASE: Final = 0x7F35_0000_0000
GAP_BYTES: Final = 1 << 20
REGIONS_MAX: Final = 8
"""What every back-end takes (VHOST_MEMORY_BASELINE_NREGIONS)."""


@dataclass(frozen=True, slots=True)
class Region:
    """One region; `offset` is where in the file it begins. `view` is our own mapping of it."""

    guest_address: int
    size: int
    user_address: int
    offset: int
    descriptor: int
    view: memoryview


@dataclass(frozen=True, slots=True)
class Room:
    """A piece of guest memory: its guest-physical address and our view of it."""

    address: int
    view: memoryview

    @property
    def size(self) -> int:
        return len(self.view)

    def part(self, start: int, size: int) -> "Room":
        if not 0 <= start <= start + size <= len(self.view):
            raise ValueError(f"{size} bytes at {start} are no part of {len(self.view)}")
        return Room(self.address + start, self.view[start : start + size])


class GuestMemory:
    """Regions of the given sizes (multiples of 4 KiB), each a memfd of its own, mapped shared."""

    def __init__(self, *sizes: int, file_offset: int = 0) -> None:
        """`file_offset`: bytes of each file before its region, which QEMU has for the memory above 4 GiB."""
        if not 1 <= len(sizes) <= REGIONS_MAX or any(size <= 0 or size % PAGE_BYTES for size in sizes):
            raise ValueError(f"1 to {REGIONS_MAX} regions, each of whole pages")
        self.regions: list[Region] = []
        self._maps: list[mmap.mmap] = []
        self._used: list[int] = []
        self._starts: list[int] = []
        guest, user = GUEST_BASE, USER_BASE
        for size in sizes:
            descriptor = os.memfd_create("g35-guest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, file_offset + size)
            # As QEMU's memory-backend-memfd has it: a file that shrank would kill every process that maps it.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, offset=file_offset)
            self._maps.append(mapped)
            view = memoryview(mapped)
            self.regions.append(Region(guest, size, user, file_offset, descriptor, view))
            self._used.append(0)
            self._starts.append(_address_of(view))
            guest += size + GAP_BYTES
            user += size + 16 * GAP_BYTES

    def room(self, size: int, alignment: int = PAGE_BYTES) -> Room:
        """`size` bytes, zero, that nobody else gets; the first region that has them."""
        for index, region in enumerate(self.regions):
            start = -(-self._used[index] // alignment) * alignment
            if start + size <= region.size:
                self._used[index] = start + size
                return Room(region.guest_address + start, region.view[start : start + size])
        raise OutOfGuestMemory(f"no region has {size} bytes left")

    def at(self, address: int, size: int) -> memoryview:
        """Our view of `size` bytes at a guest-physical address; ValueError where they are not all there."""
        for region in self.regions:
            start = address - region.guest_address
            if start >= 0 and start + size <= region.size:
                return region.view[start : start + size]
        raise ValueError(f"{size} bytes at {address:#x} are not guest memory")

    def user_address(self, address: int) -> int:
        """The front-end's address of a guest-physical one, for SET_VRING_ADDR."""
        for region in self.regions:
            if 0 <= address - region.guest_address < region.size:
                return region.user_address + address - region.guest_address
        raise ValueError(f"{address:#x} is not guest memory")

    def address_of(self, view: memoryview) -> int | None:
        """The guest-physical address of a writable view of guest memory; None for any other memory.

        It costs no look into the bytes: this is how a caller's buffer is found to need no copy.
        """
        if view.readonly or not view.contiguous:
            return None
        found = _address_of(view)
        for region, start in zip(self.regions, self._starts, strict=True):
            if found - start >= 0 and found - start + view.nbytes <= region.size:
                return region.guest_address + found - start
        return None

    def close(self) -> None:
        """Close the files and, as far as nobody holds a view, unmap."""
        for region in self.regions:
            os.close(region.descriptor)
            region.view.release()
        self.regions = []
        for mapped in self._maps:
            try:
                mapped.close()
            except BufferError:
                continue  # somebody still looks at a buffer: it goes with the last view
        self._maps = []

    def __enter__(self) -> "GuestMemory":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0


def pages_of(room: Room) -> Iterator[Room]:
    """The 4 KiB pages of a room, in order; the last may be shorter."""
    for start in range(0, room.size, PAGE_BYTES):
        yield room.part(start, min(PAGE_BYTES, room.size - start))
