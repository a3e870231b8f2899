"""Registered memory: protection domains, regions, windows, and the one way by which the device touches bytes.

Every byte that the device reads or writes for a program is reached through a `Span`. That is a range of
a region that was checked against its key, domain, access rights and bounds when the work began. The region is
looked at again at each use. A region that has been deregistered has no memory any more, so it is never
touched again, whatever is still under way (IBTA 10.6). What a window opens is reached through a `Backing` of
its own, one for each time that it is bound, which has no memory any more once it is invalidated, freed or
bound anew.

Keys are 32 bits: 24 of table index and 8 that change with every use of a place (10.6.3), so that a stale key
misses. L_Key and R_Key of a region are the same number, as with rxe.
"""

import errno
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from emulator.roce.nic.verbs import Access, AddressVector, Limits, MwType, Sge, VerbsError

Bytes: TypeAlias = NDArray[np.uint8]
Memory: TypeAlias = "bytes | bytearray | memoryview"

KNOWN_ACCESS: Final = Access(sum(Access))
REMOTE_ACCESS: Final = Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
WINDOW_ACCESS: Final = REMOTE_ACCESS | Access.ZERO_BASED

_LOCAL_WRITE: Final = int(Access.LOCAL_WRITE)
_MW_BIND: Final = int(Access.MW_BIND)
_ZERO_BASED: Final = int(Access.ZERO_BASED)
_WRITING: Final = int(Access.REMOTE_WRITE | Access.REMOTE_ATOMIC)

_NOTHING: Final = np.empty(0, np.uint8)


class ProtectionFault(Exception):
    """A key, a domain, a right or a bound does not allow this access. The caller knows whose fault that
    is."""


class ProtectionDomain:
    """What may be used together. `users` counts the objects in it; it cannot go while there are any."""

    __slots__ = ("handle", "users")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.users = 0


@dataclass(frozen=True, slots=True, eq=False)
class AddressHandle:
    """Where a UD request goes (IBTA 11.2.3.1)."""

    pd: ProtectionDomain
    av: AddressVector


class Backing:
    """The bytes of a region, of a window for as long as it stays bound, or of a request that brought them
    along. None once they are not to be touched any more."""

    __slots__ = ("array", "view")

    def __init__(self, view: memoryview) -> None:
        self.view: memoryview | None = view
        self.array: Bytes | None = np.frombuffer(view, np.uint8) if view.nbytes else _NOTHING

    def forget(self) -> None:
        """Let go of the memory for good."""
        self.array = self.view = None


class MemoryRegion(Backing):
    """`length` bytes that both sides call `address`, `address + 1`, ... (struct ibv_mr)."""

    __slots__ = ("access", "address", "length", "lkey", "pd", "rights", "windows")

    def __init__(
        self, pd: ProtectionDomain, view: memoryview, address: int, access: Access, key: int
    ) -> None:
        super().__init__(view)
        self.pd = pd
        self.address = 0 if access & Access.ZERO_BASED else address
        self.length = view.nbytes
        self.access = access
        self.rights = int(access)
        """The same as a plain number: to combine flags of an enum costs ten times as much."""
        self.lkey = key
        self.windows = 0

    @property
    def rkey(self) -> int:
        """The key for the remote side."""
        return self.lkey

    def offset_of(self, address: int, length: int) -> int:
        """Where a range lies in the region. ProtectionFault where any byte of it lies outside: Python's
        numbers do not wrap, so no sum of a huge address and a length comes back into bounds."""
        offset = address - self.address
        if offset < 0 or offset + length > self.length:
            raise ProtectionFault("outside the region")
        return offset


class MemoryWindow:
    """A part of a region under an R_Key of its own (struct ibv_mw); `region` is None while it is not bound.

    Type 1 belongs to its domain; type 2 to the queue pair that bound it (2B, IBTA 10.6.7.2.4).
    """

    __slots__ = (
        "access", "address", "grant", "length", "offset", "pd", "qpn", "region", "rights", "rkey", "type",
    )  # fmt: skip

    def __init__(self, pd: ProtectionDomain, kind: MwType, key: int) -> None:
        self.pd = pd
        self.type = kind
        self.rkey = key
        self.region: MemoryRegion | None = None
        self.grant: Backing | None = None
        """There is one while it is bound."""
        self.address = self.offset = self.length = self.qpn = 0
        self.access = Access(0)
        self.rights = 0

    def unbind(self) -> None:
        """Nothing is reached by this window until it is bound again, by messages under way neither."""
        if self.region is not None:
            self.region.windows -= 1
            self.region = None
        if self.grant is not None:
            self.grant.forget()
            self.grant = None


@dataclass(frozen=True, slots=True)
class Bind:
    """What a memory window is bound to: `length` bytes at `address` of `region`, for `access` of the peer."""

    region: MemoryRegion
    address: int
    length: int
    access: Access


class Span(NamedTuple):
    """`length` bytes of `backing` from `offset` on."""

    backing: Backing
    offset: int
    length: int


class SpanList:
    """The memory of one message: spans, one after the other."""

    __slots__ = ("length", "spans")

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.length = sum(span.length for span in spans)

    def contiguous(self, start: int, most: int) -> Bytes:
        """Up to `most` bytes of the message from byte `start` on, as far as one span has them.
        ProtectionFault where the memory is gone."""
        for span in self.spans:
            if start < span.length:
                if span.backing.array is None:
                    raise ProtectionFault("the region is gone")
                first = span.offset + start
                return span.backing.array[first : first + min(most, span.length - start)]
            start -= span.length
        return _NOTHING

    def copy_out(self, start: int, target: memoryview) -> None:
        """Fill `target` with the message from byte `start` on. ProtectionFault: memory is gone or ends."""
        self._walk(start, target, into_target=True)

    def place(self, start: int, data: memoryview) -> None:
        """Write `data` at byte `start` of the message. ProtectionFault as in `copy_out`."""
        self._walk(start, data, into_target=False)

    def _walk(self, start: int, data: memoryview, *, into_target: bool) -> None:
        done, end = 0, len(data)
        if not end:
            return
        for span in self.spans:
            if start >= span.length:
                start -= span.length
                continue
            view = span.backing.view
            if view is None:
                raise ProtectionFault("the region is gone")
            count = min(span.length - start, end - done)
            at = span.offset + start
            if into_target:
                data[done : done + count] = view[at : at + count]
            else:
                view[at : at + count] = data[done : done + count]
            done += count
            if done == end:
                return
            start = 0
        raise ProtectionFault("the message is longer than its memory")


EMPTY: Final = SpanList(())


class KeyTable:
    """All regions and windows of a device by key. Bounded by `Limits.max_mr` and `max_mw`."""

    def __init__(self, limits: Limits, rng: random.Random) -> None:
        self._limits = limits
        self._rng = rng
        self._regions: dict[int, MemoryRegion] = {}
        self._windows: dict[int, MemoryWindow] = {}
        self._next_index = rng.randrange(1, 1 << 24)

    def _new_key(self) -> int:
        while True:
            self._next_index = self._next_index % 0xFFFFFF + 1
            key = self._next_index << 8
            if self._next_index not in self._windows and self._next_index not in self._regions:
                return key | self._rng.randrange(1, 256)

    def add_region(self, pd: ProtectionDomain, memory: Memory, address: int, access: Access) -> MemoryRegion:
        """Register memory (ibv_reg_mr_iova). EINVAL for flags that make no sense or an address beyond 64
        bits, EFAULT where the memory may not be written but should be, ENOMEM when the table is full."""
        if access & ~KNOWN_ACCESS:
            raise VerbsError(errno.EINVAL, f"access flags {int(access):#x} are not known")
        if access & (Access.REMOTE_WRITE | Access.REMOTE_ATOMIC) and not access & Access.LOCAL_WRITE:
            raise VerbsError(errno.EINVAL, "remote write and atomic access need local write")
        try:
            view = memoryview(memory).cast("B")
        except (TypeError, ValueError) as error:
            raise VerbsError(errno.EINVAL, f"this memory cannot be registered: {error}") from error
        if view.nbytes > self._limits.max_mr_size or not 0 <= address <= (1 << 64) - view.nbytes:
            raise VerbsError(errno.EINVAL, "the range does not fit")
        if access & Access.LOCAL_WRITE and view.readonly:
            raise VerbsError(errno.EFAULT, "read-only memory cannot be registered for writing")
        if len(self._regions) >= self._limits.max_mr:
            raise VerbsError(errno.ENOMEM, "no more memory regions")
        key = self._new_key()
        region = self._regions[key >> 8] = MemoryRegion(pd, view, address, access, key)
        pd.users += 1
        return region

    def remove_region(self, region: MemoryRegion) -> None:
        """Deregister. EBUSY while windows are bound to it, EINVAL if it is not registered."""
        if self._regions.get(region.lkey >> 8) is not region:
            raise VerbsError(errno.EINVAL, "this region is not registered here")
        if region.windows:
            raise VerbsError(errno.EBUSY, f"{region.windows} memory windows are bound to the region")
        del self._regions[region.lkey >> 8]
        region.pd.users -= 1
        region.forget()

    def replace_region(self, region: MemoryRegion, successor: MemoryRegion) -> None:
        """`successor`, registered already, goes on under the keys of `region`, which is deregistered: work
        that is under way in its memory ends as with any deregistration. EBUSY, EINVAL as there."""
        self.remove_region(region)
        del self._regions[successor.lkey >> 8]
        successor.lkey = region.lkey
        self._regions[region.lkey >> 8] = successor

    def add_window(self, pd: ProtectionDomain, kind: MwType) -> MemoryWindow:
        """Allocate a window, not bound (ibv_alloc_mw)."""
        if len(self._windows) >= self._limits.max_mw:
            raise VerbsError(errno.ENOMEM, "no more memory windows")
        key = self._new_key()
        window = self._windows[key >> 8] = MemoryWindow(pd, MwType(kind), key)
        pd.users += 1
        return window

    def remove_window(self, window: MemoryWindow) -> None:
        """Free a window; what it was bound to is not reached by it any more."""
        if self._windows.get(window.rkey >> 8) is not window:
            raise VerbsError(errno.EINVAL, "this memory window does not exist here")
        del self._windows[window.rkey >> 8]
        window.pd.users -= 1
        window.unbind()

    def forget_all(self) -> None:
        """The device closes: nothing is reached any more."""
        for window in self._windows.values():
            window.unbind()
        for region in self._regions.values():
            region.forget()
        self._regions.clear()
        self._windows.clear()

    def local(self, pd: ProtectionDomain, sges: Sequence[Sge], *, write: bool) -> SpanList:
        """The memory of a scatter/gather list, checked. ProtectionFault where anything is wrong; an entry of
        no length is not looked at (IBTA 10.6.4)."""
        spans: list[Span] = []
        for address, length, lkey in sges:
            if not length:
                continue
            region = self._regions.get(lkey >> 8)
            if region is None or region.lkey != lkey or region.pd is not pd:
                raise ProtectionFault(f"L_Key {lkey:#x} is not valid here")
            if write and not region.rights & _LOCAL_WRITE:
                raise ProtectionFault("no local write access")
            spans.append(Span(region, region.offset_of(address, length), length))
        return SpanList(spans)

    def remote(
        self, pd: ProtectionDomain, qpn: int, rkey: int, address: int, length: int, need: int
    ) -> SpanList:
        """The memory that a peer names, checked (IBTA 10.6.5, 9.7.4.1.5). ProtectionFault else."""
        region = self._regions.get(rkey >> 8)
        if region is not None:
            if region.rkey != rkey or region.pd is not pd:
                raise ProtectionFault(f"R_Key {rkey:#x} is not valid here")
            if need & ~region.rights:
                raise ProtectionFault("the region does not grant this access")
            return SpanList((Span(region, region.offset_of(address, length), length),))
        window = self._windows.get(rkey >> 8)
        if window is None or window.rkey != rkey or window.grant is None or window.pd is not pd:
            raise ProtectionFault(f"R_Key {rkey:#x} is not valid here")
        if window.type is MwType.TYPE_2 and window.qpn != qpn:
            raise ProtectionFault("the window belongs to another queue pair")
        if need & ~window.rights:
            raise ProtectionFault("the window does not grant this access")
        offset = address - window.address
        if offset < 0 or offset + length > window.length:
            raise ProtectionFault("outside the window")
        return SpanList((Span(window.grant, window.offset + offset, length),))

    def bind(self, window: MemoryWindow, qpn: int, pd: ProtectionDomain, bind: Bind, rkey: int) -> None:
        """Carry out a bind (IBTA 10.6.7.2). ProtectionFault where it is not allowed. A type 2 window must be
        free; binding a type 1 window again moves it, and to no length unbinds it."""
        region = bind.region
        if (
            self._windows.get(window.rkey >> 8) is not window
            or window.pd is not pd
            or rkey >> 8 != window.rkey >> 8
        ):
            raise ProtectionFault("this memory window is not valid here")
        if window.type is MwType.TYPE_2 and (window.region is not None or not bind.length):
            raise ProtectionFault("a type 2 window must be free, and bound to some bytes")
        if not bind.length:
            window.unbind()
            window.rkey = rkey
            return
        if self._regions.get(region.lkey >> 8) is not region or region.pd is not pd:
            raise ProtectionFault("the region is not valid here")
        if not region.rights & _MW_BIND or region.rights & _ZERO_BASED:
            raise ProtectionFault("windows may not be bound to this region")
        asked = int(bind.access)
        if asked & ~int(WINDOW_ACCESS):
            raise ProtectionFault("a window cannot grant this access")
        if asked & _WRITING and not region.rights & _LOCAL_WRITE:
            raise ProtectionFault("the region may not be written")
        offset = region.offset_of(bind.address, bind.length)
        window.unbind()
        region.windows += 1
        assert region.view is not None
        window.region, window.grant = region, Backing(region.view)
        window.offset, window.length = offset, bind.length
        window.address = 0 if asked & _ZERO_BASED else bind.address
        window.access = bind.access
        window.rights = asked
        window.qpn = qpn
        window.rkey = rkey

    def invalidate(self, pd: ProtectionDomain, qpn: int, rkey: int) -> None:
        """Local or remote invalidation of a type 2 window (IBTA 10.6.7.2.5). ProtectionFault for all else:
        plain regions are never invalidated, as with rxe."""
        window = self._windows.get(rkey >> 8)
        if (
            window is None
            or window.rkey != rkey
            or window.type is not MwType.TYPE_2
            or window.region is None
            or window.pd is not pd
            or window.qpn != qpn
        ):
            raise ProtectionFault(f"R_Key {rkey:#x} cannot be invalidated")
        window.unbind()

    def unbind_windows_of(self, qpn: int) -> None:
        """A queue pair goes: its type 2 windows are free again (IBTA 10.6.7.2.6)."""
        for window in self._windows.values():
            if window.type is MwType.TYPE_2 and window.qpn == qpn and window.region is not None:
                window.unbind()
