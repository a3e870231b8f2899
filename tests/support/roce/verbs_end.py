"""One end of a connection (RC, or UC) without a connection manager, on any package with pyverbs' names.

The text is the same for Debian's pyverbs on the kernel's rxe and for the emulator's: what differs is the
package that is named.
"""

from __future__ import annotations

import importlib
import socket
from types import SimpleNamespace
from typing import Any, Final

from nvmeof.transport.verbs_provider import load_verbs
from tests.support.waiting import wait_until

MODULES: Final = ("addr", "cq", "device", "enums", "mr", "pd", "qp", "wr")
OPERATIONS_AT_ONCE: Final = 16
SECONDS: Final = 60.0


class VerbsEnd:
    """A queue pair with `size` bytes of registered memory. `close` it, or use it in a `with`."""

    def __init__(
        self, package: str, device: str, address: str, size: int, kind: str = "RC", *, send_ops: int = 0
    ) -> None:
        load_verbs(package)  # Debian's is found where it lies
        p = self._p = SimpleNamespace(
            **{name: importlib.import_module(f"{package}.{name}") for name in MODULES}
        )
        e = self.e = p.enums
        self._context = p.device.Context(name=device)
        self.gid, self._gid_index = self._find_gid(address)
        self._domain = p.pd.PD(self._context)
        access = (
            e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
            | e.IBV_ACCESS_REMOTE_ATOMIC
        )  # fmt: skip
        self.memory = p.mr.MR(self._domain, size, access)
        self._completions = p.cq.CQ(self._context, 4 * OPERATIONS_AT_ONCE)
        self._access = access
        self._kind = getattr(e, f"IBV_QPT_{kind}")
        self._send_ops = send_ops
        self.pair: Any = None
        self.renew()

    def _find_gid(self, address: str) -> tuple[str, int]:
        wanted = bytes(10) + b"\xff\xff" + socket.inet_aton(address)
        for index in range(16):
            gid = self._context.query_gid(1, index).gid
            if socket.inet_pton(socket.AF_INET6, gid) == wanted:
                return gid, index
        raise AssertionError(f"no GID for {address}")

    def __enter__(self) -> VerbsEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for thing in (self.pair, self._completions, self.memory, self._domain, self._context):
            thing.close()

    def renew(self) -> None:
        """A queue pair in place of the old one, not connected yet."""
        if self.pair is not None:
            self.pair.close()
        room = OPERATIONS_AT_ONCE
        qp = self._p.qp
        cap = qp.QPCap(max_send_wr=room, max_recv_wr=room, max_send_sge=1, max_recv_sge=1)
        if self._send_ops:
            masks = self.e.IBV_QP_INIT_ATTR_PD | self.e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
            extended = qp.QPInitAttrEx(
                qp_type=self._kind, scq=self._completions, rcq=self._completions, cap=cap, sq_sig_all=1,
                pd=self._domain, comp_mask=masks, send_ops_flags=self._send_ops,
            )  # fmt: skip
            self.pair = qp.QPEx(self._context, extended)
            return
        self.pair = qp.QP(
            self._domain,
            qp.QPInitAttr(
                qp_type=self._kind, scq=self._completions, rcq=self._completions, cap=cap, sq_sig_all=1
            ),
        )

    def connect(
        self,
        other: VerbsEnd | SimpleNamespace,
        *,
        path_mtu: int,
        first_psn: int,
        expected_psn: int,
        timeout: int = 17,
    ) -> None:
        """To RTS, with `other` (its `gid` and `pair.qp_num`) as the peer; `path_mtu` is an ibv_mtu.

        A packet without an answer is sent again after 4.096 us * 2^`timeout`.
        """
        addr, qp = self._p.addr, self._p.qp
        attr = qp.QPAttr(port_num=1)
        attr.qp_access_flags = self._access
        attr.path_mtu = path_mtu
        attr.dest_qp_num = other.pair.qp_num
        attr.sq_psn, attr.rq_psn = first_psn, expected_psn
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 16
        attr.min_rnr_timer = 12
        attr.timeout, attr.retry_cnt, attr.rnr_retry = timeout, 7, 7
        route = addr.GlobalRoute(dgid=addr.GID(other.gid), sgid_index=self._gid_index, hop_limit=64)
        attr.ah_attr = addr.AHAttr(port_num=1, is_global=1, gr=route)
        self.pair.to_rts(attr)

    # --- work ---------------------------------------------------------------------------------------------

    def receive(self, offset: int, length: int) -> None:
        """Post a receive."""
        sge = self._p.wr.SGE(self.memory.buf + offset, length, self.memory.lkey)
        self.pair.post_recv(self._p.wr.RecvWR(num_sge=1, sg=[sge]))

    def post(
        self,
        opcode: int,
        offset: int,
        length: int,
        *,
        immediate: int = 0,
        remote: tuple[int, int] | None = None,
        atomic: tuple[int, int] | None = None,
    ) -> None:
        """Post a request; `remote` is (key, address), `atomic` (compare or add, swap)."""
        sge = self._p.wr.SGE(self.memory.buf + offset, length, self.memory.lkey)
        request = self._p.wr.SendWR(
            opcode=opcode, num_sge=1, sg=[sge], imm_data=immediate, send_flags=self.e.IBV_SEND_SIGNALED
        )
        if atomic is not None:
            assert remote is not None
            request.set_wr_atomic(remote[0], remote[1], *atomic)
        elif remote is not None:
            request.set_wr_rdma(*remote)
        self.pair.post_send(request)

    def completion(self) -> Any:
        """The next completion, whatever its status."""
        return wait_until(self.poll, SECONDS, "a completion")

    def poll(self) -> Any:
        """A completion, if there is one."""
        count, completions = self._completions.poll(1)
        return completions[0] if count else None

    def done(self, count: int = 1) -> list[Any]:
        """So many completions, all of them good."""
        found = [self.completion() for _ in range(count)]
        assert [each.status for each in found] == [self.e.IBV_WC_SUCCESS] * count, found
        return found
