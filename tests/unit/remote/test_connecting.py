"""A queue is connected beside the requests: a connect that hangs costs the first of them a moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from agent.remote import queue_slot
from agent.remote.channel import CONNECT_WAIT_SECONDS, WorkerChannel
from agent.remote.connect_attempt import ConnectAttempt
from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from agent.remote.queue_slot import SILENT_SECONDS, QueueSlot
from nvmeof.errors import ConnectionLost
from nvmeof.host.namespaces import NamespaceInfo
from nvmeof.transport import HostQueue
from nvmeof.transport.base import ControllerInfo

PATIENCE = 10.0


class FakeQueue:
    """A queue that only remembers how it ended."""

    alive = True
    needs_reconnect = False

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.registered = 0

    def register(self, buffer: memoryview) -> None:
        self.registered += 1

        self.since: float | None = None
        self.silent = True

    def oldest_abandoned(self) -> float | None:
        return self.since

    def silent_since(self) -> float | None:
        return self.since if self.silent else None

    def close(self) -> None:
        self.closed.set()


class FakeInfo:
    """As much of a controller as a channel looks at."""

    facts = SimpleNamespace(io_queues=8)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """A connect that waits for it hangs until the test lets go; no thread stays behind."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith("connect-"):
            thread.join(PATIENCE)


def test_a_queue_that_comes_too_late_is_closed(gate: threading.Event) -> None:
    queue = FakeQueue()

    def connect() -> HostQueue:
        gate.wait(PATIENCE)
        return cast(HostQueue, queue)

    connecting = ConnectAttempt(connect, "late")
    assert not connecting.wait(0.0)
    connecting.give_up()
    gate.set()
    assert queue.closed.wait(PATIENCE)
    assert connecting.queue is None


def test_a_try_that_fails_is_over_without_a_queue() -> None:
    def connect() -> HostQueue:
        raise ConnectionLost("nobody there")

    connecting = ConnectAttempt(connect, "refused")
    assert connecting.wait(PATIENCE)
    assert connecting.queue is None


def channel_of(enclosure: Enclosure) -> WorkerChannel:
    fabric = Fabric([enclosure])
    enclosure.namespaces = (NamespaceInfo(1, bytes(range(1, 17)), 1 << 20, 4096),)
    fabric.adopt([bytes(range(1, 17))])
    return WorkerChannel(fabric, 1)


def test_what_never_left_asked_nobody_for_bytes() -> None:
    """A get of the copy that is left would count twice over while an enclosure is away."""
    channel = channel_of(Enclosure("jbof-0"))
    assert channel.read(0, 0, channel.receive_buffer(4096)).unreachable
    assert channel.write(0, 0, [bytes(4096)]).unreachable
    assert channel.kv_retrieve(0, b"key", channel.receive_buffer(4096)).unreachable
    assert channel.kv_store(0, b"key", [bytes(4096)]).unreachable
    tally = channel.tallies[""]
    assert (tally.flash_bytes_read, tally.flash_bytes_written) == (0, 0)
    channel.close()


def test_a_hanging_connect_costs_one_request_a_moment(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def connect(*_: object) -> HostQueue:
        gate.wait(PATIENCE)
        made.append(FakeQueue())
        return cast(HostQueue, made[-1])

    monkeypatch.setattr(queue_slot, "connect_io_queue", connect)
    enclosure = Enclosure("jbof-0", cast(ControllerInfo, FakeInfo()), epoch=1)
    channel = channel_of(enclosure)
    buffer = channel.receive_buffer(4096)
    began = time.monotonic()
    first = channel.read(0, 0, buffer)
    assert time.monotonic() - began < CONNECT_WAIT_SECONDS + 1.0
    assert first.done
    assert first.unreachable
    began = time.monotonic()
    for _ in range(20):
        assert channel.read(0, 0, buffer).unreachable
    assert time.monotonic() - began < 1.0
    gate.set()
    channel.connect_ahead(PATIENCE)
    assert len(made) == 1, "one try, however many requests"
    assert made[0].registered == 2
    enclosure.epoch += 1
    channel.close()
    assert made[0].closed.is_set()


def test_a_queue_of_a_session_that_is_over_is_not_used(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = FakeQueue()

    def connect(*_: object) -> HostQueue:
        gate.wait(PATIENCE)
        return cast(HostQueue, queue)

    monkeypatch.setattr(queue_slot, "connect_io_queue", connect)
    enclosure = Enclosure("jbof-0", cast(ControllerInfo, FakeInfo()), epoch=1)
    channel = channel_of(enclosure)
    channel.connect_ahead(0.0)
    enclosure.epoch = 2
    gate.set()
    channel.connect_ahead(PATIENCE)
    assert queue.closed.wait(PATIENCE)
    channel.close()


def test_a_new_session_is_tried_at_once_after_a_try_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[HostQueue | None] = [None, cast(HostQueue, FakeQueue())]

    def connect(*_: object) -> HostQueue:
        queue = answers.pop(0)
        if queue is None:
            raise ConnectionLost("its port is down")
        return queue

    monkeypatch.setattr(queue_slot, "connect_io_queue", connect)
    enclosure = Enclosure("jbof-0", cast(ControllerInfo, FakeInfo()), epoch=1)
    channel = channel_of(enclosure)
    channel.connect_ahead(PATIENCE)
    channel.connect_ahead(PATIENCE)
    assert len(answers) == 1, "not again with the session that it failed with"
    enclosure.epoch = 2
    channel.connect_ahead(PATIENCE)
    assert not answers
    channel.close()


def test_a_try_of_an_old_session_holds_up_no_new_one(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = FakeQueue(), FakeQueue()

    def connect(session: ControllerInfo, *_: object) -> HostQueue:
        if session is first:
            gate.wait(PATIENCE)
        return cast(HostQueue, old if session is first else new)

    monkeypatch.setattr(queue_slot, "connect_io_queue", connect)
    first = cast(ControllerInfo, FakeInfo())
    enclosure = Enclosure("jbof-0", first, epoch=1)
    channel = channel_of(enclosure)
    channel.connect_ahead(0.0)
    enclosure.session, enclosure.epoch = cast(ControllerInfo, FakeInfo()), 2
    channel.connect_ahead(PATIENCE)
    assert new.registered == 2
    gate.set()
    assert old.closed.wait(PATIENCE)
    channel.close()


def test_a_queue_that_fell_silent_is_connected_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream is out of step; the session of the enclosure is not reset for it."""
    made: list[FakeQueue] = []

    def connect(*_: object) -> HostQueue:
        made.append(FakeQueue())
        return cast(HostQueue, made[-1])

    monkeypatch.setattr(queue_slot, "connect_io_queue", connect)
    enclosure = Enclosure("jbof-0", cast(ControllerInfo, FakeInfo()), epoch=1)
    channel = channel_of(enclosure)
    channel.connect_ahead(PATIENCE)
    (first,) = made
    first.since = time.monotonic() - SILENT_SECONDS / 2
    channel.connect_ahead(PATIENCE)
    assert made == [first], "not yet"
    first.since, first.silent = time.monotonic() - SILENT_SECONDS, False
    channel.connect_ahead(PATIENCE)
    assert made == [first], "it answers others"
    first.silent = True
    channel.connect_ahead(PATIENCE)
    assert first.closed.is_set()
    assert len(made) == 2
    assert enclosure.complaints == 0
    channel.close()


def test_without_a_thread_it_is_a_try_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    connecting = ConnectAttempt(lambda: pytest.fail("nobody connects"), "refused a thread")
    assert connecting.wait(0)
    assert connecting.queue is None


def test_steps_with_patience_wait_longer_for_their_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another request has waited for the same try in vain."""
    others_gave_up, queue = threading.Event(), FakeQueue()

    def connect(*_: object) -> HostQueue:
        others_gave_up.wait(PATIENCE)
        return cast(HostQueue, queue)

    monkeypatch.setattr(queue_slot, "connect_io_queue", connect)
    slot = QueueSlot(Enclosure("jbof-0", cast(ControllerInfo, FakeInfo()), epoch=1), 1, ())
    assert slot.take(time.monotonic(), 0.001) is None
    others_gave_up.set()
    assert slot.take(time.monotonic(), PATIENCE, again=True) is cast(HostQueue, queue)
    slot.close()
