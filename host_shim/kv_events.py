"""Events for routers: which blocks a connector has stored, and which it found gone.

A router follows them to know where a prefix may be. They are hints, as its whole index is, so nothing here
waits and nothing raises: events wait in a bounded queue, and beyond it they are lost and counted. A block is
told of once, and as gone only where it was told of before, by a memory of keys that is bounded as well.

How events go out is the engine's matter. vLLM takes them (`KvEvents.take`). For the others an `EventStream`
hands them to a publisher on a thread of its own: SGLang's, or the `ZmqPublisher` below, which speaks vLLM's
form. There a lost event is a number that the sequence of messages leaves out.
"""

import importlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

_log = logging.getLogger(__name__)

WAITING_MAX = 65_536
"""Blocks whose events wait to be taken; each costs some hundred bytes."""
KNOWN_MAX = 65_536
"""Blocks that are remembered as told of."""
GATHER_SECONDS = 0.05
"""How long a stream gathers events for one message."""
BATCH_MAX = 4096
"""Blocks of one message."""
HWM = 1000
"""Messages that wait for one subscriber."""
CLOSE_SECONDS = 1.0
WARN_AGAIN_SECONDS = 60.0


class Told(NamedTuple):
    """One event: blocks that were stored, or that are gone."""

    removed: bool
    keys: list[Any]


class KvEvents:
    """The queue of one connector. Any thread; no call waits."""

    def __init__(self, waiting_max: int = WAITING_MAX, known_max: int = KNOWN_MAX) -> None:
        self._waiting_max, self._known_max = waiting_max, known_max
        self._waiting: deque[tuple[bool, Hashable]] = deque()
        self._known: OrderedDict[Hashable, None] = OrderedDict()
        self._lost = 0
        self.lost = 0
        """Events that found no room, since the start."""
        self.count = 0
        """Events that found room."""
        self.changed = threading.Condition()

    def stored(self, keys: Sequence[Hashable]) -> None:
        """These blocks are in the pool now."""
        with self.changed:
            for key in keys:
                if key in self._known:
                    self._known.move_to_end(key)
                    continue
                self._known[key] = None
                self._add(False, key)
            while len(self._known) > self._known_max:
                self._known.popitem(last=False)
            self.changed.notify()

    def gone(self, keys: Sequence[Hashable]) -> None:
        """These blocks are not in the pool. Nobody is told who was not told of them."""
        with self.changed:
            for key in keys:
                if key in self._known:
                    del self._known[key]
                    self._add(True, key)
            self.changed.notify()

    def _add(self, removed: bool, key: Hashable) -> None:
        if len(self._waiting) >= self._waiting_max:
            self._lost += 1
            self.lost += 1
            return
        self._waiting.append((removed, key))
        self.count += 1

    def take(self, most: int = BATCH_MAX) -> tuple[list[Told], int]:
        """The oldest events, of `most` blocks at the most, in their order; and how many were lost since the
        last call."""
        told: list[Told] = []
        with self.changed:
            for _ in range(min(most, len(self._waiting))):
                removed, key = self._waiting.popleft()
                if not told or told[-1].removed is not removed:
                    told.append(Told(removed, []))
                told[-1].keys.append(key)
            lost, self._lost = self._lost, 0
        return told, lost

    def __len__(self) -> int:
        return len(self._waiting)


class Publisher(Protocol):
    """What sends events; called by the thread of an `EventStream` alone."""

    def publish(self, told: Sequence[Told]) -> None:
        """Send one message."""

    def skip(self, count: int) -> None:
        """Leave so many numbers out of the sequence: so many events are lost."""

    def close(self) -> None: ...


class EventStream:
    """A thread that hands events to a publisher."""

    def __init__(
        self,
        events: KvEvents,
        publisher: Publisher,
        gather_seconds: float = GATHER_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._events, self._publisher = events, publisher
        self._gather_seconds = gather_seconds
        self._clock = clock
        self._closed = threading.Event()
        self._warn_again_at = float("-inf")
        self._thread = threading.Thread(target=self._serve, name="g35-events", daemon=True)
        self._thread.start()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Send what waits, and end; a thread that a publisher holds is left to its fate."""
        self._closed.set()
        with self._events.changed:
            self._events.changed.notify_all()
        self._thread.join(seconds)

    def _serve(self) -> None:
        try:
            while True:
                with self._events.changed:
                    while not len(self._events) and not self._closed.is_set():
                        self._events.changed.wait()
                if not len(self._events) and self._closed.is_set():
                    return
                self._closed.wait(self._gather_seconds)
                self._send()
        finally:
            self._publisher.close()

    def _send(self) -> None:
        told, lost = self._events.take()
        try:
            if lost:
                self._publisher.skip(lost)
            if told:
                self._publisher.publish(told)
        except Exception:
            now = self._clock()
            if now >= self._warn_again_at:
                self._warn_again_at = now + WARN_AGAIN_SECONDS
                _log.exception("events of the g35 connector could not be published")
            self._closed.wait(self._gather_seconds)


class ZmqPublisher:
    """Publishes on a ZeroMQ PUB socket, in the form of vLLM's own publisher.

    A message has three frames: the topic, a sequence number of 8 bytes, big-endian, and a batch in msgpack.
    A subscriber that does not read loses messages beyond `hwm`, and sees the numbers that it did not get.
    """

    def __init__(
        self,
        endpoint: str,
        topic: str = "",
        hwm: int = HWM,
        block_size: int = 0,
        medium: str = "STORAGE",
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`hwm`: messages that wait for one subscriber. Raises ValueError where it cannot be had."""
        try:
            self._zmq: Any = importlib.import_module("zmq")
            self._encode: Any = importlib.import_module("msgspec").msgpack.Encoder().encode
        except ImportError as absent:
            raise ValueError(
                f"g35: events want the package {absent.name}, which this interpreter does not have: "
                "install pyzmq and msgspec beside the engine, or leave the option out"
            ) from None
        self._topic = topic.encode()
        self._block_size = block_size
        self._medium = medium
        self._wall = wall
        self._sequence = 0
        socket = self._zmq.Context.instance().socket(self._zmq.PUB)
        socket.set_hwm(hwm)
        socket.setsockopt(self._zmq.LINGER, 0)
        try:
            # As the engines have it: a wildcard is bound, anything else is a subscriber's address.
            if any(mark in endpoint for mark in ("*", "::", "ipc://", "inproc://")):
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except self._zmq.ZMQError as refused:
            socket.close()
            raise ValueError(f"g35: events cannot be published at {endpoint}: {refused}") from None
        self._socket = socket

    def publish(self, told: Sequence[Told]) -> None:
        """Send one message; it is lost for a subscriber that has too many waiting."""
        # As msgspec writes vLLM's structures: a batch is an array that ends in the data-parallel rank.
        batch = (self._wall(), [self._event(each) for each in told], 0)
        number = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._socket.send_multipart((self._topic, number, self._encode(batch)), self._zmq.NOBLOCK)

    def _event(self, told: Told) -> dict[str, Any]:
        if told.removed:
            return {"type": "BlockRemoved", "block_hashes": told.keys, "medium": self._medium}
        return {
            "type": "BlockStored",
            "block_hashes": told.keys,
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": self._block_size,
            "lora_id": None,
            "medium": self._medium,
            "lora_name": None,
        }

    def skip(self, count: int) -> None:
        self._sequence += count

    def close(self) -> None:
        self._socket.close()
