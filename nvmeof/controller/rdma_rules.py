"""NVMe/RDMA rules of the controller role that need no state: settings, and whether a host is let in.

`rdma_queue.py` applies them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from nvmeof.controller.settings import ControllerSettings
from nvmeof.rdma.send_queue import SIGNAL_EVERY
from nvmeof.wire.rdma import ConnectRequest, RejectStatus, UnacceptableRequest

WORK_FOR_A_COMMAND: Final = 2
"""A READ and later a SEND, or a WRITE and a SEND; no more than two are out at any time."""


@dataclass(frozen=True, slots=True)
class RdmaSettings:
    """What is particular to RDMA.

    `in_capsule_bytes` of a write travel in the capsule on I/O queues, a multiple of 16; each queue has
    receives of that size for all its entries, so it is small. `max_reads` RDMA READs of one queue pair are
    out at a time (ORD), or fewer where the host takes no more (its IRD).
    """

    in_capsule_bytes: int = 4096
    max_queue_entries: int = 128
    max_reads: int = 16

    def __post_init__(self) -> None:
        if self.in_capsule_bytes % 16 or not 0 <= self.in_capsule_bytes <= 16 << 10:
            raise ValueError("in_capsule_bytes is a multiple of 16, at most 16 KiB")
        if not 32 <= self.max_queue_entries <= 1024:
            raise ValueError("max_queue_entries is between 32 and 1024")
        if not 1 <= self.max_reads <= 128:
            raise ValueError("max_reads is between 1 and 128")

    def narrow(self, settings: ControllerSettings) -> ControllerSettings:
        """The target's settings for a controller that is reached by RDMA."""
        return replace(
            settings,
            in_capsule_bytes=self.in_capsule_bytes,
            max_queue_entries=min(settings.max_queue_entries, self.max_queue_entries),
        )


def send_room(entries: int) -> int:
    """Work requests that the send queue of a controller must hold."""
    return max(4 * SIGNAL_EVERY, WORK_FOR_A_COMMAND * entries + SIGNAL_EVERY)


def judge_request(
    request: ConnectRequest, settings: RdmaSettings, *, max_io_queues: int, host_reads: int
) -> None:
    """Raise `UnacceptableRequest` for a connection that cannot be.

    `host_reads` are the responder resources of the host (IRD): with none we could read no data of a write.
    """
    if request.qid > max_io_queues:
        raise UnacceptableRequest(RejectStatus.INVALID_QUEUE_ID, f"queue {request.qid} of {max_io_queues}")
    if not 2 <= request.host_send_entries <= settings.max_queue_entries:
        raise UnacceptableRequest(
            RejectStatus.INVALID_HSQSIZE, f"a send queue of {request.host_send_entries} entries"
        )
    if request.host_receive_entries < 1:
        raise UnacceptableRequest(RejectStatus.INVALID_HRQSIZE, "a host without receives")
    if host_reads < 1:
        raise UnacceptableRequest(RejectStatus.INVALID_IRD, "a host that lets nothing be read")
