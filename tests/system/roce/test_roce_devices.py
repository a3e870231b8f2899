"""Opened devices on real sockets, in one process: who drives, who waits, what the threads do, and the end."""

from __future__ import annotations

import gc
import os
import select
import threading
import time
from collections.abc import Iterator

import pytest

from emulator.roce.cm.attributes import queue_pair_attributes
from emulator.roce.cm.events import CmEventType, ConnectionParameters
from emulator.roce.nic.counters import Count
from emulator.roce.nic.device_services import MAX_EVENTS
from emulator.roce.nic.verbs import EventType, QpCapabilities, QpState, QpType, SendOpcode, WcStatus
from emulator.roce.runtime.channel import EventChannel
from emulator.roce.runtime.device import MAX_LOOPBACK_WINDOW, MAX_WINDOW, MIN_WINDOW, Device, window_for
from emulator.roce.runtime.errors import CannotOpen, DeviceClosed, NoSuchDevice
from emulator.roce.runtime.registry import (
    add_device,
    devices,
    find_device,
    open_device,
    release_device,
    remove_device,
)
from tests.support.needs import needs_ipv6
from tests.support.roce.devices import IMPATIENT, Program, connect, some_ip
from tests.support.waiting import wait_until


@pytest.fixture
def pair() -> Iterator[tuple[Program, Program]]:
    first, second = Program(some_ip()), Program(some_ip())
    try:
        yield first, second
    finally:
        first.close()
        second.close()


@pytest.fixture
def impatient_pair() -> Iterator[tuple[Program, Program]]:
    """Two that soon give up each other."""
    first, second = (Program(some_ip(), times=IMPATIENT) for _ in range(2))
    try:
        yield first, second
    finally:
        first.close()
        second.close()


def readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def test_a_connection_carries_messages_and_ends(pair: tuple[Program, Program]) -> None:
    first, second = pair
    active, _, rkey = connect(first, second)
    second.post_receive(0, 4096, wr_id=7)
    first.memory[:2000] = os.urandom(2000)
    first.post(SendOpcode.SEND, 0, 2000)
    (arrived,) = second.done()
    assert (arrived.status, arrived.wr_id, arrived.byte_len) == (WcStatus.SUCCESS, 7, 2000)
    assert second.memory[:2000] == first.memory[:2000]
    first.done()

    first.memory[:] = os.urandom(len(first.memory))
    first.post(SendOpcode.RDMA_WRITE, 0, len(first.memory), rkey=rkey)
    assert first.done()[0].status is WcStatus.SUCCESS
    assert second.memory == first.memory
    second.memory[:] = os.urandom(len(first.memory))
    first.post(SendOpcode.RDMA_READ, 0, len(first.memory), rkey=rkey)
    assert first.done()[0].status is WcStatus.SUCCESS
    assert second.memory == first.memory

    with first.device.turn():
        active.disconnect(first.now())
    first.event(CmEventType.DISCONNECTED)
    second.event(CmEventType.DISCONNECTED)


def test_the_peer_needs_no_help_of_its_program(pair: tuple[Program, Program]) -> None:
    """Memory is read and written, and messages are acknowledged, while nobody waits on that side."""
    first, second = pair
    _, _, rkey = connect(first, second)
    drives = second.device._seat.drives
    for _ in range(20):
        first.post(SendOpcode.RDMA_READ, 0, 100_000, rkey=rkey)
        assert first.done()[0].status is WcStatus.SUCCESS
    assert second.device._seat.drives == drives


def test_nobody_waits_on_either_side(pair: tuple[Program, Program]) -> None:
    first, second = pair
    _, _, rkey = connect(first, second)
    first.memory[:] = os.urandom(len(first.memory))
    first.post(SendOpcode.RDMA_WRITE, 0, len(first.memory), rkey=rkey)
    wait_until(lambda: len(first.cq), what="a completion that nobody waits for")
    assert second.memory == first.memory


def test_many_threads_wait_and_each_gets_its_own(pair: tuple[Program, Program]) -> None:
    first, second = pair
    _, _, rkey = connect(first, second)
    got: dict[int, list[WcStatus]] = {}
    arrived: dict[int, list[WcStatus]] = {number: [] for number in range(6)}

    def sort() -> None:
        for completion in first.cq.poll(64):
            arrived[completion.wr_id].append(completion.status)

    def work(number: int) -> None:
        def mine() -> bool:
            sort()
            return bool(arrived[number])

        got[number] = []
        for _ in range(30):
            first.post(SendOpcode.RDMA_READ, number * 4096, 4096, rkey=rkey, wr_id=number)
            first.wait(mine)
            got[number].append(arrived[number].pop())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == {number: [WcStatus.SUCCESS] * 30 for number in range(6)}
    assert first.device._seat._waiters == []


def test_waiting_ends_at_its_deadline(pair: tuple[Program, Program]) -> None:
    first, _ = pair
    start = time.monotonic()
    assert not first.device.drive_until(lambda: False, start + 0.05)
    assert 0.05 <= time.monotonic() - start < 5.0
    assert not first.device.drive_until(lambda: False, start)
    assert first.device.drive_until(lambda: True, start)


def test_waiting_for_the_seat_ends_at_its_deadline_too(pair: tuple[Program, Program]) -> None:
    first, _ = pair
    over = threading.Event()
    driver = threading.Thread(target=lambda: first.device.drive_until(over.is_set, None))
    driver.start()
    try:
        wait_until(lambda: first.device._seat._taken)
        assert not first.device.drive_until(lambda: False, time.monotonic() + 0.05)
        assert first.device._seat._waiters == []
    finally:
        over.set()
        # Whatever a turn does, conditions may have become true by it: those who wait are asked.
        with first.device.turn():
            pass
        driver.join(20)
    assert not driver.is_alive()


def test_a_deadline_that_comes_nearer_wakes_the_sleeping_driver(
    impatient_pair: tuple[Program, Program],
) -> None:
    """A driver sleeps without end; another thread posts to a peer that is gone: the retry time still runs."""
    first, second = impatient_pair
    _, _, rkey = connect(first, second)
    second.close()
    waiter = threading.Thread(target=lambda: first.wait(lambda: len(first.cq)))
    waiter.start()
    wait_until(lambda: first.device._seat._driver_sleep.until is not None)
    first.post(SendOpcode.RDMA_WRITE, 0, 4096, rkey=rkey)
    waiter.join(20)
    assert not waiter.is_alive()
    assert first.done()[0].status is WcStatus.RETRY_EXC_ERR


def test_closing_wakes_everybody(pair: tuple[Program, Program]) -> None:
    first, _ = pair
    ended: list[str] = []

    def wait() -> None:
        try:
            first.device.drive_until(lambda: False, None)
        except DeviceClosed as error:
            ended.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: first.device._seat._taken and len(first.device._seat._waiters) == 3)
    first.device.close()
    for thread in threads:
        thread.join(20)
    assert len(ended) == 4
    with pytest.raises(DeviceClosed):
        first.device.drive_until(lambda: True, None)
    first.device.drive_once()
    first.device.close()
    assert first.device.closed
    assert first.device.link.fileno() == -1


def test_opening_and_closing_leaves_nothing() -> None:
    ip = some_ip()
    Device("warm", ip).close()
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(10):
        device = Device("again", ip)
        assert "again" in repr(device)
        device.close()
    gc.collect()
    # Of what other tests left, something may end meanwhile: there may be less, and never more.
    after = len(os.listdir("/proc/self/fd")), threading.active_count()
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


def test_the_window_suits_the_socket_and_the_way() -> None:
    assert window_for(1 << 10) == MIN_WINDOW
    assert window_for(3 << 18) == 1 << 18
    assert window_for(1 << 30) == MAX_WINDOW
    assert window_for(1 << 30, MAX_LOOPBACK_WINDOW) == MAX_LOOPBACK_WINDOW
    device = Device("near", some_ip())
    try:
        room = device.link.receive_buffer_bytes
        assert device.nic.window_bytes == window_for(room, MAX_LOOPBACK_WINDOW)
    finally:
        device.close()


def test_an_address_that_cannot_be_had(pair: tuple[Program, Program]) -> None:
    first, _ = pair
    with pytest.raises(CannotOpen, match="Address already in use"):
        Device("second", first.device.ip)
    with pytest.raises(CannotOpen):
        Device("strange", "192.0.2.1")
    with pytest.raises(CannotOpen):
        Device("strange", "no address")


def test_a_device_of_the_registry_is_shared_and_closed_by_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    ip, other = some_ip(), some_ip()
    monkeypatch.setenv("G35_ROCE_DEVICES", f"env0={other}")
    add_device("added0", ip)
    try:
        assert {"env0", "added0"} <= {entry.name for entry in devices()}
        assert find_device(other).name == find_device("env0").name == "env0"
        device = open_device("added0")
        assert open_device(ip) is device
        release_device(device)
        assert not device.closed
        release_device(device)
        assert device.closed
        release_device(device)
        again = open_device("added0")
        assert again is not device
        release_device(again)
        with pytest.raises(NoSuchDevice, match="known are: env0"):
            open_device("mlx5_0")
    finally:
        remove_device("added0")
    monkeypatch.setenv("G35_ROCE_PCAP", "/tmp/{device}.pcap")
    assert str(find_device("env0").pcap) == "/tmp/env0.pcap"
    monkeypatch.setenv("G35_ROCE_DEVICES", "nonsense")
    with pytest.raises(ValueError, match="NAME=ADDRESS"):
        devices()
    for twice in ("a=127.0.0.2,a=127.0.0.3", "a=127.0.0.2,b=127.0.0.2"):
        monkeypatch.setenv("G35_ROCE_DEVICES", twice)
        with pytest.raises(ValueError, match="for the second time"):
            devices()


def test_a_channel_is_readable_exactly_while_events_wait() -> None:
    channel: EventChannel[int] = EventChannel()
    descriptor = channel.fileno()
    assert not readable(descriptor)
    for number in range(3):
        channel.push(number)
        assert readable(descriptor)
    assert [channel.pop() for _ in range(3)] == [0, 1, 2]
    assert not readable(descriptor)
    assert channel.pop() is None
    channel.close()
    channel.close()
    channel.push(4)
    assert channel.closed
    assert (len(channel), channel.fileno()) == (0, -1)


def test_events_that_nobody_takes_are_few_and_hold_nothing_that_is_destroyed() -> None:
    program = Program(some_ip())
    try:
        device, nic = program.device, program.device.nic
        events = device.async_events
        with device.turn():
            for _ in range(100):
                qp = nic.create_qp(
                    program.pd, QpType.RC, program.cq, program.cq, QpCapabilities(1, 1, 1, 1, 0)
                )
                qp.tell(EventType.QP_ACCESS_ERR)
                assert len(events) == 1
                nic.destroy_qp(qp)
                assert not events
                assert not readable(events.fileno())
            for _ in range(MAX_EVENTS + 3):
                program.qp.tell(EventType.QP_ACCESS_ERR)
            assert (len(events), nic.counters[Count.EVENTS_LOST]) == (MAX_EVENTS, 3)
            nic.destroy_qp(program.qp)
            assert not events
    finally:
        program.close()


def test_a_completion_channel_wakes_select_without_any_driver(pair: tuple[Program, Program]) -> None:
    first, second = pair
    connect(first, second)
    channel: EventChannel[object] = EventChannel()
    second.post_receive(0, 100)
    with second.device.turn():
        second.cq.on_completion = channel.push
        second.cq.arm()
    first.post(SendOpcode.SEND, 0, 100)
    assert select.select([channel.fileno()], [], [], 20)[0]
    with second.device.turn():
        assert channel.pop() is second.cq
        assert second.cq.poll(5)[0].status is WcStatus.SUCCESS
    assert not readable(channel.fileno())
    channel.close()


def test_data_before_the_end_of_the_handshake_are_an_event_for_both(pair: tuple[Program, Program]) -> None:
    """COMM_EST of the queue pair tells the program, and the connection manager that the peer is ready."""
    first, second = pair
    second.listen()
    first.request(second.device.ip)
    connection = second.event(CmEventType.CONNECT_REQUEST).connection
    with second.device.turn():
        for state in (QpState.INIT, QpState.RTR):
            second.qp.modify(*queue_pair_attributes(connection, state))
        private = second.region.rkey.to_bytes(4, "big")
        connection.accept(ConnectionParameters(second.qp.number, private, 16, 16), second.now())
    answer = first.event(CmEventType.CONNECT_RESPONSE)
    rkey = int.from_bytes(answer.private_data[:4], "big")
    with first.device.turn():
        first.ready(answer.connection)
    first.post(SendOpcode.RDMA_WRITE, 0, 64, rkey=rkey)
    assert first.done()[0].status is WcStatus.SUCCESS
    second.event(CmEventType.ESTABLISHED)
    assert select.select([second.device.async_events.fileno()], [], [], 20)[0]
    with second.device.turn():
        event = second.device.async_events.pop()
    assert event is not None
    assert (event.type, event.element) == (EventType.COMM_EST, second.qp)


def test_polling_in_a_loop_is_driving_too(pair: tuple[Program, Program]) -> None:
    first, second = pair
    _, _, rkey = connect(first, second)
    first.post(SendOpcode.RDMA_READ, 0, 4096, rkey=rkey)
    end = time.monotonic() + 20
    while not len(first.cq) and time.monotonic() < end:
        first.device.drive_once()
    assert first.done()[0].status is WcStatus.SUCCESS


@pytest.mark.parametrize("family", ["IPv4", pytest.param("IPv6", marks=needs_ipv6)])
def test_a_device_talks_to_itself(family: str) -> None:
    program = Program(some_ip() if family == "IPv4" else "::1")
    try:
        nic = program.device.nic
        program.listen()
        program.request(program.device.ip)
        request = program.event(CmEventType.CONNECT_REQUEST)
        with program.device.turn():
            other = nic.create_qp(
                program.pd, QpType.RC, program.cq, program.cq, QpCapabilities(8, 8, 1, 1, 0)
            )
            for state in (QpState.INIT, QpState.RTR, QpState.RTS):
                other.modify(*queue_pair_attributes(request.connection, state))
            request.connection.accept(ConnectionParameters(other.number, b"", 4, 4), program.now())
        program.establish()
        program.event(CmEventType.ESTABLISHED)
        program.memory[:5000] = os.urandom(5000)
        program.post(SendOpcode.RDMA_WRITE, 0, 5000, rkey=program.region.rkey, remote=100_000)
        assert program.done()[0].status is WcStatus.SUCCESS
        assert program.memory[100_000:105_000] == program.memory[:5000]
    finally:
        program.close()
