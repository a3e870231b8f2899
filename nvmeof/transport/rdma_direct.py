"""Reliable queue pairs that are connected by exchanged numbers, without the connection manager.

Both sides tell each other the number, the GID and the first packet sequence number of their queue pair by
some other way, such as HTTP. Then each moves its own queue pair to RTS. `rdma_connect.py` is the way for
peers that have no other.
"""

import ipaddress
import secrets
from contextlib import suppress
from typing import Any, Final, NamedTuple

from nvmeof.transport.rdma_pair import ACK_TIMEOUT, Domain, QueuePair, verbs_errors
from nvmeof.transport.verbs_provider import Verbs, VerbsUnavailable
from nvmeof.transport.verbs_waiting import Completions

PORT: Final = 1
GIDS_MAX: Final = 256
"""Entries of a device's table of GIDs that are looked at."""
PSN_LIMIT: Final = 1 << 24
QPN_LIMIT: Final = 1 << 24
READS_AT_ONCE: Final = 1
"""RDMA READs of a queue pair that are under way. Nobody negotiates the number here, so it is the least."""
RETRIES: Final = 7
HOPS: Final = 64
RNR_TIMER: Final = 12
"""0.64 ms; nobody sends to these queue pairs."""
_MAPPED: Final = bytes(10) + b"\xff\xff"


class PairEnd(NamedTuple):
    """One end of a connection, as the other side has to know it."""

    number: int
    gid: bytes
    """16 bytes, of RoCE v2: an IPv6 address, or an IPv4 address that is mapped to one."""
    psn: int


def gid_of(address: str) -> bytes:
    """The GID of RoCE v2 for an IP address. Raises ValueError."""
    found = ipaddress.ip_address(address)
    return found.packed if found.version == 6 else _MAPPED + found.packed


def address_of_gid(gid: bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IP address of a GID."""
    found = ipaddress.IPv6Address(gid)
    return found.ipv4_mapped or found


class DirectDevice:
    """The RDMA device at a local address: its context, a domain and one completion queue for all its pairs.

    One thread waits for `completions`; others may make, connect, post to and close pairs.
    """

    def __init__(self, verbs: Verbs, address: str, *, entries: int) -> None:
        """`entries` of the completion queue. Raises `VerbsUnavailable` or `ConnectionLost`."""
        self.verbs = verbs
        verbs.require_device()
        verbs.ensure_device(address)
        self.gid = gid_of(address)
        with verbs_errors(verbs, f"no RDMA device at {address}"):
            self._name, self.gid_index = self._find(address)
            self.context: Any = verbs.open_context(self._name)
        self._domain: Domain | None = None
        self._completions: Completions | None = None
        try:
            with verbs_errors(verbs, "the RDMA device"):
                self.mtu = int(self.context.query_port(PORT).active_mtu)
            self._domain = Domain(verbs, self.context)
            with verbs_errors(verbs, "no completion queue"):
                self._completions = verbs.make_completions(self.context, entries)
        except BaseException:
            self.close()
            raise

    @property
    def domain(self) -> Domain:
        assert self._domain is not None, "the device is open"
        return self._domain

    @property
    def completions(self) -> Completions:
        assert self._completions is not None, "the device is open"
        return self._completions

    def _find(self, address: str) -> tuple[str, int]:
        """The name of the device that has the address, and the index of its GID there."""
        verbs = self.verbs
        for name in verbs.devices_for(address):
            context = verbs.open_context(name)
            try:
                for index in range(GIDS_MAX):
                    if self._is_ours(context, index):
                        return name, index
            except verbs.error:
                continue  # the table is at its end
            finally:
                verbs.release_context(name)
        raise VerbsUnavailable(f"no RDMA device has the address {address}")

    def _is_ours(self, context: Any, index: int) -> bool:
        found = gid_of(context.query_gid(PORT, index).gid)
        kinds = self.verbs.enums
        # RoCE v1 has entries for the same addresses.
        return found == self.gid and (context.query_gid_type(PORT, index) == kinds.IBV_GID_TYPE_SYSFS_ROCE_V2)

    def make_pair(self, *, room: int, access: int = 0) -> "DirectPair":
        """A queue pair with `room` for work requests, not connected yet. `access`: what its peer may do to
        memory that is registered in `domain`. Raises `ConnectionLost`."""
        return DirectPair(self, room, access)

    def close(self) -> None:
        """The pairs are closed. Idempotent."""
        completions, self._completions = self._completions, None
        domain, self._domain = self._domain, None
        with suppress(self.verbs.error):
            if completions is not None:
                completions.close()
        if domain is not None:
            domain.close()
        name, self._name = self._name, ""
        if name:
            self.verbs.release_context(name)


class DirectPair:
    """One queue pair: `connect` it, `post` to it through `pair`, `close` it."""

    def __init__(self, device: DirectDevice, room: int, access: int) -> None:
        self._device = device
        self._access = access
        queue = device.completions.queue
        self.pair = QueuePair(device.verbs, device.context, device.domain, queue, room=room, receives=1)
        self.end = PairEnd(self.pair.number, device.gid, secrets.randbelow(PSN_LIMIT))

    def connect(self, peer: PairEnd) -> None:
        """To RTS, with `peer` at the other end. Raises `ConnectionLost`."""
        states = self._device.verbs.enums
        attributes = _Attributes(self._device, self._access, self.end, peer)
        for state in (states.IBV_QPS_INIT, states.IBV_QPS_RTR, states.IBV_QPS_RTS):
            self.pair.modify(attributes, state)

    def break_off(self) -> None:
        """What is under way ends, and the peer reaches nothing by this queue pair any more."""
        self.pair.break_off()

    def close(self) -> None:
        self.pair.close()


class _Attributes:
    """What `QueuePair.modify` asks a connection manager for: the attributes of a state, and their mask."""

    def __init__(self, device: DirectDevice, access: int, own: PairEnd, peer: PairEnd) -> None:
        self._device, self._access, self._own, self._peer = device, access, own, peer

    def init_qp_attr(self, state: int) -> tuple[Any, int]:
        verbs, peer = self._device.verbs, self._peer
        e = verbs.enums
        attributes = verbs.qp.QPAttr(qp_state=state, port_num=PORT)
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = READS_AT_ONCE
        if state == e.IBV_QPS_INIT:
            attributes.qp_access_flags = self._access
            mask = e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS
        elif state == e.IBV_QPS_RTR:
            gid = verbs.addr.GID(ipaddress.IPv6Address(peer.gid).exploded)
            route = verbs.addr.GlobalRoute(dgid=gid, sgid_index=self._device.gid_index, hop_limit=HOPS)
            attributes.ah_attr = verbs.addr.AHAttr(port_num=PORT, is_global=1, gr=route)
            attributes.path_mtu = self._device.mtu
            attributes.dest_qp_num, attributes.rq_psn = peer.number, peer.psn
            attributes.min_rnr_timer = RNR_TIMER
            mask = (
                e.IBV_QP_STATE | e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN | e.IBV_QP_RQ_PSN
                | e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER
            )  # fmt: skip
        else:
            attributes.sq_psn = self._own.psn
            attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = ACK_TIMEOUT, RETRIES, RETRIES
            mask = (
                e.IBV_QP_STATE | e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT | e.IBV_QP_RNR_RETRY
                | e.IBV_QP_SQ_PSN | e.IBV_QP_MAX_QP_RD_ATOMIC
            )  # fmt: skip
        return attributes, int(mask)
