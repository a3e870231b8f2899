"""Connection managers on a network in memory, without a NIC below: management datagrams travel bare."""

from __future__ import annotations

import random
from collections.abc import Callable

from emulator.roce.cm.connection import CmEvent, Connection, Listener
from emulator.roce.cm.events import CmEventType, ConnectionParameters
from emulator.roce.cm.limits import CmTimes
from emulator.roce.cm.manager import ConnectionManager
from emulator.roce.nic.verbs import Address, Burst, Mtu
from emulator.roce.wire.cm_ip import PortSpace
from emulator.roce.wire.cm_messages import CmMessage, decode_cm_untrusted
from tests.support.roce.memory_network import MemoryNetwork
from tests.support.roce.weather import CALM, Weather

PORT = 4420
FIRST, SECOND = "10.0.0.1", "10.0.0.2"


class CmEnd:
    """A manager as a station of the network, and its events in a list."""

    def __init__(
        self, ip: str, seed: int = 0, *, mtu: Mtu = Mtu.MTU_4096, times: CmTimes | None = None
    ) -> None:
        self.ip = ip
        guid = int(ip.replace(".", ""))
        self.manager = ConnectionManager(ip, guid, random.Random(f"{seed} {ip}"), mtu=mtu, times=times)
        self.events: list[CmEvent] = []
        self._bursts: list[Burst] = []
        self.sent: list[CmMessage] = []
        self.filter: Callable[[CmMessage], bool] = lambda message: True
        """What may leave."""
        self.qpns = iter(range(0x100, 1 << 20))

    def receive(
        self,
        burst: memoryview,
        segment_size: int,
        source: Address,
        now: float,
        group: str = "",
        marked: bool = False,
    ) -> None:
        for start in range(0, len(burst), segment_size):
            self.manager.receive(burst[start : start + segment_size], source.ip, now)

    def deadline(self) -> float | None:
        return self.manager.deadline()

    def advance(self, now: float) -> None:
        self.manager.advance(now)

    def take_output(self) -> list[Burst]:
        bursts = []
        for ip, mad in self.manager.take_output():
            message, _ = decode_cm_untrusted(mad)
            self.sent.append(message)
            if self.filter(message):
                bursts.append(Burst(memoryview(mad), len(mad), Address(ip)))
        return bursts

    def next_burst(self, now: float) -> Burst | None:
        self._bursts.extend(self.take_output())
        return self._bursts.pop(0) if self._bursts else None

    # --- what a test says ------------------------------------------------------------

    def listen(self, port: int = PORT, backlog: int = 0) -> Listener:
        return self.manager.listen(PortSpace.TCP, port, self.events.append, backlog)

    def parameters(self, private_data: bytes = b"", depth: int = 16, **more: int) -> ConnectionParameters:
        return ConnectionParameters(
            qp_num=next(self.qpns),
            private_data=private_data,
            responder_resources=depth,
            initiator_depth=depth,
            **more,
        )

    def request(
        self, peer: str, now: float, parameters: ConnectionParameters | None = None, port: int = PORT
    ) -> Connection:
        """Resolve and connect."""
        connection = self.manager.create(self.events.append)
        connection.resolve_address(peer, port)
        connection.resolve_route()
        assert self.kinds()[-2:] == ["ADDR_RESOLVED", "ROUTE_RESOLVED"]
        del self.events[-2:]
        connection.connect(parameters if parameters is not None else self.parameters(b"hello"), now)
        return connection

    def kinds(self) -> list[str]:
        return [event.type.name for event in self.events]

    def count(self, message: type) -> int:
        return sum(isinstance(sent, message) for sent in self.sent)


class CmPair:
    """Two ends, of which the second listens."""

    def __init__(
        self, weather: Weather = CALM, seed: int = 0, times: CmTimes | None = None, mtu: Mtu = Mtu.MTU_4096
    ) -> None:
        self.network = MemoryNetwork(weather, random.Random(seed))
        self.first = CmEnd(FIRST, seed, times=times)
        self.second = CmEnd(SECOND, seed, times=times, mtu=mtu)
        for end in (self.first, self.second):
            self.network.attach(end, end.ip)
        self.listener = self.second.listen()

    @property
    def now(self) -> float:
        return self.network.now

    def run(self, until: Callable[[], object], seconds: float = 60.0) -> None:
        assert self.network.run(until, most_seconds=seconds), (self.first.events, self.second.events)

    def request(self, parameters: ConnectionParameters | None = None) -> tuple[Connection, Connection]:
        """A request and the connection that it makes on the other side."""
        active = self.first.request(SECOND, self.now, parameters)
        self.run(lambda: self.second.events)
        event = self.second.events.pop(0)
        assert event.type is CmEventType.CONNECT_REQUEST
        assert event.listener is self.listener
        return active, event.connection

    def connect(self) -> tuple[Connection, Connection]:
        """A connection, established on both sides, with no event left over."""
        active, passive = self.request()
        passive.accept(self.second.parameters(b"welcome"), self.now)
        self.run(lambda: self.first.events)
        assert self.first.events.pop(0).type is CmEventType.CONNECT_RESPONSE
        active.establish(self.now)
        self.run(lambda: self.second.events)
        assert self.second.events.pop(0).type is CmEventType.ESTABLISHED
        return active, passive
