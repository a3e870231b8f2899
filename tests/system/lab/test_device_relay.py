"""The relay between QEMU and the agent's device, with a scripted front-end and scripted agents."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from emulator.lab import device_relay, device_socket
from emulator.lab.device_relay import DeviceRelay
from emulator.lab.device_socket import NoDeviceError
from emulator.lab.vhost_messages import (
    FLAG_NEED_REPLY,
    INFLIGHT,
    PROTOCOL_INFLIGHT,
    PROTOCOL_REPLY_ACK,
    REGION,
    U64,
    VERSION,
    VRING_ADDRESSES,
    VRING_STATE,
    Message,
    Request,
    answer_to,
    receive_message,
    send_message,
)
from tests.support.waiting import wait_until

FEATURES = 0x170000000
PROTOCOL = PROTOCOL_REPLY_ACK | PROTOCOL_INFLIGHT | 1
RINGS = 3
QUEUE_SIZE = 128
GUEST_BYTES = 1 << 20
USER_ADDRESS = 0x7F0000000000
USED_AT = 8192


class ScriptedAgent:
    """A back-end that answers as it must, and keeps what it was told."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._path = path
        self.connection: socket.socket | None = None
        self.heard: list[Message] = []

    def accept(self) -> None:
        self._listener.settimeout(10)
        self.connection, _ = self._listener.accept()
        self.connection.settimeout(10)

    def serve(self, until: Request, count: int = 1) -> None:
        """Answer until `count` messages of a kind have been heard."""
        assert self.connection is not None
        before = len(self.named(until))
        while len(self.named(until)) < before + count:
            message = receive_message(self.connection)
            assert message is not None
            self.heard.append(message)
            if message.wants_answer:
                send_message(self.connection, self._answer(message))

    def named(self, request: Request) -> list[Message]:
        return [message for message in self.heard if message.request == request]

    def die(self) -> None:
        assert self.connection is not None
        self.connection.close()
        self._listener.close()
        self._path.unlink()
        for message in self.heard:
            message.close()

    def _answer(self, message: Message) -> Message:
        if message.request == Request.GET_INFLIGHT_FD:
            area = os.memfd_create("inflight")
            os.ftruncate(area, 4096)
            os.pwrite(area, b"in flight", 0)
            payload = INFLIGHT.pack(4096, 0, *INFLIGHT.unpack(message.payload)[2:])
            answer = answer_to(message, payload, [area])
            self.heard.append(Message(message.request, payload, (area,)))
            return answer
        values = {
            Request.GET_FEATURES: FEATURES,
            Request.GET_PROTOCOL_FEATURES: PROTOCOL,
            Request.GET_QUEUE_NUM: RINGS,
        }
        if message.request == Request.GET_VRING_BASE:
            return answer_to(message, VRING_STATE.pack(message.payload[0], 77))
        return answer_to(message, U64.pack(values.get(Request(message.request), 0)))


class FrontEnd:
    """QEMU's end: memory, one ring, and what is asked of the back-end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(10)
        self.memory_file = os.memfd_create("guest")
        os.ftruncate(self.memory_file, GUEST_BYTES)
        self.memory = mmap.mmap(self.memory_file, GUEST_BYTES)
        self.kick, self.call = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)

    def say(self, request: Request, payload: bytes = b"", *descriptors: int, ack: bool = False) -> None:
        flags = VERSION | (FLAG_NEED_REPLY if ack else 0)
        send_message(self.connection, Message(request, payload, descriptors, flags))

    def answer(self) -> Message:
        found = receive_message(self.connection)
        assert found is not None
        return found

    def set_up(self) -> None:
        """As far as a ring that runs; nothing in here waits for an answer."""
        self.say(Request.SET_PROTOCOL_FEATURES, U64.pack(PROTOCOL))
        self.say(Request.SET_OWNER)
        self.say(Request.SET_FEATURES, U64.pack(FEATURES))
        region = REGION.pack(0, GUEST_BYTES, USER_ADDRESS, 0)
        self.say(Request.ADD_MEM_REG, bytes(8) + region, self.memory_file)
        self.say(Request.SET_VRING_NUM, VRING_STATE.pack(0, QUEUE_SIZE))
        self.say(Request.SET_VRING_BASE, VRING_STATE.pack(0, 0))
        addresses = VRING_ADDRESSES.pack(0, 0, USER_ADDRESS, USER_ADDRESS + USED_AT, USER_ADDRESS + 4096, 0)
        self.say(Request.SET_VRING_ADDR, addresses)
        self.say(Request.SET_VRING_CALL, U64.pack(0), self.call)
        self.say(Request.SET_VRING_KICK, U64.pack(0), self.kick)
        self.say(Request.SET_VRING_ENABLE, VRING_STATE.pack(0, 1))

    def close(self) -> None:
        self.connection.close()
        self.memory.close()
        for descriptor in (self.memory_file, self.kick, self.call):
            os.close(descriptor)


class Stage:
    """A relay with both its ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told: list[str] = []
        self.agent = ScriptedAgent(path)

        # The relay asks as it is made, and the agent's answers are waiting by then.
        def first_words() -> None:
            self.agent.accept()
            self.agent.serve(Request.GET_QUEUE_NUM)

        helper = threading.Thread(target=first_words)
        helper.start()
        self.relay = DeviceRelay(path, request_queues=8, queue_size=QUEUE_SIZE, tell=self.told.append)
        helper.join()
        self.qemu = FrontEnd(self.relay.qemu_end)

    def close(self) -> None:
        self.relay.close()
        self.qemu.close()
        self.agent.die()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "socket")
    yield stage
    stage.close()


def test_messages_and_descriptors_go_through_and_answers_come_back(stage: Stage) -> None:
    assert stage.relay.request_queues == RINGS - 1
    stage.qemu.say(Request.GET_FEATURES)
    stage.agent.serve(Request.GET_FEATURES)
    assert stage.qemu.answer().payload == U64.pack(FEATURES)
    stage.qemu.set_up()
    stage.agent.serve(Request.SET_VRING_ENABLE)
    (kick,) = stage.agent.named(Request.SET_VRING_KICK)
    os.eventfd_write(stage.qemu.kick, 5)
    assert os.eventfd_read(kick.descriptors[0]) == 5, "it is the same event"
    (asked, made) = stage.agent.named(Request.GET_INFLIGHT_FD)
    assert INFLIGHT.unpack(asked.payload) == (0, 0, RINGS, QUEUE_SIZE)
    (area,) = stage.agent.named(Request.SET_INFLIGHT_FD)
    assert area.payload == made.payload
    stage.qemu.say(Request.GET_VRING_BASE, VRING_STATE.pack(0, 0))
    stage.agent.serve(Request.GET_VRING_BASE)
    assert stage.qemu.answer().payload == VRING_STATE.pack(0, 77)


def test_the_next_agent_is_told_everything(stage: Stage) -> None:
    stage.qemu.set_up()
    stage.agent.serve(Request.SET_VRING_ENABLE)
    stage.qemu.memory[USED_AT : USED_AT + 4] = b"\0\0\x2a\0"
    stage.agent.die()
    wait_until(lambda: stage.told, 10, "the relay to notice")

    stage.agent = ScriptedAgent(stage.path)
    stage.agent.accept()
    stage.agent.serve(Request.SET_VRING_ENABLE)
    wait_until(lambda: len(stage.told) == 2, 10, "the relay to be content")
    order = [Request(message.request).name for message in stage.agent.heard]
    assert order == [
        *("GET_FEATURES", "GET_PROTOCOL_FEATURES", "SET_PROTOCOL_FEATURES", "SET_OWNER", "SET_FEATURES"),
        *("SET_INFLIGHT_FD", "ADD_MEM_REG", "SET_VRING_NUM", "SET_VRING_BASE", "SET_VRING_ADDR"),
        *("SET_VRING_CALL", "SET_VRING_KICK", "SET_VRING_ENABLE"),
    ]
    (area,) = stage.agent.named(Request.SET_INFLIGHT_FD)
    assert os.pread(area.descriptors[0], 9, 0) == b"in flight", "the first agent's area"
    (base,) = stage.agent.named(Request.SET_VRING_BASE)
    assert base.payload == VRING_STATE.pack(0, 0x2A), "where the used ring stands"
    (kick,) = stage.agent.named(Request.SET_VRING_KICK)
    assert os.eventfd_read(kick.descriptors[0]) == 1, "a kick may have died with the first"
    assert os.eventfd_read(stage.qemu.call) == 1, "and so may an interrupt"


def test_without_an_agent_qemu_is_answered(stage: Stage) -> None:
    stage.qemu.say(Request.GET_FEATURES)
    stage.agent.serve(Request.GET_FEATURES)
    stage.qemu.answer()
    stage.qemu.set_up()
    stage.agent.serve(Request.SET_VRING_ENABLE)
    stage.qemu.memory[USED_AT : USED_AT + 4] = b"\0\0\x09\0"
    stage.agent.die()
    wait_until(lambda: stage.told, 10, "the relay to notice")

    stage.qemu.say(Request.GET_FEATURES)
    assert stage.qemu.answer().payload == U64.pack(FEATURES)
    stage.qemu.say(Request.SET_FEATURES, U64.pack(FEATURES), ack=True)
    assert stage.qemu.answer().payload == U64.pack(0)
    stage.qemu.say(Request.GET_VRING_BASE, VRING_STATE.pack(0, 0))
    assert stage.qemu.answer().payload == VRING_STATE.pack(0, 9)

    stage.agent = ScriptedAgent(stage.path)
    stage.agent.accept()
    stage.agent.serve(Request.SET_VRING_CALL)
    assert not stage.agent.named(Request.SET_INFLIGHT_FD), "the device was stopped: nothing is in flight"
    assert not stage.agent.named(Request.SET_VRING_KICK)


def test_when_qemu_ends_the_agent_is_left(stage: Stage) -> None:
    stage.qemu.connection.shutdown(socket.SHUT_RDWR)
    assert stage.agent.connection is not None
    assert stage.agent.connection.recv(1) == b""


@pytest.mark.parametrize("garbage", [b"\0" * 12, b"\xff" * 64])
def test_garbage_of_qemu_ends_the_device(stage: Stage, garbage: bytes) -> None:
    stage.qemu.connection.sendall(garbage)
    assert stage.agent.connection is not None
    assert stage.agent.connection.recv(1) == b""


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(NoDeviceError, match=r"No such file[^$]*g35 up --virtiofs"):
        DeviceRelay(tmp_path / "socket", request_queues=1, queue_size=QUEUE_SIZE)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "stale"))
    listener.close()
    with pytest.raises(NoDeviceError, match=r"its agent has ended[^$]*g35 up --virtiofs"):
        DeviceRelay(tmp_path / "stale", request_queues=1, queue_size=QUEUE_SIZE)
    with pytest.raises(NoDeviceError, match="too long"):
        DeviceRelay(tmp_path / ("x" * 200), request_queues=1, queue_size=QUEUE_SIZE)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who hangs up is asked once; for how long to say nothing afterwards is for each test to say."""
    monkeypatch.setattr(device_relay, "TURNED_AWAY_S", 0.0)


@contextmanager
def listening(path: Path, treat: Callable[[socket.socket], None]) -> Iterator[None]:
    """Somebody at `path` who treats every connection so, and then ends it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    treat(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.mark.usefixtures("impatient")
def test_a_device_that_another_guest_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_socket, "SILENCE_S", 20.0)  # it ends when the other side hangs up
    with (
        listening(tmp_path / "socket", lambda connection: None),
        pytest.raises(NoDeviceError, match="another guest has the device") as caught,
    ):
        DeviceRelay(tmp_path / "socket", request_queues=1, queue_size=QUEUE_SIZE)
    assert "end that one" in str(caught.value)
    assert f"process {os.getpid()}" in str(caught.value)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("answer", [b"", b'{"error": "no JSON"}'])
def test_a_socket_of_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    monkeypatch.setattr(device_socket, "SILENCE_S", 0.2)

    def reads_and_complains(connection: socket.socket) -> None:
        if connection.recv(4096):
            connection.sendall(answer)

    with (
        listening(tmp_path / "socket", reads_and_complains),
        pytest.raises(NoDeviceError, match="that is no vhost-user device") as caught,
    ):
        DeviceRelay(tmp_path / "socket", request_queues=1, queue_size=QUEUE_SIZE)
    assert "--config" in str(caught.value)
    assert "another guest" not in str(caught.value)


@pytest.mark.usefixtures("impatient")
def test_a_socket_where_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_socket, "ANSWER_S", 0.2)

    def waits_for_more(connection: socket.socket) -> None:
        while connection.recv(4096):
            pass

    with (
        listening(tmp_path / "socket", waits_for_more),
        pytest.raises(NoDeviceError, match="an agent that hangs, or no vhost-user device") as caught,
    ):
        DeviceRelay(tmp_path / "socket", request_queues=1, queue_size=QUEUE_SIZE)
    assert "g35 status" in str(caught.value)
    assert "--socket" in str(caught.value)
