"""The front-end's side of vhost-user, in QEMU's order. No I/O.

Source: QEMU's `docs/interop/vhost-user.rst`, and the order that QEMU 7.2 keeps. A conversation is a
generator: it yields `Outgoing` messages and is resumed with the `Incoming` answer, or None (connection.py
runs it).

One `FrontEnd` lives as long as its machine and sees several connections. After a device died, `starting`
tells the next one the same rings and the same inflight area; the successor answers the requests left there.
"""

import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from agent.bench.virtio_driver.guest_memory import GuestMemory
from agent.bench.virtio_driver.request_queue import RequestQueue
from agent.virtio.vhost_user import (
    REPLIES,
    U64,
    Feature,
    InflightArea,
    OneRegion,
    ProtocolFeature,
    Region,
    RegionTable,
    Request,
    VringAddress,
    VringFd,
    VringState,
    encode_message,
)

T = TypeVar("T")

FEATURES = Feature.VERSION_1 | Feature.PROTOCOL_FEATURES | Feature.RING_INDIRECT_DESC | Feature.RING_EVENT_IDX
PROTOCOL_FEATURES = (
    ProtocolFeature.MQ
    | ProtocolFeature.REPLY_ACK
    | ProtocolFeature.INFLIGHT_SHMFD
    | ProtocolFeature.CONFIGURE_MEM_SLOTS
)
"""What this front-end can do; the device's part of it is what holds."""


class BackEndFault(Exception):
    """The back-end's fault: it refused, offered too little, or answered nonsense."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message and the descriptors that ride beside it, which stay ours."""

    request: Request
    payload: bytes = b""
    descriptors: tuple[int, ...] = ()
    need_reply: bool = False

    @property
    def is_answered(self) -> bool:
        return self.need_reply or self.request in REPLIES

    def encode(self) -> bytes:
        return encode_message(self.request, self.payload, need_reply=self.need_reply)


@dataclass(frozen=True, slots=True)
class Incoming:
    """An answer; its descriptors belong to the caller that is resumed with it."""

    record: U64 | VringState | InflightArea
    descriptors: tuple[int, ...] = ()


Conversation: TypeAlias = Generator[Outgoing, "Incoming | None", T]


class FrontEnd:
    """What a machine tells its device. Queue 0 is the high-priority one, the others take requests.

    `features` and `protocol_features`: what may be agreed on. `inflight`: the area of the first device that
    offered one; it is kept over connections.
    """

    def __init__(
        self,
        memory: GuestMemory,
        queues: Sequence[RequestQueue],
        *,
        features: int = FEATURES,
        protocol_features: int = PROTOCOL_FEATURES,
    ) -> None:
        self._memory = memory
        self._queues = queues
        self._wished = features
        self._wished_protocol = protocol_features
        self._bases: dict[int, int] = {}
        self.features = 0
        self.protocol_features = 0
        self.queues_offered = 0
        self.inflight: tuple[InflightArea, int] | None = None

    def starting(self) -> Conversation[None]:
        """Everything up to enabled rings."""
        yield from self._agree()
        yield from self._name_fds()
        yield Outgoing(Request.SET_FEATURES, U64(self.features).encode())
        yield from self._share_inflight()
        yield from self._show_memory()
        for queue in self._queues:
            yield from self._set_up(queue)
        for queue in self._queues:
            yield self._acknowledged(Request.SET_VRING_ENABLE, VringState(queue.index, 1).encode())

    def stopping(self) -> Conversation[dict[int, int]]:
        """Disable and stop the rings, which a back-end does once it has answered what it took.

        Where each begins again, by its index.
        """
        for queue in self._queues:
            yield self._acknowledged(Request.SET_VRING_ENABLE, VringState(queue.index, 0).encode())
        for queue in self._queues:
            answer = yield Outgoing(Request.GET_VRING_BASE, VringState(queue.index, 0).encode())
            record = answer.record if answer is not None else None
            if not isinstance(record, VringState) or record.index != queue.index:
                raise BackEndFault(f"the base of ring {queue.index} came as {record}")
            self._bases[queue.index] = record.number
        return dict(self._bases)

    def close(self) -> None:
        if self.inflight is not None:
            os.close(self.inflight[1])
            self.inflight = None

    def has(self, feature: ProtocolFeature) -> bool:
        return bool(self.protocol_features & feature)

    # The parts, in their order.

    def _agree(self) -> Conversation[None]:
        offered = yield from _ask(Request.GET_FEATURES)
        if not offered & Feature.PROTOCOL_FEATURES or not offered & Feature.VERSION_1:
            raise BackEndFault(f"the back-end offers features {offered:#x}: no VERSION_1, or no protocol's")
        self.features = offered & self._wished
        for queue in self._queues:
            queue.ring.event_index = bool(self.features & Feature.RING_EVENT_IDX)
            queue.ring.indirect = bool(self.features & Feature.RING_INDIRECT_DESC)
        protocol = yield from _ask(Request.GET_PROTOCOL_FEATURES)
        self.protocol_features = protocol & self._wished_protocol
        yield Outgoing(Request.SET_PROTOCOL_FEATURES, U64(self.protocol_features).encode())
        if self.has(ProtocolFeature.MQ):
            self.queues_offered = yield from _ask(Request.GET_QUEUE_NUM)
            if self.queues_offered < len(self._queues):
                raise BackEndFault(f"the back-end has {self.queues_offered} queues, not {len(self._queues)}")
        if self.has(ProtocolFeature.CONFIGURE_MEM_SLOTS):
            slots = yield from _ask(Request.GET_MAX_MEM_SLOTS)
            if slots < len(self._memory.regions):
                raise BackEndFault(f"the back-end takes {slots} regions of memory")
        yield Outgoing(Request.SET_OWNER)

    def _name_fds(self) -> Conversation[None]:
        for queue in self._queues:
            word = VringFd(queue.index).encode()
            yield Outgoing(Request.SET_VRING_CALL, word, (queue.call,))
            yield Outgoing(Request.SET_VRING_ERR, word, (queue.error,))

    def _share_inflight(self) -> Conversation[None]:
        if not self.has(ProtocolFeature.INFLIGHT_SHMFD):
            return
        if self.inflight is None:
            size = max(queue.ring.size for queue in self._queues)
            wanted = InflightArea(0, 0, len(self._queues), size)
            answer = yield Outgoing(Request.GET_INFLIGHT_FD, wanted.encode())
            if answer is None or not isinstance(answer.record, InflightArea) or len(answer.descriptors) != 1:
                raise BackEndFault(f"no inflight area came, but {answer}")
            self.inflight = (answer.record, answer.descriptors[0])
        area, descriptor = self.inflight
        yield self._acknowledged(Request.SET_INFLIGHT_FD, area.encode(), descriptor)

    def _show_memory(self) -> Conversation[None]:
        kind = OneRegion if self.has(ProtocolFeature.CONFIGURE_MEM_SLOTS) else Region
        regions = [
            kind(region.guest_address, region.size, region.user_address, region.offset)
            for region in self._memory.regions
        ]
        descriptors = [region.descriptor for region in self._memory.regions]
        if kind is OneRegion:
            for region, descriptor in zip(regions, descriptors, strict=True):
                yield self._acknowledged(Request.ADD_MEM_REG, region.encode(), descriptor)
        else:
            table = RegionTable(tuple(regions)).encode()
            yield self._acknowledged(Request.SET_MEM_TABLE, table, *descriptors)

    def _set_up(self, queue: RequestQueue) -> Conversation[None]:
        index, ring, user = queue.index, queue.ring, self._memory.user_address
        # After a stop the back-end said where it was; after its death the used ring says how far it came.
        base = self._bases.pop(index, ring.used_index)
        places = VringAddress(
            index, 0, user(ring.table.address), user(ring.used.address), user(ring.available.address), 0
        )
        word = VringFd(index).encode()
        yield Outgoing(Request.SET_VRING_NUM, VringState(index, ring.size).encode())
        yield Outgoing(Request.SET_VRING_BASE, VringState(index, base).encode())
        yield Outgoing(Request.SET_VRING_ADDR, places.encode())
        yield Outgoing(Request.SET_VRING_CALL, word, (queue.call,))
        yield Outgoing(Request.SET_VRING_KICK, word, (queue.kick,))

    def _acknowledged(self, request: Request, payload: bytes, *descriptors: int) -> Outgoing:
        return Outgoing(request, payload, descriptors, need_reply=self.has(ProtocolFeature.REPLY_ACK))


def _ask(request: Request) -> Conversation[int]:
    answer = yield Outgoing(request)
    if answer is None or not isinstance(answer.record, U64):
        raise BackEndFault(f"{request.name} was answered with {answer}")
    return answer.record.value


def asking_for_queues() -> Conversation[int]:
    """How many queues a back-end has; a conversation for a connection that does nothing else."""
    yield from _ask(Request.GET_FEATURES)
    offered = yield from _ask(Request.GET_PROTOCOL_FEATURES)
    yield Outgoing(Request.SET_PROTOCOL_FEATURES, U64(offered & ProtocolFeature.MQ).encode())
    return (yield from _ask(Request.GET_QUEUE_NUM)) if offered & ProtocolFeature.MQ else 1


def check_acknowledged(message: Outgoing, answer: Incoming) -> None:
    """Raise BackEndFault where the answer to NEED_REPLY says that the message was refused."""
    if message.request in REPLIES:
        return
    if not isinstance(answer.record, U64) or answer.record.value:
        raise BackEndFault(f"{message.request.name} was refused: {answer.record}")
