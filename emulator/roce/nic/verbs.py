"""The interface of the verbs: enumerations with libibverbs' values, and the records that calls take and give.

It follows IBTA 1.4 chapter 11 and `infiniband/verbs.h`, with records in place of C structures. Values are
those of `verbs.h`, so pyverbs' constants pass unchanged. Addresses of memory (iova), immediate data and
R_Keys are plain numbers; `wire` decides their byte order.
"""

import errno
import os
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

from emulator.roce.wire.flow import ROCE_PORT as ROCE_PORT

GSI_QPN: Final = 1
"""QP1, the general services interface; the connection manager's."""

GSI_QKEY: Final = 0x80010000
"""The Q_Key of every QP1 (IBTA 10.2.5)."""

MAX_MESSAGE: Final = 1 << 31
"""Bytes of the longest message (IBTA 9.7.2)."""

GRH_BYTES: Final = 40
"""Room that a UD receive gives to the network header, before the payload."""


class VerbsError(Exception):
    """The device refuses a call: the caller's fault. `errno` is libibverbs' return value."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"{message} ({errno.errorcode.get(number, str(number))}: {os.strerror(number)})")
        self.errno = number
        self.reason = message


class QpType(IntEnum):
    """enum ibv_qp_type, those that exist here."""

    RC = 2
    UC = 3
    UD = 4


class QpState(IntEnum):
    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6


class Mtu(IntEnum):
    """enum ibv_mtu; `.bytes` is the size that it stands for."""

    MTU_256 = 1
    MTU_512 = 2
    MTU_1024 = 3
    MTU_2048 = 4
    MTU_4096 = 5

    @property
    def bytes(self) -> int:
        """Bytes of payload in a full packet."""
        return 128 << self

    @classmethod
    def of(cls, size: int) -> "Mtu":
        """The largest one that is no more than `size` bytes. ValueError below 256."""
        if size < 256:
            raise ValueError(f"no MTU fits into {size} bytes")
        return cls(min(size.bit_length() - 8, 5))


class Access(IntFlag):
    LOCAL_WRITE = 1 << 0
    REMOTE_WRITE = 1 << 1
    REMOTE_READ = 1 << 2
    REMOTE_ATOMIC = 1 << 3
    MW_BIND = 1 << 4
    ZERO_BASED = 1 << 5
    RELAXED_ORDERING = 1 << 20


class SendOpcode(IntEnum):
    RDMA_WRITE = 0
    RDMA_WRITE_WITH_IMM = 1
    SEND = 2
    SEND_WITH_IMM = 3
    RDMA_READ = 4
    ATOMIC_CMP_AND_SWP = 5
    ATOMIC_FETCH_AND_ADD = 6
    LOCAL_INV = 7
    BIND_MW = 8
    SEND_WITH_INV = 9
    ATOMIC_WRITE = 15


class SendFlags(IntFlag):
    FENCE = 1 << 0
    SIGNALED = 1 << 1
    SOLICITED = 1 << 2
    INLINE = 1 << 3


class WcStatus(IntEnum):
    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21


class WcOpcode(IntEnum):
    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMP_SWAP = 3
    FETCH_ADD = 4
    BIND_MW = 5
    LOCAL_INV = 6
    ATOMIC_WRITE = 9
    RECV = 128
    RECV_RDMA_WITH_IMM = 129


class WcFlags(IntFlag):
    GRH = 1 << 0
    WITH_IMM = 1 << 1
    WITH_INV = 1 << 3


class QpAttr(IntFlag):
    STATE = 1 << 0
    CUR_STATE = 1 << 1
    EN_SQD_ASYNC_NOTIFY = 1 << 2
    ACCESS_FLAGS = 1 << 3
    PKEY_INDEX = 1 << 4
    PORT = 1 << 5
    QKEY = 1 << 6
    AV = 1 << 7
    PATH_MTU = 1 << 8
    TIMEOUT = 1 << 9
    RETRY_CNT = 1 << 10
    RNR_RETRY = 1 << 11
    RQ_PSN = 1 << 12
    MAX_QP_RD_ATOMIC = 1 << 13
    ALT_PATH = 1 << 14
    MIN_RNR_TIMER = 1 << 15
    SQ_PSN = 1 << 16
    MAX_DEST_RD_ATOMIC = 1 << 17
    PATH_MIG_STATE = 1 << 18
    CAP = 1 << 19
    DEST_QPN = 1 << 20


class SrqAttr(IntFlag):
    MAX_WR = 1 << 0
    LIMIT = 1 << 1


class MwType(IntEnum):
    TYPE_1 = 1
    TYPE_2 = 2


class EventType(IntEnum):
    CQ_ERR = 0
    QP_FATAL = 1
    QP_REQ_ERR = 2
    QP_ACCESS_ERR = 3
    COMM_EST = 4
    SQ_DRAINED = 5
    PATH_MIG = 6
    PATH_MIG_ERR = 7
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_ERR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    SM_CHANGE = 13
    SRQ_ERR = 14
    SRQ_LIMIT_REACHED = 15
    QP_LAST_WQE_REACHED = 16
    CLIENT_REREGISTER = 17
    GID_CHANGE = 18
    WQ_FATAL = 19


NO_ACCESS: Final = Access(0)
NO_SEND_FLAGS: Final = SendFlags(0)
NO_WC_FLAGS: Final = WcFlags(0)


class Address(NamedTuple):
    ip: str
    port: int = ROCE_PORT


class Sge(NamedTuple):
    """struct ibv_sge: `length` bytes at iova `address` of the region (or type 1 window) `lkey`."""

    address: int
    length: int
    lkey: int


@dataclass(frozen=True, slots=True)
class AddressVector:
    """struct ibv_ah_attr for RoCEv2: where datagrams go. `ip` is the peer's address as text."""

    ip: str
    port_num: int = 1
    sgid_index: int = 0
    traffic_class: int = 0
    flow_label: int = 0
    hop_limit: int = 64
    service_level: int = 0


@dataclass(slots=True)
class QpCapabilities:
    """struct ibv_qp_cap: the bounds of both queues of a pair."""

    max_send_wr: int = 1
    max_recv_wr: int = 1
    max_send_sge: int = 1
    max_recv_sge: int = 1
    max_inline_data: int = 0


@dataclass(slots=True)
class QpAttributes:
    """struct ibv_qp_attr: `modify` sets those in its mask, `query` gives all."""

    state: QpState = QpState.RESET
    current_state: QpState = QpState.RESET
    path_mtu: Mtu = Mtu.MTU_256
    qkey: int = 0
    rq_psn: int = 0
    sq_psn: int = 0
    dest_qpn: int = 0
    access: Access = NO_ACCESS
    capabilities: QpCapabilities = field(default_factory=QpCapabilities)
    av: AddressVector | None = None
    pkey_index: int = 0
    enable_sqd_notify: bool = False
    sq_draining: bool = False
    max_rd_atomic: int = 0
    max_dest_rd_atomic: int = 0
    min_rnr_timer: int = 0
    port_num: int = 0
    timeout: int = 0
    retry_count: int = 0
    rnr_retry: int = 0


@dataclass(slots=True)
class WorkCompletion:
    """struct ibv_wc. `imm` is the immediate data, or with `WcFlags.WITH_INV` the R_Key that was invalidated.

    `source` is the sender's IP address (UD only); libibverbs has it in the GRH bytes of the buffer alone.
    """

    wr_id: int
    status: WcStatus
    opcode: WcOpcode
    qp_num: int
    byte_len: int = 0
    imm: int = 0
    src_qp: int = 0
    flags: WcFlags = NO_WC_FLAGS
    vendor_err: int = 0
    pkey_index: int = 0
    service_level: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True)
class AsyncEvent:
    """struct ibv_async_event; `element` is the queue or queue pair."""

    type: EventType
    element: object = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of a device's tables, as `ibv_query_device` reports them."""

    max_qp: int = 4096
    max_qp_wr: int = 16384
    max_sge: int = 32
    max_inline_data: int = 512
    max_cq: int = 4096
    max_cqe: int = 65536
    max_mr: int = 65536
    max_mr_size: int = 1 << 40
    max_mw: int = 65536
    max_pd: int = 4096
    max_ah: int = 4096
    max_srq: int = 1024
    max_srq_wr: int = 16384
    max_srq_sge: int = 32
    max_mcast_grp: int = 64
    """Each group is one more socket of the device."""
    max_mcast_qp_attach: int = 64
    """Queue pairs of one group; a datagram is copied for each."""
    max_qp_rd_atom: int = 128
    max_message: int = MAX_MESSAGE


class Burst(NamedTuple):
    """Datagrams to send at once: `data`, cut into `segment_size` bytes each (the last may be shorter). The
    link parts a burst that is more than one call of a socket takes.

    A single datagram has a `segment_size` of at least its length. `data` may be the device's own buffer: send
    or copy it before the next call of any method of the `Nic`.
    """

    data: memoryview
    segment_size: int
    destination: Address
