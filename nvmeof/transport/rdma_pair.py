"""A reliable connected queue pair over verbs, in the words of `nvmeof/rdma/work.py`. Both roles use it.

It is made, its receives are posted, the connection manager connects it (`rdma_connect.py`), and from then
on it posts work and polls completions. Everything that verbs refuse is a `ConnectionLost`: there is nothing
that a queue could do about it but to be made again.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from nvmeof.errors import ConnectionLost
from nvmeof.rdma.buffers import address_of
from nvmeof.rdma.work import (
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
    WorkKind,
    Write,
)
from nvmeof.transport.verbs_provider import Verbs
from nvmeof.transport.verbs_waiting import Completions

INVALIDATED: Final = 8 | 4
"""IBV_WC_WITH_INV; rdma_rxe passes the kernel's value of the flag through (4). Nothing here sends immediates.
"""

READS_MAX: Final = 128
"""RDMA READs and atomics of one queue pair at once, each way: what rdma_rxe and the emulated device take."""

ACK_TIMEOUT: Final = 16
"""4.096 us * 2^16 = 0.27 s until a packet is sent again; a peer is given up after eight tries. The connection
manager proposes 2.1 s, and so a quarter of a minute. An emulated device takes 0.54 s or more: so 4.3 s."""

_RECEIVED: Final = int(WorkKind.RECEIVE)


@contextmanager
def verbs_errors(verbs: Verbs, what: str) -> Iterator[None]:
    """What verbs refuse ends the queue. Emulated verbs have a reason behind the errno, which is said too."""
    try:
        yield
    except verbs.error as error:
        reason = f" ({error.__cause__})" if error.__cause__ is not None else ""
        raise ConnectionLost(f"{what}: {error}{reason}") from error


class Domain:
    """A protection domain: the `Registrar` of its memory, and the memory windows of its queue pair."""

    def __init__(self, verbs: Verbs, context: Any) -> None:
        self._verbs = verbs
        with verbs_errors(verbs, "no protection domain"):
            self.pd = verbs.pd.PD(context)
        self._regions: dict[int, Any] = {}
        self._windows: list[Any] = []

    def register(self, view: memoryview, access: Access) -> Region:
        address = address_of(view)
        with verbs_errors(self._verbs, f"cannot register {len(view)} bytes"):
            region = self._verbs.mr.MR(self.pd, len(view), int(access), address)
        self._regions[region.lkey] = region
        return Region(view, address, region.lkey, region.rkey, region)

    def deregister(self, region: Region) -> None:
        if self._regions.pop(region.lkey, None) is not None:
            with suppress(self._verbs.error):
                region.handle.close()

    def region(self, span: Span) -> Any:
        return self._regions[span.lkey]

    def make_windows(self, count: int) -> list[int]:
        """Type 2 windows for a new queue pair; their R_Keys, in the order of their numbers."""
        self.close_windows()
        kind = self._verbs.enums.IBV_MW_TYPE_2
        with verbs_errors(self._verbs, "no memory windows"):
            self._windows = [self._verbs.mr.MW(self.pd, kind) for _ in range(count)]
            return [window.rkey for window in self._windows]

    def renew_window(self, number: int) -> int:
        """A new window in place of one that was used; its R_Key. Raises `ConnectionLost`."""
        with verbs_errors(self._verbs, "no memory window"):
            self._windows[number].close()
            window = self._windows[number] = self._verbs.mr.MW(self.pd, self._verbs.enums.IBV_MW_TYPE_2)
            return int(window.rkey)

    def window(self, number: int) -> Any:
        return self._windows[number]

    def close_windows(self) -> None:
        """Give them back; their queue pair is gone."""
        windows, self._windows = self._windows, []
        for window in windows:
            with suppress(self._verbs.error):
                window.close()

    def close(self) -> None:
        self.close_windows()
        for region in self._regions.values():
            with suppress(self._verbs.error):
                region.close()
        self._regions.clear()
        with suppress(self._verbs.error):
            self.pd.close()


class QueuePair:
    """See the top of this file. `completions` may be shared by many pairs; `number` tells them apart."""

    def __init__(
        self, verbs: Verbs, context: Any, domain: Domain, queue: Any, *, room: int, receives: int
    ) -> None:
        enums = verbs.enums
        self._verbs = verbs
        self._refusal = verbs.error
        self._domain = domain
        self._sge, self._recv_wr = verbs.wr.SGE, verbs.wr.RecvWR
        self._bind_info = verbs.mr.MWBindInfo
        self._signaled = int(enums.IBV_SEND_SIGNALED)
        self._posted: dict[int, Any] = {}
        ops = (
            enums.IBV_QP_EX_WITH_SEND
            | enums.IBV_QP_EX_WITH_SEND_WITH_INV
            | enums.IBV_QP_EX_WITH_RDMA_WRITE
            | enums.IBV_QP_EX_WITH_RDMA_READ
            | enums.IBV_QP_EX_WITH_BIND_MW
            | enums.IBV_QP_EX_WITH_LOCAL_INV
        )
        attributes = verbs.qp.QPInitAttrEx(
            qp_type=enums.IBV_QPT_RC,
            scq=queue,
            rcq=queue,
            cap=verbs.qp.QPCap(max_send_wr=room, max_recv_wr=receives, max_send_sge=1, max_recv_sge=1),
            sq_sig_all=0,
            pd=domain.pd,
            comp_mask=enums.IBV_QP_INIT_ATTR_PD | enums.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            send_ops_flags=ops,
        )
        with verbs_errors(verbs, "no queue pair"):
            self._qp = verbs.qp.QPEx(context, attributes)
        self.number = int(self._qp.qp_num)
        self._post_rows = getattr(self._qp, "post_rows", None)
        """One call for all of it; the emulator's, which pyverbs has not."""
        self._opcodes: tuple[int, int, int, int, int, int] = (
            int(enums.IBV_WR_SEND), int(enums.IBV_WR_SEND_WITH_INV), int(enums.IBV_WR_RDMA_WRITE),
            int(enums.IBV_WR_RDMA_READ), int(enums.IBV_WR_BIND_MW), int(enums.IBV_WR_LOCAL_INV),
        )  # fmt: skip

    def modify(self, cmid: Any, state: int, *, timeout: int | None = None) -> None:
        """To `state`, with the attributes that the connection manager has for it."""
        with verbs_errors(self._verbs, "the queue pair"):
            attributes, mask = cmid.init_qp_attr(state)
            # A peer may offer 255, which is more than devices take.
            attributes.max_rd_atomic = min(attributes.max_rd_atomic, READS_MAX)
            attributes.max_dest_rd_atomic = min(attributes.max_dest_rd_atomic, READS_MAX)
            if timeout is not None and state == self._verbs.enums.IBV_QPS_RTS:
                attributes.timeout = timeout
            self._qp.modify(attributes, mask)

    def post(self, receives: Sequence[Receive], work: Sequence[Work]) -> None:
        """Post, receives first. Raises `ConnectionLost`."""
        try:
            if work and self._post_rows is not None:
                self._post_rows(
                    [(receive.work_id, receive.span) for receive in receives],
                    [self._row(each) for each in work],
                )
                return
            for receive in receives:
                self._qp.post_recv(self._receive_request(receive))
            if work:
                self._post_work(work)
        except self._refusal as error:
            raise ConnectionLost(f"posting: {error}") from error

    def _receive_request(self, receive: Receive) -> Any:
        """The same place is posted again and again, so its request is kept. As many as there are receives."""
        request = self._posted.get(receive.work_id)
        if request is None:
            request = self._recv_wr(receive.work_id, 1, [self._sge(*receive.span)])
            self._posted[receive.work_id] = request
        return request

    def _row(self, each: Work) -> tuple[int, int, int, Span | None, int, int, Any, Any]:
        """A work request as `post_rows` takes it."""
        number, flags = each.work_id, self._signaled if each.signaled else 0
        send, send_inv, write, read, bind, invalidate = self._opcodes
        if isinstance(each, Send):
            if each.invalidate is None:
                return send, number, flags, each.span, 0, 0, None, None
            return send_inv, number, flags, each.span, each.invalidate, 0, None, None
        if isinstance(each, Write):
            return write, number, flags, each.span, each.rkey, each.remote_address, None, None
        if isinstance(each, Read):
            return read, number, flags, each.span, each.rkey, each.remote_address, None, None
        if isinstance(each, BindWindow):
            span = each.span
            info = self._bind_info(self._domain.region(span), span.address, span.length, int(each.access))
            return bind, number, flags, None, each.rkey, 0, self._domain.window(each.window), info
        return invalidate, number, flags, None, each.rkey, 0, None, None

    def _post_work(self, work: Iterable[Work]) -> None:
        qp, sge, signaled = self._qp, self._sge, self._signaled
        qp.wr_start()
        try:
            for each in work:
                qp.wr_id = each.work_id
                qp.wr_flags = signaled if each.signaled else 0
                match each:
                    case Send(span=span, invalidate=rkey):
                        if rkey is None:
                            qp.wr_send()
                        else:
                            qp.wr_send_inv(rkey)
                        qp.wr_set_sge(sge(*span))
                    case Write(span=span):
                        qp.wr_rdma_write(each.rkey, each.remote_address)
                        qp.wr_set_sge(sge(*span))
                    case Read(span=span):
                        qp.wr_rdma_read(each.rkey, each.remote_address)
                        qp.wr_set_sge(sge(*span))
                    case BindWindow(span=span):
                        info = self._bind_info(
                            self._domain.region(span), span.address, span.length, int(each.access)
                        )
                        qp.wr_bind_mw(self._domain.window(each.window), each.rkey, info)
                    case Invalidate():
                        qp.wr_local_inv(each.rkey)
        except BaseException:
            qp.wr_abort()
            raise
        qp.wr_complete()

    def break_off(self) -> None:
        """To the error state: from now on the peer reaches no memory by it."""
        attributes = self._verbs.qp.QPAttr(qp_state=self._verbs.enums.IBV_QPS_ERR)
        with suppress(self._verbs.error):
            self._qp.modify(attributes, self._verbs.enums.IBV_QP_STATE)

    def close(self) -> None:
        with suppress(self._verbs.error):
            self._qp.close()


def poll(verbs: Verbs, queue: Completions) -> list[tuple[int, Done]]:
    """What has completed: (number of the queue pair, completion)."""
    try:
        taken = queue.take()
    except verbs.error as error:
        raise ConnectionLost(f"polling: {error}") from error
    found = []
    for number, work_id, status, size, key, flags in taken:
        done: Done
        if status:
            done = Done(work_id, status)
        elif work_id >> 32 == _RECEIVED:
            done = Done(work_id, 0, size, key if flags & INVALIDATED else None)
        else:
            done = Done(work_id)
        found.append((number, done))
    return found
