"""Guest memory as this process sees it: from a guest's or a front-end's address to bytes.

A table is a value: it never changes, a new one takes its place. Views handed out keep their mapping
alive, so a region may be removed while a request still works in it; the memory goes with the last view.
Every address comes from outside: what is not wholly inside the regions raises `AddressError`.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from agent.virtio.vhost_user import Region

ADDRESS_END: Final = 1 << 64
REGIONS_MAX: Final = 32
"""Regions of one table (GET_MAX_MEM_SLOTS)."""


class AddressError(ValueError):
    """The peer's fault: an address or a length that does not lie in its memory."""


@dataclass(frozen=True, slots=True)
class MappedRegion:
    """A region and its bytes: `memory` is exactly `region.size` long and writable."""

    region: Region
    memory: memoryview


class MemoryTable:
    """All regions of a guest, by guest address and by user address."""

    __slots__ = ("_bases", "_regions", "_spans")

    def __init__(self, regions: Iterable[MappedRegion] = ()) -> None:
        """Raises AddressError where two regions overlap, one is empty or ends beyond 2^64, or too many."""
        ordered = sorted(regions, key=lambda mapped: mapped.region.guest_address)
        if len(ordered) > REGIONS_MAX:
            raise AddressError(f"{len(ordered)} regions; {REGIONS_MAX} is the most")
        for mapped in ordered:
            region = mapped.region
            if not region.size or len(mapped.memory) != region.size:
                raise AddressError("a region of no bytes, or of other bytes than were mapped")
            for start in (region.guest_address, region.user_address):
                if start + region.size > ADDRESS_END:
                    raise AddressError("a region ends beyond 2^64")
        _refuse_overlap([(each.region.guest_address, each.region.size) for each in ordered], "guest")
        _refuse_overlap([(each.region.user_address, each.region.size) for each in ordered], "user")
        self._regions = ordered
        self._bases = [mapped.region.guest_address for mapped in ordered]
        # Looked up for every descriptor, so as plain tuples: base, end, memory.
        self._spans = [
            (each.region.guest_address, each.region.guest_address + each.region.size, each.memory)
            for each in ordered
        ]

    @property
    def regions(self) -> list[MappedRegion]:
        """By their guest addresses."""
        return self._regions

    def runs(self, address: int, length: int) -> list[memoryview]:
        """`length` bytes at a guest address; several views where they cross from one region to the next."""
        found: list[memoryview] = []
        while length:
            at = bisect_right(self._bases, address) - 1
            if at < 0 or address >= self._spans[at][1]:
                raise AddressError(f"{length} bytes at guest address {address:#x} lie in no region")
            base, end, memory = self._spans[at]
            here = min(length, end - address)
            found.append(memory[address - base : address - base + here])
            address += here
            length -= here
        return found

    def user_view(self, address: int, length: int) -> memoryview:
        """`length` bytes at an address of the front-end's process; else AddressError."""
        for mapped in self._regions:
            start = mapped.region.user_address
            if start <= address and address + length <= start + mapped.region.size:
                return mapped.memory[address - start : address - start + length]
        raise AddressError(f"{length} bytes at user address {address:#x} lie in no region")

    def with_region(self, mapped: MappedRegion) -> "MemoryTable":
        return MemoryTable([*self._regions, mapped])

    def without_region(self, region: Region) -> "MemoryTable":
        """Raises AddressError where there is no such region (address, user address and size count)."""
        kept = [each for each in self._regions if not _is_same(each.region, region)]
        if len(kept) == len(self._regions):
            raise AddressError("there is no such region to remove")
        return MemoryTable(kept)


def _is_same(one: Region, other: Region) -> bool:
    return (one.guest_address, one.user_address, one.size) == (
        other.guest_address,
        other.user_address,
        other.size,
    )


def _refuse_overlap(spans: list[tuple[int, int]], which: str) -> None:
    end = 0
    for start, size in sorted(spans):
        if start < end:
            raise AddressError(f"two regions overlap in {which} addresses")
        end = start + size
