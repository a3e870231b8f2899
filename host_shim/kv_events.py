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
NOTED_MAX = 256
"""Calls that are noted and not looked at yet, and blocks of each of them."""
GATHER_SECONDS = 0.1
"""How long a stream gathers events for one message."""
BATCH_MAX = 4096
"""Blocks of one message."""
HWM = 1000
"""Messages that wait for one subscriber."""
CLOSE_SECONDS = 1.0
NOBODY_SECONDS = 10.0
"""So long after its start a publisher that connects says that nobody is there."""
WARN_AGAIN_SECONDS = 60.0


class Told(NamedTuple):
    """One event: blocks that were stored, or that are gone."""

    removed: bool
    keys: list[Any]


class KvEvents:
    """The queue of one connector. Any thread; no call but `wait` waits.

    Who stores a block notes the call and no more: an engine's thread comes here with cold caches, and looks
    cost it ten times what they cost who looks at many blocks at once. `take` does so, or every
    `NOTED_MAX` calls who notes the last of them.
    """

    def __init__(self, waiting_max: int = WAITING_MAX, known_max: int = KNOWN_MAX) -> None:
        self._waiting_max, self._known_max = waiting_max, known_max
        self._noted: deque[tuple[bool, list[Hashable]]] = deque()
        """Calls in their order that nobody has looked at: whether blocks are gone, and which."""
        self._waiting: deque[Told] = deque()
        self._count_waiting = 0
        self._known: OrderedDict[Hashable, None] = OrderedDict()
        self._untold_lost = 0
        self._lost = 0
        self._count = 0
        self._lock = threading.Lock()
        """Guards all but `_noted`, whose single calls are safe from any thread."""
        self._bell = threading.Lock()
        """Let go of where there may be something to take. A condition costs each call four more calls."""
        self._bell.acquire()

    @property
    def lost(self) -> int:
        """Events that found no room, since the start."""
        with self._lock:
            self._look()
            return self._lost

    @property
    def count(self) -> int:
        """Events that found room."""
        with self._lock:
            self._look()
            return self._count

    def __len__(self) -> int:
        with self._lock:
            self._look()
            return self._count_waiting

    def stored(self, keys: Sequence[Hashable]) -> None:
        self._note(False, list(keys))

    def gone(self, keys: Sequence[Hashable]) -> None:
        """These blocks are not in the pool. Nobody is told who was not told of them."""
        self._note(True, list(keys))

    def _note(self, removed: bool, keys: list[Hashable]) -> None:
        self._noted.append((removed, keys))
        if self._bell.locked():
            self.ring()
        if len(self._noted) >= NOTED_MAX or len(keys) >= NOTED_MAX:
            with self._lock:
                self._look()

    def _look(self) -> None:
        """Make events of the calls that were noted."""
        known = self._known
        while self._noted:
            removed, keys = self._noted.popleft()
            fresh = []
            for key in keys:
                if key in known:
                    if removed:
                        del known[key]
                        fresh.append(key)
                    else:
                        known.move_to_end(key)
                elif not removed:
                    known[key] = None
                    fresh.append(key)
            while len(known) > self._known_max:
                known.popitem(last=False)
            self._add(removed, fresh)

    def _add(self, removed: bool, keys: list[Any]) -> None:
        beyond = self._count_waiting + len(keys) - self._waiting_max
        if beyond > 0:
            self._untold_lost += beyond
            self._lost += beyond
            del keys[len(keys) - beyond :]
        if not keys:
            return
        self._count_waiting += len(keys)
        self._count += len(keys)
        if self._waiting and self._waiting[-1].removed is removed:
            self._waiting[-1].keys.extend(keys)
        else:
            self._waiting.append(Told(removed, keys))

    def take(self, most: int = BATCH_MAX) -> tuple[list[Told], int]:
        """The oldest events, of `most` blocks at the most, in their order; and how many were lost since the
        last call."""
        told: list[Told] = []
        # First: a call that is noted while we look rings again.
        self._bell.acquire(blocking=False)
        with self._lock:
            self._look()
            left = min(most, self._count_waiting)
            self._count_waiting -= left
            while left:
                told.append(self._waiting.popleft())
                removed, keys = told[-1]
                if len(keys) > left:
                    self._waiting.appendleft(Told(removed, keys[left:]))
                    del keys[left:]
                left -= len(keys)
            lost, self._untold_lost = self._untold_lost, 0
        return told, lost

    def wait(self) -> None:
        """Until there may be something to take, or `ring` was called; for one thread, which takes all."""
        self._bell.acquire()

    def ring(self) -> None:
        with self._lock:
            if self._bell.locked():
                self._bell.release()


class Publisher(Protocol):
    """Sends events. Only the thread of an `EventStream` calls it."""

    def publish(self, told: Sequence[Told]) -> None:
        """Send one message."""

    def skip(self, count: int) -> None:
        """Leave so many numbers out of the sequence: so many events are lost."""

    def close(self) -> None: ...


class EventStream:
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
        self._is_closed = False
        self._closing = threading.Lock()
        """Held until `close`, so that a pause ends there."""
        self._closing.acquire()
        self._warn_again_at = float("-inf")
        self._thread = threading.Thread(target=self._serve, name="g35-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what waits, and end; a thread that a publisher holds is left to its fate."""
        if not self._is_closed:
            self._is_closed = True
            self._closing.release()
        self._events.ring()
        self._thread.join(CLOSE_SECONDS)

    def _serve(self) -> None:
        try:
            sent = 0
            while not self._is_closed:
                # While events flow, the thread wakes by the clock alone, once for each message.
                if not sent:
                    self._events.wait()
                self._pause()
                sent = most = self._send()
                while most == BATCH_MAX:
                    most = self._send()
            while self._send():
                pass
        finally:
            self._publisher.close()

    def _pause(self) -> None:
        if self._closing.acquire(timeout=self._gather_seconds):
            self._closing.release()

    def _send(self) -> int:
        """Send the oldest events; of how many blocks they were."""
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
        return sum(len(each.keys) for each in told)


class ZmqPublisher:
    """Publishes on a ZeroMQ PUB socket, in the form of vLLM's own publisher.

    A message has three frames: the topic, a sequence number of 8 bytes, big-endian, and a batch in msgpack.
    A subscriber that does not read loses messages beyond `hwm`, and sees the numbers that it did not get.
    An endpoint without a wildcard is an address to connect to, which is no error where nobody is there: it is
    said once.
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
        self._endpoint = endpoint
        self._since = time.monotonic()
        self._connections: Any = None
        """Tells of the first connection, where this side connects; None: that is settled."""
        try:
            # As the engines have it: a wildcard is bound, anything else is a subscriber's address.
            if any(mark in endpoint for mark in ("*", "::", "ipc://", "inproc://")):
                socket.bind(endpoint)
            else:
                # Before it connects, or a quick subscriber would go unseen.
                self._connections = socket.get_monitor_socket(self._zmq.EVENT_CONNECTED)
                socket.connect(endpoint)
        except self._zmq.ZMQError as refused:
            self._socket = socket
            self.close()
            raise ValueError(f"g35: events cannot be published at {endpoint}: {refused}") from None
        self._socket = socket
        self._send: Any = socket.send
        self._more = self._zmq.NOBLOCK | self._zmq.SNDMORE

    def publish(self, told: Sequence[Told]) -> None:
        """Send one message; it is lost for a subscriber that has too many waiting."""
        # As msgspec writes vLLM's structures: a batch is an array that ends in the data-parallel rank.
        if self._connections is not None:
            self._look_for_somebody()
        batch = (self._wall(), [self._event(each) for each in told], 0)
        number = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        # Frame by frame: `send_multipart` looks at each frame's type first. Only the first can be refused.
        self._send(self._topic, self._more)
        self._send(number, self._more)
        self._send(self._encode(batch), self._zmq.NOBLOCK)

    def _look_for_somebody(self) -> None:
        """Whether the address that this side connects to has answered; it is said once where it has not."""
        if not self._connections.poll(0):
            if time.monotonic() - self._since < NOBODY_SECONDS:
                return
            _log.warning(
                "g35: events: nobody is at %s, which this side connects to; to have subscribers connect "
                "here, give a wildcard, such as tcp://*:5558",
                self._endpoint,
            )
        self._stop_looking()

    def _stop_looking(self) -> None:
        connections, self._connections = self._connections, None
        if connections is not None:
            self._socket.disable_monitor()
            connections.close(0)

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
        self._stop_looking()
        self._socket.close()
