"""Receive queues: a queue pair's own, and one that many share (SRQ, IBTA 10.2.9)."""

import errno
from collections import deque
from collections.abc import Callable

from emulator.roce.nic.memory import ProtectionDomain
from emulator.roce.nic.verbs import SrqAttr, VerbsError
from emulator.roce.nic.work_requests import ReceiveRequest


class ReceiveQueue:
    """At most `max_wr` receives of at most `max_sge` entries, first come, first served."""

    def __init__(self, max_wr: int, max_sge: int) -> None:
        self.max_wr = max_wr
        self.max_sge = max_sge
        self.row: deque[ReceiveRequest] = deque()

    def __len__(self) -> int:
        return len(self.row)

    def post_recv(self, request: ReceiveRequest) -> None:
        """Put one in: ibv_post_srq_recv. EINVAL for too many entries, ENOMEM for a full queue."""
        if len(request.sges) > self.max_sge:
            raise VerbsError(errno.EINVAL, f"{len(request.sges)} scatter entries, {self.max_sge} at most")
        if len(self.row) >= self.max_wr:
            raise VerbsError(errno.ENOMEM, "the receive queue is full")
        self.row.append(request)

    def take(self) -> ReceiveRequest | None:
        return self.row.popleft() if self.row else None


class SharedReceiveQueue(ReceiveQueue):
    """A receive queue of many queue pairs of one domain. When fewer than `limit` receives are left, the
    device says so once and the limit is off (IBTA 10.2.9.4)."""

    def __init__(
        self,
        pd: ProtectionDomain,
        max_wr: int,
        max_sge: int,
        limit: int,
        most: int,
        on_limit: "Callable[[SharedReceiveQueue], None]",
    ) -> None:
        super().__init__(max_wr, max_sge)
        self.pd = pd
        self.limit = limit
        self.users = 0
        self._most = most
        self._on_limit = on_limit

    def take(self) -> ReceiveRequest | None:
        request = super().take()
        if request is not None and len(self.row) < self.limit:
            self.limit = 0
            self._on_limit(self)
        return request

    def modify(self, mask: SrqAttr, *, max_wr: int = 0, limit: int = 0) -> None:
        """ibv_modify_srq: a new size, a new limit. EINVAL where it cannot hold what waits, or the limit is
        beyond the size."""
        size = max_wr if mask & SrqAttr.MAX_WR else self.max_wr
        if not max(1, len(self.row)) <= size <= self._most or (mask & SrqAttr.LIMIT and limit > size):
            raise VerbsError(errno.EINVAL, f"a shared queue of {size} receives with limit {limit}")
        self.max_wr = size
        if mask & SrqAttr.LIMIT:
            self.limit = limit
