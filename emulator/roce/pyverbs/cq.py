"""`pyverbs.cq`: completion channels, completion queues in both forms, and work completions.

To poll a queue that is empty lets the device work once (receive what has come, send what is due), so that a
program which polls in a loop drives its own traffic and meets no other thread.
"""

import errno
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar, Final

from emulator.roce.nic.completion import CompletionQueue
from emulator.roce.nic.verbs import VerbsError, WcFlags, WcStatus, WorkCompletion
from emulator.roce.pyverbs import base
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.device import Context
from emulator.roce.pyverbs.pd import PD
from emulator.roce.pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError, PyverbsUserError
from emulator.roce.runtime.channel import EventChannel
from emulator.roce.runtime.errors import DeviceClosed

_SUPPORTED_FLAGS: Final = e.IBV_CREATE_CQ_ATTR_SINGLE_THREADED


_WITH_INV: Final = int(WcFlags.WITH_INV)

_ABBREVIATED: Final = frozenset({"QP", "EEC", "EECN", "WR", "MW", "RDD", "RD", "RNR", "WC"})

_STATUS: Final = {
    "LOC": "local", "REM": "remote", "ERR": "error", "LEN": "length", "PROT": "protection",
    "RESP": "response", "REQ": "request", "EXC": "exceeded", "VIOL": "violation",
    "INV": "invalidate", "MW": "memory window", "OP": "op",
}  # fmt: skip

_STATUS_AS_THEY_ARE: Final[dict[int, str]] = {
    e.IBV_WC_RNR_RETRY_EXC_ERR: "RNR retry exceeded",
    e.IBV_WC_FATAL_ERR: "WC fatal error",
    e.IBV_WC_TM_ERR: "Unknown CQE status",
    e.IBV_WC_TM_RNDV_INCOMPLETE: "Unknown CQE status",
}
"""Where pyverbs' words are not those of the name."""

_OPCODES: Final[dict[int, str]] = {
    e.IBV_WC_SEND: "Send",
    e.IBV_WC_RDMA_WRITE: "RDMA write",
    e.IBV_WC_RDMA_READ: "RDMA read",
    e.IBV_WC_COMP_SWAP: "Compare and swap",
    e.IBV_WC_FETCH_ADD: "Fetch and add",
    e.IBV_WC_BIND_MW: "Bind Memory window",
    e.IBV_WC_LOCAL_INV: "Local invalidate",
    e.IBV_WC_TSO: "TSO",
    e.IBV_WC_RECV: "Receive",
    e.IBV_WC_RECV_RDMA_WITH_IMM: "Receive RDMA with immediate",
    e.IBV_WC_TM_ADD: "Tag matching - add",
    e.IBV_WC_TM_DEL: "Tag matching - delete",
    e.IBV_WC_TM_SYNC: "Tag matching - sync",
    e.IBV_WC_TM_RECV: "Tag matching - receive",
    e.IBV_WC_TM_NO_TAG: "Tag matching - no tag",
    0x87: "Driver WR",
}

_FLAGS: Final = {
    1: "GRH", 2: "With immediate", 4: "IP csum OK", 8: "With invalidate", 16: "TM sync request",
    32: "TM match", 64: "TM data valid",
}  # fmt: skip


def cqe_status_to_str(status: int) -> str:
    """The words of an `ibv_wc_status`, made from its name."""
    if status in _STATUS_AS_THEY_ARE:
        return _STATUS_AS_THEY_ARE[status]
    try:
        parts = e.ibv_wc_status(status).name.removeprefix("IBV_WC_").split("_")
    except ValueError:
        return "Unknown CQE status"
    return " ".join(_STATUS.get(part, part if part in _ABBREVIATED else part.lower()) for part in parts)


def cqe_opcode_to_str(opcode: int) -> str:
    """The words of an `ibv_wc_opcode`."""
    return _OPCODES.get(opcode, f"Unknown CQE opcode {opcode}")


def flags_to_str(flags: int, dictionary: Mapping[int, str]) -> str:
    """The words of all bits that are set, each followed by a space."""
    return "".join(f"{word} " for bit, word in dictionary.items() if flags & bit)


def cqe_flags_to_str(flags: int) -> str:
    return flags_to_str(flags, _FLAGS)


def create_wc_flags_to_str(flags: int) -> str:
    return flags_to_str(flags, {flag: flag.name for flag in e.ibv_create_cq_wc_flags})


@dataclass(slots=True, eq=False)
class WC(base.PyverbsObject):
    wr_id: int = 0
    status: int = 0
    opcode: int = 0
    vendor_err: int = 0
    byte_len: int = 0
    qp_num: int = 0
    src_qp: int = 0
    imm_data: int = 0
    wc_flags: int = 0
    pkey_index: int = 0
    slid: int = 0
    sl: int = 0
    dlid_path_bits: int = 0

    __str__ = base.shown(
        "",
        ("WR ID", "wr_id"), ("status", "status", cqe_status_to_str), ("opcode", "opcode", cqe_opcode_to_str),
        ("vendor error", "vendor_err"), ("byte length", "byte_len"), ("QP num", "qp_num"),
        ("source QP", "src_qp"), ("WC flags", "wc_flags", cqe_flags_to_str), ("pkey index", "pkey_index"),
        ("slid", "slid"), ("sl", "sl"), ("imm_data", "imm_data"), ("dlid path bits", "dlid_path_bits"),
    )  # fmt: skip


def swapped(number: int) -> int:
    """32 bits the other way round: immediate data is big-endian in `ibv_send_wr` and `ibv_wc`."""
    return int.from_bytes((number & 0xFFFFFFFF).to_bytes(4, "little"), "big")


def immediate(completion: WorkCompletion) -> int:
    """The union of `ibv_wc`: big-endian immediate data, or a key as it is."""
    imm = completion.imm
    return swapped(imm) if imm and not int(completion.flags) & _WITH_INV else imm


def work_completion_of(completion: WorkCompletion) -> WC:
    """What the caller gets; made without calling `__init__`, which takes twice as long."""
    wc: WC = WC.__new__(WC)
    wc.wr_id = completion.wr_id
    wc.status = completion.status
    wc.opcode = completion.opcode
    wc.vendor_err = completion.vendor_err
    wc.byte_len = completion.byte_len
    wc.qp_num = completion.qp_num
    wc.src_qp = completion.src_qp
    wc.imm_data = immediate(completion) if completion.imm else 0
    wc.wc_flags = completion.flags
    wc.pkey_index = completion.pkey_index
    wc.sl = completion.service_level
    wc.slid = wc.dlid_path_bits = 0
    return wc


@dataclass(slots=True, eq=False)
class PollCqAttr(base.PyverbsObject):
    comp_mask: int = field(default=0, init=False)


@dataclass(slots=True, eq=False)
class WcTmInfo(base.PyverbsObject):
    priv: int = field(default=0, init=False)
    tag: int = field(default=0, init=False)


class CompChannel(base.EventRow, base.PyverbsCM):
    """A row of completion events behind a file descriptor, readable while there are any."""

    __slots__ = ("context", "cqs", "device", "events")

    def __init__(self, context: Context) -> None:
        self.context = context
        self.device = context.device
        self.events: EventChannel[CompletionQueue] = EventChannel()
        # The descriptor of libibverbs blocks; a program that wants EAGAIN sets O_NONBLOCK on it.
        os.set_blocking(self.events.fileno(), True)
        self.cqs: base.Children = weakref.WeakSet()
        context.ccs.add(self)

    def __del__(self) -> None:
        events = getattr(self, "events", None)
        if events is not None and not events.closed:
            base.close_or_defer(self)

    def close(self) -> None:
        """Close the queues that report here, and the descriptor."""
        if self.events.closed:
            return
        base.close_children(self.cqs)
        with self.device.turn():
            self.events.close()

    def get_cq_event(self, expected_cq: "CQ | CQEX") -> None:
        """Wait for the next event and take it. PyverbsRDMAError where it is another queue's, and with EAGAIN
        where there is none and the descriptor does not block."""
        device, events = self.device, self.events
        while True:
            with device.turn():
                if events.closed:
                    raise PyverbsRDMAError("Failed to get CQ event", errno.EBADF)
                queue = events.pop()
                if queue is not None:
                    break
                blocking = os.get_blocking(events.fileno())
            if not blocking:
                device.drive_once()
                if not len(events):
                    raise PyverbsRDMAError("Failed to get CQ event", errno.EAGAIN)
                continue
            try:
                device.drive_until(lambda: len(events) or events.closed, None)
            except DeviceClosed as error:
                raise PyverbsRDMAError("Failed to get CQ event", errno.ENODEV) from error
        if queue is not expected_cq.native:
            raise PyverbsRDMAError("Received event on an unexpected CQ", 0)
        expected_cq.num_events += 1


class AnyCQ(base.DeviceObject[CompletionQueue]):
    """What both kinds of completion queue have. `num_events` counts events taken and not acknowledged."""

    __slots__ = ("channel", "context", "num_events", "qps", "srqs")
    CHILDREN = "qps srqs"
    DESTROY = "destroy_cq"

    qps: base.Children
    srqs: base.Children

    def __init__(
        self, context: Context, channel: CompChannel | None, cqe: int, comp_vector: int, refused: str
    ) -> None:
        super().__init__(context.device)
        self.context = context
        self.channel = channel
        self.num_events = 0
        nic = self.device.nic

        def make() -> CompletionQueue:
            if not 0 <= comp_vector < context.num_comp_vectors:
                raise VerbsError(errno.EINVAL, f"there is no completion vector {comp_vector}")
            # rdma-core's own tests give a float where they halve a limit.
            queue: CompletionQueue = nic.create_cq(int(cqe))
            if channel is not None:
                queue.on_completion = channel.events.push
            return queue

        self._make(refused, make)
        if channel is not None:
            channel.cqs.add(self)
        context.cqs.add(self)

    def close(self) -> None:
        """Close what completes here, drop its events, and give the queue back."""
        queue, channel = self._native, self.channel
        if queue is None:
            return
        super().close()
        if channel is not None and not channel.events.closed:
            with self.device.turn():
                channel.events.discard(lambda event: event is queue)
        self.channel = None
        self.num_events = 0

    cqe = base.reads("native.entries", "Entries.")

    def req_notify(self, solicited_only: bool = False) -> None:
        """One event for the next completion, or for the next that was solicited or failed. In pyverbs only a
        `CQ` can be armed."""
        with self.device.hold():
            self.native.arm(bool(solicited_only))


class CQ(AnyCQ):
    """A completion queue that is polled for whole completions."""

    __slots__ = ()
    REFUSED = "Failed to close CQ"

    def __init__(
        self,
        context: Context,
        cqe: int,
        cq_context: object = None,
        channel: CompChannel | None = None,
        comp_vector: int = 0,
    ) -> None:
        super().__init__(context, channel, cqe, comp_vector, "Failed to create a CQ")

    comp_channel = base.reads("channel", "Where events go.")

    def resize(self, cqe: int) -> None:
        """Change the number of entries. EINVAL where it does not hold what is in it."""
        with base.asking(self.device, "Failed to resize CQ"):
            self.native.resize(cqe)

    def poll(self, num_entries: int = 1) -> tuple[int, list[WC]]:
        """Take up to `num_entries` completions: how many, and which."""
        queue = self._native
        if queue is None:
            raise PyverbsUserError("the CQ is closed")
        device = self.device
        if not len(queue):
            device.drive_once()
            if not len(queue):
                return 0, []
        completions = queue.poll(num_entries)
        return len(completions), [work_completion_of(completion) for completion in completions]

    def ack_events(self, num_events: int) -> None:
        self.num_events -= num_events

    __str__ = base.shown("CQ\n", ("Handle", "native", id), ("CQEs", "cqe"))


@dataclass(slots=True, eq=False)
class CqInitAttrEx(base.PyverbsObject):
    cqe: int = 100
    channel: InitVar[CompChannel | None] = None
    comp_vector: int = 0
    wc_flags: int = 0
    comp_mask: int = 0
    flags: int = 0
    parent_domain: PD | None = None
    comp_channel: CompChannel | None = field(default=None, init=False)
    _context: object = field(default=None, init=False)

    def __post_init__(self, channel: CompChannel | None) -> None:
        self.comp_channel = channel

    cq_context: ClassVar[Any] = property(
        None,
        lambda attr, val: setattr(attr, "_context", val),
        doc="The caller's own; it can be set, and not read.",
    )

    __str__ = base.shown(
        "",
        ("Number of CQEs", "cqe"), ("WC flags", "wc_flags", create_wc_flags_to_str),
        ("comp mask", "comp_mask"), ("flags", "flags"),
    )  # fmt: skip


def _read(name: str) -> "Callable[[CQEX], int]":
    """A method that reads one field of the current completion."""

    def read(self: "CQEX") -> int:
        return int(getattr(self.current(), name))

    return read


class CQEX(AnyCQ):
    """A completion queue that is read field by field: `start_poll`, `read_*`, `poll_next`, `end_poll`.

    The standard fields can be asked for; timestamps, VLANs and flow tags are refused, as by rxe.
    """

    __slots__ = ("_current",)
    REFUSED = "Failed to destroy CQEX"

    def __init__(self, context: Context, init_attr: CqInitAttrEx | None) -> None:
        attr = CqInitAttrEx() if init_attr is None else init_attr
        refused = "Failed to create extended CQ"
        if attr.comp_mask & ~e.IBV_CQ_INIT_ATTR_MASK_FLAGS or attr.wc_flags & ~e.IBV_WC_STANDARD_FLAGS:
            raise PyverbsRDMAError(refused, errno.EOPNOTSUPP)
        if attr.comp_mask & e.IBV_CQ_INIT_ATTR_MASK_FLAGS and attr.flags & ~_SUPPORTED_FLAGS:
            raise PyverbsRDMAError(refused, errno.EOPNOTSUPP)
        self._current: WorkCompletion | None = None
        super().__init__(context, attr.comp_channel, attr.cqe, attr.comp_vector, refused)

    def close(self) -> None:
        super().close()
        self._current = None

    def start_poll(self, attr: PollCqAttr | None) -> int:
        """Go to the first completion: 0, or ENOENT where there is none."""
        if attr is not None and attr.comp_mask:
            return errno.EINVAL
        if not len(self.native):
            self.device.drive_once()
        return self.poll_next()

    def poll_next(self) -> int:
        """Go to the next completion: 0, or ENOENT where there is none."""
        queue = self.native
        if not len(queue):
            return errno.ENOENT
        completions = queue.poll(1)
        if not completions:
            return errno.ENOENT
        self._current = completions[0]
        return 0

    def end_poll(self) -> None:
        """The fields of the last completion are still there until the next."""

    def current(self) -> WorkCompletion:
        """The completion that was polled last. Not in pyverbs."""
        if self._current is None:
            raise PyverbsError("no completion has been polled")
        return self._current

    @property
    def status(self) -> int:
        """An `ibv_wc_status`; success before the first poll."""
        return int(self._current.status) if self._current is not None else 0

    @status.setter
    def status(self, val: int) -> None:
        self.current().status = WcStatus(val)

    @property
    def wr_id(self) -> int:
        """The request's; 0 before the first poll."""
        return self._current.wr_id if self._current is not None else 0

    @wr_id.setter
    def wr_id(self, val: int) -> None:
        self.current().wr_id = val

    read_opcode, read_vendor_err, read_byte_len = _read("opcode"), _read("vendor_err"), _read("byte_len")
    read_qp_num, read_src_qp, read_wc_flags = _read("qp_num"), _read("src_qp"), _read("flags")
    read_sl = _read("service_level")

    def read_imm_data(self) -> int:
        """Big-endian immediate data, or the R_Key that was invalidated."""
        return immediate(self.current())

    def _zero(self) -> int:
        """RoCE has no LIDs. The others are never granted (`wc_flags` refuses them), so never written."""
        return 0

    read_slid = read_dlid_path_bits = read_timestamp = read_completion_wallclock_ns = _zero
    read_cvlan = read_flow_tag = _zero

    def read_tm_info(self) -> WcTmInfo:
        """There is no tag matching."""
        return WcTmInfo()

    __str__ = base.shown("Extended CQ:\n", ("Handle", "native", id), ("CQEs", "cqe"))
