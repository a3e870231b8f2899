"""A queue pair made of nothing: what verbs do with work requests, between two ends in one process.

Each `Station` has registered memory, memory windows, a send and a receive queue. A `Wire` carries out the
work of both, one request at a time and in order, by the rules that matter to NVMe/RDMA: keys are checked
against address, length and access; a SEND without a receive is counted (a device would answer "receiver not
ready"); whatever goes wrong takes both ends to error, where work is flushed and memory is touched no more.
`hold` stops one end's work where it is, as a slow peer or network would.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from nvmeof.rdma.buffers import address_of
from nvmeof.rdma.work import (
    FLUSHED,
    Access,
    BindWindow,
    Done,
    Invalidate,
    Read,
    Receive,
    Region,
    Send,
    Span,
    Work,
    Write,
)

REMOTE_ACCESS_ERROR = 10
REMOTE_INVALID_REQUEST = 9
LOCAL_PROTECTION_ERROR = 4

_keys = itertools.count(0x100, 0x100)


class Station:
    """One end: the `Registrar` of its memory and the queues of its queue pair."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.regions: dict[int, tuple[Region, Access]] = {}
        self.bound: dict[int, tuple[Span, Access]] = {}
        self.windows: list[int] = []
        self.work: deque[Work] = deque()
        self.receives: deque[Receive] = deque()
        self.done: deque[Done] = deque()
        self.error = False
        self.hold = False
        self.starved = 0
        """SENDs of the peer that found no receive."""
        self.executed: list[Work] = []

    # --- memory ---------------------------------------------------------------------

    def register(self, view: memoryview, access: Access) -> Region:
        key = next(_keys)
        region = Region(view, address_of(view), key, key, None)
        self.regions[key] = region, access
        return region

    def deregister(self, region: Region) -> None:
        del self.regions[region.rkey]

    def make_windows(self, count: int) -> list[int]:
        """R_Keys of fresh type 2 windows, numbered as they come."""
        self.windows = [next(_keys) for _ in range(count)]
        return list(self.windows)

    def renew_window(self, number: int) -> int:
        """A fresh window of that number, for a provider whose windows serve once."""
        self.windows[number] = next(_keys)
        return self.windows[number]

    def local(self, span: Span, access: Access) -> memoryview | None:
        found = self.regions.get(span.lkey)
        if found is None or found[1] & access != access:
            return None
        region = found[0]
        offset = span.address - region.address
        if offset < 0 or offset + span.length > len(region.view):
            return None
        return region.view[offset : offset + span.length]

    def remote(self, address: int, length: int, rkey: int, access: Access) -> memoryview | None:
        """What the peer may touch; None where it may not."""
        if rkey in self.bound:
            span, allowed = self.bound[rkey]
            inside = span.address <= address and address + length <= span.address + span.length
            if not allowed & access or not inside:
                return None
            return self.local(Span(address, length, span.lkey), Access(0))
        found = self.regions.get(rkey)
        return self.local(Span(address, length, rkey), access) if found is not None else None

    # --- queues ---------------------------------------------------------------------

    def post(self, receives: Iterable[Receive], work: Iterable[Work]) -> None:
        self.receives.extend(receives)
        self.work.extend(work)
        if self.error:
            self.flush()

    def flush(self) -> None:
        """In error: everything that was posted completes so, and nothing is carried out."""
        self.error = True
        self.done.extend(Done(each.work_id, FLUSHED) for each in self.work)
        self.done.extend(Done(each.work_id, FLUSHED) for each in self.receives)
        self.work.clear()
        self.receives.clear()

    def take_done(self) -> Sequence[Done]:
        done = list(self.done)
        self.done.clear()
        return done


class Wire:
    """Between two stations."""

    def __init__(self, first: Station, second: Station) -> None:
        self.ends = (first, second)

    def step(self) -> bool:
        """One work request of each end; False if there was none."""
        moved = False
        for near, far in (self.ends, self.ends[::-1]):
            if near.work and not near.hold and not near.error:
                moved |= self._carry_out(near, far)
        return moved

    def cut(self) -> None:
        """Both queue pairs are in error."""
        for end in self.ends:
            end.flush()

    def _carry_out(self, near: Station, far: Station) -> bool:
        work = near.work[0]
        if isinstance(work, Send) and not far.receives and not far.error:
            far.starved += 1
            return False
        near.work.popleft()
        near.executed.append(work)
        status = 0
        if isinstance(work, BindWindow):
            status = self._bind(near, work)
        elif isinstance(work, Invalidate):
            status = 0 if near.bound.pop(work.rkey, None) else LOCAL_PROTECTION_ERROR
        elif far.error:
            return False  # Retried until somebody gives up; a test does that.
        elif isinstance(work, Send):
            status = self._send(near, far, work)
        else:
            status = self._move(near, far, work)
        if status:
            near.done.append(Done(work.work_id, status))
            self.cut()
        elif work.signaled:
            near.done.append(Done(work.work_id))
        return True

    @staticmethod
    def _bind(near: Station, work: BindWindow) -> int:
        base = near.windows[work.window]
        allowed = near.regions.get(work.span.lkey)
        if allowed is None or not allowed[1] & Access.WINDOW_BIND or near.local(work.span, Access(0)) is None:
            return LOCAL_PROTECTION_ERROR
        if work.rkey & ~0xFF != base & ~0xFF or any(key & ~0xFF == base & ~0xFF for key in near.bound):
            return LOCAL_PROTECTION_ERROR
        near.bound[work.rkey] = work.span, work.access
        return 0

    @staticmethod
    def _send(near: Station, far: Station, work: Send) -> int:
        message = near.local(work.span, Access(0))
        if message is None:
            return LOCAL_PROTECTION_ERROR
        receive = far.receives.popleft()
        into = far.local(receive.span, Access.LOCAL_WRITE)
        if into is None or len(message) > len(into):
            return REMOTE_INVALID_REQUEST
        if work.invalidate is not None and far.bound.pop(work.invalidate, None) is None:
            return REMOTE_ACCESS_ERROR
        into[: len(message)] = message
        far.done.append(Done(receive.work_id, 0, len(message), work.invalidate))
        return 0

    @staticmethod
    def _move(near: Station, far: Station, work: Read | Write) -> int:
        reading = isinstance(work, Read)
        ours = near.local(work.span, Access.LOCAL_WRITE if reading else Access(0))
        wanted = Access.REMOTE_READ if reading else Access.REMOTE_WRITE
        theirs = far.remote(work.remote_address, work.span.length, work.rkey, wanted)
        if ours is None:
            return LOCAL_PROTECTION_ERROR
        if theirs is None:
            return REMOTE_ACCESS_ERROR
        if reading:
            ours[:] = theirs
        else:
            theirs[:] = ours
        return 0
