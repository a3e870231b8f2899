"""Devices with their connection managers in bad weather: connect through QP1, move data, disconnect."""

from __future__ import annotations

import random

import pytest

from emulator.roce.cm.attributes import queue_pair_attributes
from emulator.roce.cm.connection import CmEvent, Connection
from emulator.roce.cm.events import CmEventType, ConnectionParameters
from emulator.roce.cm.gsi import SLOTS, Endpoint
from emulator.roce.cm.limits import CmTimes
from emulator.roce.cm.manager import ConnectionManager
from emulator.roce.nic.nic import Nic
from emulator.roce.nic.verbs import (
    GSI_QKEY,
    Access,
    Address,
    AddressVector,
    QpAttr,
    QpAttributes,
    QpCapabilities,
    QpState,
    QpType,
    SendFlags,
    SendOpcode,
    Sge,
    WcStatus,
)
from emulator.roce.nic.work_requests import ReceiveRequest, SendRequest
from emulator.roce.wire.cm_ip import PortSpace
from tests.support.roce.memory_network import MemoryNetwork
from tests.support.roce.weather import CALM, STORM, Weather

HERE, THERE = "10.0.0.1", "10.0.0.2"
PORT = 4420
SEEDS = 40
TIMES = CmTimes(response_exponent=12, ack_exponent=8, disconnect_tries=15)


class Machine:
    """A device, a queue pair and a program that answers its connection manager's events."""

    def __init__(self, ip: str, chance: random.Random, times: CmTimes = TIMES) -> None:
        nic = Nic(ip, rng=chance, mtu=1024)
        self.nic = nic
        self.cm = ConnectionManager(ip, nic.guid, chance, mtu=nic.port_mtu, times=times)
        self.endpoint = Endpoint(nic, self.cm)
        self.events: list[CmEvent] = []
        self.seen: list[str] = []
        self.memory = bytearray(64 << 10)
        self.pd = nic.alloc_pd()
        self.cq = nic.create_cq(256)
        access = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
        self.region = nic.reg_mr(self.pd, memoryview(self.memory), 0, access)
        self.qp = nic.create_qp(self.pd, QpType.RC, self.cq, self.cq, QpCapabilities(64, 64, 1, 1, 0))

    def act(self, now: float) -> None:
        """What the program does for each event."""
        events, self.events[:] = self.events[:], []
        for event in events:
            self.seen.append(event.type.name)
            connection = event.connection
            if event.type is CmEventType.CONNECT_REQUEST:
                self._ready(connection)
                for slot in range(16):
                    self.qp.post_recv(ReceiveRequest(slot, (self.sge(slot * 2048, 2048),)))
                private = self.region.rkey.to_bytes(4, "big")
                connection.accept(ConnectionParameters(self.qp.number, private, 4, 4), now)
            elif event.type is CmEventType.CONNECT_RESPONSE:
                self._ready(connection)
                connection.establish(now)

    def _ready(self, connection: Connection) -> None:
        for state in (QpState.INIT, QpState.RTR, QpState.RTS):
            self.qp.modify(*queue_pair_attributes(connection, state))

    def sge(self, offset: int, length: int) -> Sge:
        return Sge(offset, length, self.region.lkey)


class World:
    """Two machines on one network."""

    def __init__(self, weather: Weather, seed: int, *, parted: bool = False) -> None:
        self.network = MemoryNetwork(weather, random.Random(seed), parted=parted)
        self.first = Machine(HERE, random.Random(f"{seed} here"))
        self.second = Machine(THERE, random.Random(f"{seed} there"))
        self.network.attach(self.first.endpoint, HERE)
        self.network.attach(self.second.endpoint, THERE)
        self.second.cm.listen(PortSpace.TCP, PORT, self.second.events.append)

    def until(self, name: str, machine: Machine, seconds: float = 30.0) -> None:
        """Go on, with both programs acting, until this event."""
        end = self.network.now + seconds
        while name not in machine.seen:
            moved = self.network.run(
                lambda: self.first.events or self.second.events, most_seconds=end - self.network.now
            )
            assert moved, (name, self.first.seen, self.second.seen)
            self.first.act(self.network.now)
            self.second.act(self.network.now)

    def connect(self) -> Connection:
        first = self.first
        connection = first.cm.create(first.events.append)
        connection.resolve_address(THERE, PORT)
        connection.resolve_route()
        connection.connect(ConnectionParameters(first.qp.number, b"", 4, 4), self.network.now)
        self.until("ESTABLISHED", self.second)
        return connection


def _whole_story(weather: Weather, seed: int, parted: bool) -> tuple[float, list[str], list[str]]:
    world = World(weather, seed, parted=parted)
    first, second, network = world.first, world.second, world.network
    connection = world.connect()
    first.memory[:] = random.Random(seed).randbytes(len(first.memory))
    rkey, half = second.region.rkey, len(first.memory) // 2
    for number, (opcode, offset, remote, length) in enumerate(
        [
            (SendOpcode.SEND, 0, 0, 2000),
            (SendOpcode.RDMA_WRITE, half, half, half),
            (SendOpcode.SEND, 2048, 0, 2048),
        ]
    ):
        first.qp.post_send(
            SendRequest(
                number, opcode, SendFlags.SIGNALED, (first.sge(offset, length),),
                remote_address=remote, rkey=rkey,
            )
        )  # fmt: skip
    network.run(lambda: len(first.cq) >= 3, most_seconds=60.0)
    assert [done.status for done in first.cq.poll(9)] == [WcStatus.SUCCESS] * 3
    assert second.memory[:2000] == first.memory[:2000]
    assert second.memory[2048:4096] == first.memory[2048:4096]
    assert second.memory[half:] == first.memory[half:]
    assert [done.byte_len for done in second.cq.poll(99)] == [2000, 2048]
    read = SendRequest(9, SendOpcode.RDMA_READ, SendFlags.SIGNALED, (first.sge(0, half),))
    read.remote_address, read.rkey = half, rkey
    first.qp.post_send(read)
    network.run(lambda: len(first.cq), most_seconds=60.0)
    assert first.memory[:half] == second.memory[half:]
    connection.disconnect(network.now)
    world.until("DISCONNECTED", first)
    world.until("DISCONNECTED", second)
    return network.now, first.seen, second.seen


@pytest.mark.parametrize("parted", [False, True])
def test_from_the_first_message_to_the_last(seed: int, parted: bool) -> None:
    for number in range(SEEDS):
        _whole_story(STORM, seed * SEEDS + number, parted)


def test_in_calm_weather_nothing_is_repeated() -> None:
    now, first, second = _whole_story(CALM, 0, False)
    assert now < 0.01
    assert first[:3] == ["ADDR_RESOLVED", "ROUTE_RESOLVED", "CONNECT_RESPONSE"]
    assert second[:2] == ["CONNECT_REQUEST", "ESTABLISHED"]


def test_a_run_is_its_seed() -> None:
    assert _whole_story(STORM, 11, False) == _whole_story(STORM, 11, False)


def test_more_messages_at_once_than_there_are_receives(seed: int) -> None:
    """A flood of requests: what queue pair 1 cannot take is lost, and comes again."""
    world = World(CALM, seed)
    first, second = world.first, world.second
    count = 3 * SLOTS
    for number in range(count):
        connection = first.cm.create(first.events.append)
        connection.resolve_address(THERE, PORT)
        connection.connect(ConnectionParameters(0x1000 + number), 0.0)
    assert world.network.run(lambda: len(second.events) == count)
    assert {event.type for event in second.events} == {CmEventType.CONNECT_REQUEST}


def test_datagrams_to_queue_pair_1_that_are_no_management_are_counted(seed: int) -> None:
    """Of any length up to the MTU, with the right Q_Key: they fit no receive, or are no message."""
    world = World(CALM, seed)
    first = world.first
    from_ud = first.nic.create_qp(first.pd, QpType.UD, first.cq, first.cq, QpCapabilities(64, 1, 1, 1, 0))
    for state, mask in (
        (QpState.INIT, QpAttr.STATE | QpAttr.PKEY_INDEX | QpAttr.PORT | QpAttr.QKEY),
        (QpState.RTR, QpAttr.STATE),
        (QpState.RTS, QpAttr.STATE | QpAttr.SQ_PSN),
    ):
        from_ud.modify(QpAttributes(state=state, port_num=1, qkey=GSI_QKEY), mask)
    handle = first.nic.create_ah(first.pd, AddressVector(THERE))
    for size in (0, 1, 255, 256, 257, 1024):
        request = SendRequest(0, SendOpcode.SEND, SendFlags.SIGNALED, (first.sge(0, size),))
        request.ah, request.remote_qpn, request.remote_qkey = handle, 1, GSI_QKEY
        from_ud.post_send(request)
    world.network.run(most_seconds=1.0)
    assert len(first.cq.poll(9)) == 6
    assert world.second.cm.counters["mad length"] == 5
    # Whatever became of them, connections are still made.
    world.connect()
    world.network.inject(b"\xff" * 300, Address(HERE), Address(THERE))
    world.network.run(most_seconds=1.0)
    assert world.second.events == []
