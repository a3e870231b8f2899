"""`pyverbs.cq`: completion channels, completion queues in both forms, and work completions.

To poll a queue that is empty lets the device work once (receive what has come, send what is due), so that a
program which polls in a loop drives its own traffic and meets no other thread.
"""

from __future__ import annotations

import errno
import os
import weakref
from typing import TYPE_CHECKING, Final

from emulator.roce.nic.verbs import VerbsError, WorkCompletion
from emulator.roce.pyverbs.base import (
    Children,
    PyverbsCM,
    PyverbsObject,
    bury,
    close_children,
    forsake,
    give_back,
    listing,
    refusal,
)
from emulator.roce.pyverbs.cq_words import (
    cqe_flags_to_str,
    cqe_opcode_to_str,
    cqe_status_to_str,
    create_wc_flags_to_str,
    flags_to_str,
)
from emulator.roce.pyverbs.enums import IBV_WC_STANDARD_FLAGS
from emulator.roce.pyverbs.enums_queues import ibv_cq_init_attr_mask, ibv_create_cq_attr_flags
from emulator.roce.pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError, PyverbsUserError
from emulator.roce.pyverbs.work_completion import WC, PollCqAttr, WcTmInfo, immediate, work_completion_of
from emulator.roce.runtime.channel import EventChannel
from emulator.roce.runtime.errors import DeviceClosed

if TYPE_CHECKING:
    from emulator.roce.nic.completion import CompletionQueue
    from emulator.roce.pyverbs.device import Context
    from emulator.roce.pyverbs.pd import PD
    from emulator.roce.runtime.device import Device as OpenedDevice

_SUPPORTED_FLAGS: Final = ibv_create_cq_attr_flags.IBV_CREATE_CQ_ATTR_SINGLE_THREADED


class CompChannel(PyverbsCM):
    """A row of completion events behind a file descriptor, readable while there are any."""

    __slots__ = ("context", "cqs", "device", "events")

    def __init__(self, context: Context) -> None:
        self.context = context
        self.device = context.device
        self.events: EventChannel[CompletionQueue] = EventChannel()
        # The descriptor of libibverbs blocks; a program that wants EAGAIN sets O_NONBLOCK on it.
        os.set_blocking(self.events.fileno(), True)
        self.cqs: Children = weakref.WeakSet()
        context.ccs.add(self)

    def __del__(self) -> None:
        events = getattr(self, "events", None)
        if events is not None and not events.closed:
            forsake(self)

    def __len__(self) -> int:
        """Events that wait. Not in pyverbs."""
        return len(self.events)

    def __bool__(self) -> bool:
        return True

    @property
    def fd(self) -> int:
        """For select and poll. Not in pyverbs 44 (it came with 57)."""
        return self.events.fileno()

    def close(self) -> None:
        """Close the queues that report here, and the descriptor."""
        if self.events.closed:
            return
        close_children(self.cqs)
        with self.device.turn():
            self.events.close()

    def get_cq_event(self, expected_cq: CQ | CQEX) -> None:
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
        if queue is not expected_cq.queue:
            raise PyverbsRDMAError("Received event on an unexpected CQ", 0)
        expected_cq.num_events += 1

    def drop(self, queue: CompletionQueue) -> None:
        """Take back the events of a queue that goes. With the device's lock held. Not in pyverbs."""
        kept = []
        while len(self.events):
            event = self.events.pop()
            if event is not None and event is not queue:
                kept.append(event)
        for event in kept:
            self.events.push(event)


def _created(context: Context, cqe: int, channel: CompChannel | None, comp_vector: int) -> CompletionQueue:
    """A queue of the device, reporting to `channel`. VerbsError where it is refused."""
    bury()
    if not 0 <= comp_vector < context.num_comp_vectors:
        raise VerbsError(errno.EINVAL, f"there is no completion vector {comp_vector}")
    device = context.device
    with device.turn():
        # rdma-core's own tests give a float where they halve a limit.
        queue: CompletionQueue = device.nic.create_cq(int(cqe))
        if channel is not None:
            queue.on_completion = channel.events.push
    return queue


def _destroyed(
    queue: CompletionQueue, device: OpenedDevice, channel: CompChannel | None, refused: str
) -> None:
    give_back(device, device.nic.destroy_cq, queue, refused)
    if channel is not None and not channel.events.closed:
        with device.turn():
            channel.drop(queue)


class AnyCQ(PyverbsCM):
    """What both kinds of completion queue have. `num_events` counts events taken and not acknowledged."""

    __slots__ = ("_queue", "channel", "context", "device", "num_events", "qps", "srqs")

    def __init__(self, context: Context, channel: CompChannel | None) -> None:
        self._queue: CompletionQueue | None = None
        self.context = context
        self.device = context.device
        self.channel = channel
        self.num_events = 0
        self.qps: Children = weakref.WeakSet()
        self.srqs: Children = weakref.WeakSet()

    def __del__(self) -> None:
        if getattr(self, "_queue", None) is not None:
            forsake(self)

    def _create(self, cqe: int, comp_vector: int, refused: str) -> None:
        try:
            self._queue = _created(self.context, cqe, self.channel, comp_vector)
        except VerbsError as error:
            raise refusal(refused, error) from error
        if self.channel is not None:
            self.channel.cqs.add(self)
        self.context.cqs.add(self)

    @property
    def queue(self) -> CompletionQueue:
        """The device's own. Not in pyverbs."""
        if self._queue is None:
            raise PyverbsUserError("the CQ is closed")
        return self._queue


class CQ(AnyCQ):
    """A completion queue that is polled for whole completions."""

    __slots__ = ()

    def __init__(
        self,
        context: Context,
        cqe: int,
        cq_context: object = None,
        channel: CompChannel | None = None,
        comp_vector: int = 0,
    ) -> None:
        super().__init__(context, channel)
        self._create(cqe, comp_vector, "Failed to create a CQ")

    @property
    def comp_channel(self) -> CompChannel | None:
        """Where events go."""
        return self.channel

    @property
    def cqe(self) -> int:
        """Entries."""
        return self.queue.entries

    def close(self) -> None:
        """Close what completes here, acknowledge events, and give the queue back."""
        if self._queue is None:
            return
        close_children(self.qps, self.srqs)
        _destroyed(self._queue, self.device, self.channel, "Failed to close CQ")
        self._queue = self.channel = None
        self.num_events = 0

    def resize(self, cqe: int) -> None:
        """Change the number of entries. EINVAL where it does not hold what is in it."""
        device = self.device
        try:
            with device.turn():
                self.queue.resize(cqe)
        except VerbsError as error:
            raise refusal("Failed to resize CQ", error) from error

    def poll(self, num_entries: int = 1) -> tuple[int, list[WC]]:
        """Take up to `num_entries` completions: how many, and which."""
        queue = self._queue
        if queue is None:
            raise PyverbsUserError("the CQ is closed")
        device = self.device
        if not len(queue):
            device.drive_once()
            if not len(queue):
                return 0, []
        completions = queue.poll(num_entries)
        return len(completions), [work_completion_of(completion) for completion in completions]

    def req_notify(self, solicited_only: bool = False) -> None:
        """One event for the next completion, or for the next that was solicited or failed."""
        with self.device.hold():
            self.queue.arm(bool(solicited_only))

    def ack_events(self, num_events: int) -> None:
        """Acknowledge events that were taken."""
        self.num_events -= num_events

    def __str__(self) -> str:
        return "CQ\n" + listing([("Handle", id(self.queue)), ("CQEs", self.cqe)])


class CqInitAttrEx(PyverbsObject):
    """struct ibv_cq_init_attr_ex."""

    __slots__ = (
        "_context", "comp_channel", "comp_mask", "comp_vector", "cqe", "flags", "parent_domain", "wc_flags",
    )  # fmt: skip

    def __init__(
        self,
        cqe: int = 100,
        channel: CompChannel | None = None,
        comp_vector: int = 0,
        wc_flags: int = 0,
        comp_mask: int = 0,
        flags: int = 0,
        parent_domain: PD | None = None,
    ) -> None:
        self.cqe = cqe
        self.comp_channel = channel
        self.comp_vector = comp_vector
        self.wc_flags = wc_flags
        self.comp_mask = comp_mask
        self.flags = flags
        self.parent_domain = parent_domain
        self._context: object = None

    def _set_context(self, val: object) -> None:
        self._context = val

    cq_context = property(None, _set_context, doc="The caller's own; it can be set, and not read.")

    def __str__(self) -> str:
        return listing(
            [
                ("Number of CQEs", self.cqe), ("WC flags", create_wc_flags_to_str(self.wc_flags)),
                ("comp mask", self.comp_mask), ("flags", self.flags),
            ]
        )  # fmt: skip


class CQEX(AnyCQ):
    """A completion queue that is read field by field: `start_poll`, `read_*`, `poll_next`, `end_poll`.

    The standard fields can be asked for; timestamps, VLANs and flow tags are refused, as by rxe.
    """

    __slots__ = ("_current",)

    def __init__(self, context: Context, init_attr: CqInitAttrEx | None) -> None:
        attr = CqInitAttrEx() if init_attr is None else init_attr
        super().__init__(context, attr.comp_channel)
        self._current: WorkCompletion | None = None
        refused = "Failed to create extended CQ"
        if attr.comp_mask & ~ibv_cq_init_attr_mask.IBV_CQ_INIT_ATTR_MASK_FLAGS or (
            attr.wc_flags & ~IBV_WC_STANDARD_FLAGS
        ):
            raise PyverbsRDMAError(refused, errno.EOPNOTSUPP)
        if attr.comp_mask & ibv_cq_init_attr_mask.IBV_CQ_INIT_ATTR_MASK_FLAGS and (
            attr.flags & ~_SUPPORTED_FLAGS
        ):
            raise PyverbsRDMAError(refused, errno.EOPNOTSUPP)
        self._create(attr.cqe, attr.comp_vector, refused)

    @property
    def cqe(self) -> int:
        """Entries. Not in pyverbs."""
        return self.queue.entries

    def close(self) -> None:
        """Close what completes here and give the queue back."""
        if self._queue is None:
            return
        close_children(self.srqs, self.qps)
        _destroyed(self._queue, self.device, self.channel, "Failed to destroy CQEX")
        self._queue = self._current = self.channel = None

    def req_notify(self, solicited_only: bool = False) -> None:
        """As `CQ.req_notify`. Not in pyverbs, where only a `CQ` can be armed."""
        with self.device.hold():
            self.queue.arm(bool(solicited_only))

    def start_poll(self, attr: PollCqAttr | None) -> int:
        """Go to the first completion: 0, or ENOENT where there is none."""
        if attr is not None and attr.comp_mask:
            return errno.EINVAL
        if not len(self.queue):
            self.device.drive_once()
        return self.poll_next()

    def poll_next(self) -> int:
        """Go to the next completion: 0, or ENOENT where there is none."""
        queue = self.queue
        if not len(queue):
            return errno.ENOENT
        completions = queue.poll(1)
        if not completions:
            return errno.ENOENT
        self._current = completions[0]
        return 0

    def end_poll(self) -> None:
        """The fields of the last completion are still there until the next."""

    def _read(self) -> WorkCompletion:
        if self._current is None:
            raise PyverbsError("no completion has been polled")
        return self._current

    @property
    def status(self) -> int:
        """An `ibv_wc_status`; success before the first poll."""
        return int(self._current.status) if self._current is not None else 0

    @status.setter
    def status(self, val: int) -> None:
        self._read().status = type(self._read().status)(val)

    @property
    def wr_id(self) -> int:
        """The request's; 0 before the first poll."""
        return self._current.wr_id if self._current is not None else 0

    @wr_id.setter
    def wr_id(self, val: int) -> None:
        self._read().wr_id = val

    def read_opcode(self) -> int:
        return int(self._read().opcode)

    def read_vendor_err(self) -> int:
        return self._read().vendor_err

    def read_byte_len(self) -> int:
        return self._read().byte_len

    def read_imm_data(self) -> int:
        """Big-endian immediate data, or the R_Key that was invalidated."""
        return immediate(self._read())

    def read_qp_num(self) -> int:
        return self._read().qp_num

    def read_src_qp(self) -> int:
        return self._read().src_qp

    def read_wc_flags(self) -> int:
        return int(self._read().flags)

    def read_slid(self) -> int:
        """RoCE has no LIDs."""
        return 0

    def read_sl(self) -> int:
        return self._read().service_level

    def read_dlid_path_bits(self) -> int:
        """RoCE has no LIDs."""
        return 0

    def read_timestamp(self) -> int:
        """Never granted, so never written (`wc_flags` refuses it)."""
        return 0

    def read_completion_wallclock_ns(self) -> int:
        """Never granted, so never written."""
        return 0

    def read_cvlan(self) -> int:
        """Never granted, so never written."""
        return 0

    def read_flow_tag(self) -> int:
        """Never granted, so never written."""
        return 0

    def read_tm_info(self) -> WcTmInfo:
        """There is no tag matching."""
        return WcTmInfo()

    def __str__(self) -> str:
        return "Extended CQ:\n" + listing([("Handle", id(self.queue)), ("CQEs", self.cqe)])


__all__ = [
    "CQ", "CQEX", "WC", "CompChannel", "CqInitAttrEx", "PollCqAttr", "WcTmInfo", "cqe_flags_to_str",
    "cqe_opcode_to_str", "cqe_status_to_str", "create_wc_flags_to_str", "flags_to_str",
]  # fmt: skip
