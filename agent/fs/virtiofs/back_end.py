"""The vhost-user protocol from the device's side: a message in, a reply and deeds out. No I/O.

Read agent/virtio/vhost_user.py first. `BackEnd` keeps the front-end's memory and queues, decides when a queue
may run, and answers. It acts through `Surroundings`. Every descriptor that comes with a message belongs to
the back-end, which hands it on or closes it.

A queue runs while it has a size and addresses, its kick descriptor has come, and it is enabled.
SET_VRING_ENABLE 0, GET_VRING_BASE and the end of the connection stop it. A breach of the protocol raises
`PeerError`: with NEED_REPLY the front-end gets a status that is not zero and may go on; without it the
connection is over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from agent.fs.virtiofs.device_queue import DeviceQueue
from agent.virtio import inflight
from agent.virtio.memory_table import REGIONS_MAX, AddressError, MappedRegion, MemoryTable
from agent.virtio.split_ring import (
    AVAILABLE_ALIGNMENT,
    DESCRIPTOR_ALIGNMENT,
    USED_ALIGNMENT,
    available_bytes,
    descriptors_bytes,
    is_queue_size,
    used_bytes,
)
from agent.virtio.vhost_user import (
    FDS_MAX,
    REPLIES,
    U64,
    Feature,
    Header,
    InflightArea,
    OneRegion,
    ProtocolFeature,
    Region,
    RegionTable,
    Request,
    VhostUserFormatError,
    VringAddress,
    VringFd,
    VringState,
    decode_payload_untrusted,
    encode_message,
)

QUEUE_SIZE_MAX = 1024
"""What QEMU gives at most (VIRTQUEUE_MAX_SIZE); 1 MiB of scattered pages and two headers take 258."""

FEATURES = Feature.VERSION_1 | Feature.RING_INDIRECT_DESC | Feature.RING_EVENT_IDX | Feature.PROTOCOL_FEATURES
PROTOCOL_FEATURES = (
    ProtocolFeature.MQ
    | ProtocolFeature.REPLY_ACK
    | ProtocolFeature.INFLIGHT_SHMFD
    | ProtocolFeature.RESET_DEVICE
    | ProtocolFeature.CONFIGURE_MEM_SLOTS
)
"""What we offer. Not offered, with the reason: LOG_SHMFD (a guest with open files is not migrated), CONFIG
(QEMU serves the tag itself), BACKEND_REQ (there is no DAX window to map into), STATUS (adds nothing here)."""


class PeerError(Exception):
    """The front-end's fault: it asked for what the protocol or our bounds forbid."""


class QueueSetup(NamedTuple):
    """All that a queue is started with. Descriptors stay the back-end's."""

    size: int
    base: int
    descriptors: memoryview
    available: memoryview
    used: memoryview
    kick: int
    features: Feature
    inflight_piece: memoryview | None

    def ring(self, memory: MemoryTable) -> DeviceQueue:
        """The device's side of it. Raises BadRing."""
        return DeviceQueue(
            self.size,
            self.base,
            self.descriptors,
            self.available,
            self.used,
            memory,
            event_idx=bool(self.features & Feature.RING_EVENT_IDX),
            indirect=bool(self.features & Feature.RING_INDIRECT_DESC),
            inflight_piece=self.inflight_piece,
        )


class Surroundings(Protocol):
    """What a back-end needs done. `PeerError` where the front-end is to blame for what cannot be."""

    def map_memory(self, fd: int, offset: int, size: int) -> memoryview:
        """`size` writable bytes of a descriptor from `offset` on; the descriptor may be closed after it."""

    def make_memory(self, size: int) -> int:
        """A descriptor of that many bytes of zeros, for the front-end to keep."""

    def close_fd(self, fd: int) -> None: ...

    def check_event(self, fd: int) -> None:
        """Raises PeerError unless it is an eventfd: anything else may block or never be still."""

    def use_call(self, index: int, fd: int | None) -> None:
        """From now on the driver of a queue is called through this descriptor; None: not at all."""

    def memory_changed(self, memory: MemoryTable) -> None: ...

    def start(self, index: int, setup: QueueSetup, memory: MemoryTable) -> None: ...

    def stop(self, index: int) -> int | None:
        """End a queue's thread; the available idx to go on from, None where it did not run."""

    def end_session(self) -> None:
        """The guest began anew: what it had looked up and opened is void."""


@dataclass(slots=True)
class _Queue:
    size: int = 0
    base: int = 0
    addresses: VringAddress | None = None
    kick: int | None = None
    enabled: bool = False
    running: bool = False


@dataclass(slots=True)
class Reply:
    """What goes back: bytes, and a descriptor to go along, which is closed after it was sent."""

    data: bytes = b""
    fd: int | None = None


@dataclass(slots=True)
class _State:
    features: Feature = field(default_factory=lambda: Feature(0))
    protocol: ProtocolFeature = field(default_factory=lambda: ProtocolFeature(0))
    memory: MemoryTable = field(default_factory=MemoryTable)
    inflight: memoryview | None = None
    inflight_area: InflightArea | None = None


class BackEnd:
    """One connection of a front-end. Not shared between threads."""

    def __init__(self, queue_count: int, surroundings: Surroundings) -> None:
        """`queue_count` counts all queues, the high-priority one (0) included."""
        self._surroundings = surroundings
        self._queues = [_Queue() for _ in range(queue_count)]
        self._state = _State()
        told = {
            Request.GET_FEATURES: FEATURES,
            Request.GET_PROTOCOL_FEATURES: PROTOCOL_FEATURES,
            Request.GET_QUEUE_NUM: queue_count,
            Request.GET_MAX_MEM_SLOTS: REGIONS_MAX,
        }
        self._handlers: dict[Request, Callable[..., Reply | None]] = {
            **{request: self._teller(request, value) for request, value in told.items()},
            Request.SET_OWNER: self._nothing,
            Request.RESET_OWNER: self._nothing,
        }
        for request in Request:
            # Any other request is served by the method of its name.
            if handler := getattr(self, f"_{request.name.lower()}", None):
                self._handlers[request] = handler

    @property
    def can_reconnect(self) -> bool:
        """The front-end keeps what is in flight, so it may come back and go on where it was."""
        return self._state.inflight is not None

    @property
    def running(self) -> list[int]:
        return [index for index, queue in enumerate(self._queues) if queue.running]

    def handle(self, header: Header, payload: bytes, fds: Sequence[int]) -> Reply | None:
        """Serve one message. Raises PeerError where the connection cannot go on.

        The descriptors are used or closed when it returns, whichever way.
        """
        left = list(fds)
        try:
            reply = self._dispatch(header, payload, left)
        except PeerError:
            if not self._acknowledges(header):
                raise
            return Reply(encode_message(header.request, U64(1).encode(), reply=True))
        finally:
            for fd in left:
                self._surroundings.close_fd(fd)
        if reply is None and self._acknowledges(header):
            return Reply(encode_message(header.request, U64(0).encode(), reply=True))
        return reply

    def _acknowledges(self, header: Header) -> bool:
        return (
            header.needs_reply
            and bool(self._state.protocol & ProtocolFeature.REPLY_ACK)
            and header.request not in REPLIES
        )

    def _dispatch(self, header: Header, payload: bytes, fds: list[int]) -> Reply | None:
        if header.is_reply:
            raise PeerError("a reply to nothing that we asked")
        handler = self._handlers.get(header.request)  # type: ignore[call-overload]
        if handler is None:
            raise PeerError(f"request {header.request}, which we have not offered to serve")
        if len(fds) > FDS_MAX.get(header.request, 0):  # type: ignore[call-overload]
            raise PeerError(f"{len(fds)} descriptors with {Request(header.request).name}")
        try:
            message = decode_payload_untrusted(header.request, payload)
        except VhostUserFormatError as broken:
            raise PeerError(f"{Request(header.request).name}: {broken}") from None
        try:
            answer: Reply | None = handler(message, fds)
        except AddressError as outside:
            raise PeerError(f"{Request(header.request).name}: {outside}") from None
        return answer

    def end(self) -> None:
        """The connection is over: stop what runs and let go of all that it had brought."""
        for index, queue in enumerate(self._queues):
            self._stop(index)
            self._take_kick(queue, None)
            self._surroundings.use_call(index, None)
        self._state = _State()

    def _teller(self, request: Request, value: int) -> Callable[[object, list[int]], Reply]:
        return lambda _message, _fds: _answer(request, U64(value))

    def _nothing(self, message: object, fds: list[int]) -> None:
        return None

    def _set_features(self, message: U64, fds: list[int]) -> None:
        if message.value & ~FEATURES:
            raise PeerError(f"features {message.value:#x} that were not offered")
        self._state.features = Feature(message.value)

    def _set_protocol_features(self, message: U64, fds: list[int]) -> None:
        if message.value & ~PROTOCOL_FEATURES:
            raise PeerError(f"protocol features {message.value:#x} that were not offered")
        self._state.protocol = ProtocolFeature(message.value)

    def _mapped(self, region: Region, fd: int) -> MappedRegion:
        return MappedRegion(region, self._surroundings.map_memory(fd, region.mmap_offset, region.size))

    def _use_memory(self, memory: MemoryTable) -> None:
        self._state.memory = memory
        self._surroundings.memory_changed(memory)

    def _set_mem_table(self, message: RegionTable, fds: list[int]) -> None:
        if len(fds) != len(message.regions):
            raise PeerError(f"{len(message.regions)} regions with {len(fds)} descriptors")
        pairs = zip(message.regions, fds, strict=True)
        self._use_memory(MemoryTable([self._mapped(region, fd) for region, fd in pairs]))

    def _add_mem_reg(self, message: OneRegion, fds: list[int]) -> None:
        if not fds:
            raise PeerError("a region without a descriptor")
        self._use_memory(self._state.memory.with_region(self._mapped(message, fds[0])))

    def _rem_mem_reg(self, message: OneRegion, fds: list[int]) -> None:
        self._use_memory(self._state.memory.without_region(message))

    def _queue(self, index: int) -> _Queue:
        if index >= len(self._queues):
            raise PeerError(f"queue {index} of {len(self._queues)}")
        return self._queues[index]

    def _idle_queue(self, index: int) -> _Queue:
        queue = self._queue(index)
        if queue.running:
            raise PeerError(f"queue {index} is changed while it runs")
        return queue

    def _set_vring_num(self, message: VringState, fds: list[int]) -> None:
        queue = self._idle_queue(message.index)
        if not is_queue_size(message.number) or message.number > QUEUE_SIZE_MAX:
            raise PeerError(f"a ring of {message.number} descriptors")
        queue.size = message.number

    def _set_vring_addr(self, message: VringAddress, fds: list[int]) -> None:
        # QEMU tells the addresses again of a queue that runs, to switch logging, which we don't offer.
        queue = self._queue(message.index)
        if message.flags:
            raise PeerError("a ring with a dirty log, which was not offered")
        if (
            message.descriptors % DESCRIPTOR_ALIGNMENT
            or message.available % AVAILABLE_ALIGNMENT
            or message.used % USED_ALIGNMENT
        ):
            raise PeerError("a ring that is not aligned")
        if queue.running and queue.addresses != message:
            raise PeerError(f"queue {message.index} is moved while it runs")
        queue.addresses = message

    def _set_vring_base(self, message: VringState, fds: list[int]) -> None:
        if message.number > 0xFFFF:
            raise PeerError(f"an available idx of {message.number}")
        self._idle_queue(message.index).base = message.number

    def _get_vring_base(self, message: VringState, fds: list[int]) -> Reply:
        queue = self._queue(message.index)
        self._stop(message.index)
        self._take_kick(queue, None)
        self._surroundings.use_call(message.index, None)
        return _answer(Request.GET_VRING_BASE, VringState(message.index, queue.base))

    def _event_of(self, message: VringFd, fds: list[int]) -> int | None:
        if message.has_fd != bool(fds):
            raise PeerError("a descriptor that is missing or was not announced")
        if not fds:
            return None
        self._surroundings.check_event(fds[0])
        return fds[0]

    def _take_kick(self, queue: _Queue, fd: int | None) -> None:
        if queue.kick is not None:
            self._surroundings.close_fd(queue.kick)
        queue.kick = fd

    def _set_vring_kick(self, message: VringFd, fds: list[int]) -> None:
        queue = self._queue(message.index)
        event = self._event_of(message, fds)
        if event is None:
            raise PeerError("a queue that is to be polled; ours sleep until they are kicked")
        self._stop(message.index)
        fds.clear()
        self._take_kick(queue, event)
        if not self._state.features & Feature.PROTOCOL_FEATURES:
            queue.enabled = True
        self._start_if_ready(message.index)

    def _set_vring_call(self, message: VringFd, fds: list[int]) -> None:
        self._queue(message.index)
        self._surroundings.use_call(message.index, self._event_of(message, fds))

    def _set_vring_err(self, message: VringFd, fds: list[int]) -> None:
        # A ring that is broken is told in our log; QEMU does nothing with this event.
        self._queue(message.index)

    def _set_vring_enable(self, message: VringState, fds: list[int]) -> None:
        queue = self._queue(message.index)
        if message.number > 1:
            raise PeerError(f"a queue that is {message.number} enabled")
        queue.enabled = bool(message.number)
        if queue.enabled:
            self._start_if_ready(message.index)
        else:
            self._stop(message.index)

    def _stop(self, index: int) -> None:
        queue = self._queues[index]
        if queue.running:
            queue.running = False
            base = self._surroundings.stop(index)
            if base is not None:
                queue.base = base

    def _start_if_ready(self, index: int) -> None:
        queue, state = self._queues[index], self._state
        addresses = queue.addresses
        if queue.running or not queue.enabled or queue.kick is None or not queue.size or addresses is None:
            return
        if not state.features & Feature.VERSION_1:
            raise PeerError("a driver that is not of virtio 1")
        memory, size = state.memory, queue.size
        setup = QueueSetup(
            size,
            queue.base,
            memory.user_view(addresses.descriptors, descriptors_bytes(size)),
            memory.user_view(addresses.available, available_bytes(size)),
            memory.user_view(addresses.used, used_bytes(size)),
            queue.kick,
            state.features,
            self._inflight_piece(index, size),
        )
        self._surroundings.start(index, setup, memory)
        queue.running = True

    def _get_inflight_fd(self, message: InflightArea, fds: list[int]) -> Reply:
        self._check_inflight(message)
        size = message.queues * inflight.queue_bytes(message.queue_size)
        area = InflightArea(size, 0, message.queues, message.queue_size)
        data = encode_message(Request.GET_INFLIGHT_FD, area.encode(), reply=True)
        return Reply(data, self._surroundings.make_memory(size))

    def _set_inflight_fd(self, message: InflightArea, fds: list[int]) -> None:
        self._check_inflight(message)
        if not fds:
            raise PeerError("an inflight area without a descriptor")
        if self.running:
            raise PeerError("an inflight area while queues run")
        if message.mmap_size < message.queues * inflight.queue_bytes(message.queue_size):
            raise PeerError(f"an inflight area of {message.mmap_size} bytes")
        state = self._state
        state.inflight = self._surroundings.map_memory(fds[0], message.mmap_offset, message.mmap_size)
        state.inflight_area = message

    def _check_inflight(self, message: InflightArea) -> None:
        if not 0 < message.queues <= len(self._queues):
            raise PeerError(f"an inflight area of {message.queues} queues")
        if not is_queue_size(message.queue_size) or message.queue_size > QUEUE_SIZE_MAX:
            raise PeerError(f"an inflight area of rings of {message.queue_size}")
        if message.mmap_offset % inflight.ALIGNMENT:
            raise PeerError("an inflight area that is not aligned")

    def _inflight_piece(self, index: int, size: int) -> memoryview | None:
        whole, area = self._state.inflight, self._state.inflight_area
        if whole is None or area is None:
            return None
        if index >= area.queues or size > area.queue_size:
            raise PeerError("a queue that the inflight area has no room for")
        start = index * inflight.queue_bytes(area.queue_size)
        return whole[start : start + inflight.queue_bytes(size)]

    def _reset_device(self, message: object, fds: list[int]) -> None:
        for index, queue in enumerate(self._queues):
            self._stop(index)
            queue.enabled = False
            queue.base = 0
        self._surroundings.end_session()


def _answer(request: Request, payload: U64 | VringState) -> Reply:
    return Reply(encode_message(request, payload.encode(), reply=True))
