"""The services of a connection manager for its connections."""

import random
from abc import ABC, abstractmethod
from collections import Counter

from emulator.roce.cm.limits import MAX_OUTPUT, CmTimes
from emulator.roce.nic.verbs import Mtu
from emulator.roce.wire.bth import LOW_24_BITS
from emulator.roce.wire.cm_ip import PortSpace


class ConnectionServices(ABC):
    """The base of a `ConnectionManager`: its NIC, its numbers and its output. It knows connections by id."""

    def __init__(self, ip: str, guid: int, chance: random.Random, mtu: Mtu, times: CmTimes) -> None:
        self.ip = ip
        self.guid = guid
        self.mtu = mtu
        self.times = times
        self.counters: Counter[str] = Counter()
        """Dropped messages by cause, sent and received ones by name (`sent REQ`)."""
        self._chance = chance
        self._output: list[tuple[str, bytes]] = []

    def send(self, mad: bytes, ip: str) -> None:
        """Put a message into the output."""
        if len(self._output) >= MAX_OUTPUT:
            self.counters["output full"] += 1
            return
        self.counters["sent"] += 1
        self._output.append((ip, mad))

    def random_psn(self) -> int:
        """The first PSN of a connection: random, so that no packet of an older connection fits by chance."""
        return self._chance.randrange(LOW_24_BITS + 1)

    def new_transaction(self) -> int:
        return self._chance.getrandbits(64)

    @abstractmethod
    def ephemeral_port(self, port_space: PortSpace = PortSpace.TCP) -> int:
        """A port without a listener. EADDRINUSE when all are taken."""

    @abstractmethod
    def arm(self, local_id: int, deadline: float) -> None:
        """The connection's deadline has become this one."""

    @abstractmethod
    def forget(self, local_id: int) -> None:
        """The connection is closed."""
