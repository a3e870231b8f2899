"""Many emulated NICs that write to one through a switch, at the level of packets and in virtual time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from emulator.roce.nic.congestion import CongestionSettings
from emulator.roce.nic.device_services import WINDOW_BYTES
from emulator.roce.nic.nic import Nic
from emulator.roce.nic.verbs import Mtu, SendFlags, SendOpcode, Sge
from tests.support.roce.ends import End, attributes_for, make_end, move_up
from tests.support.roce.memory_network import MemoryNetwork
from tests.support.roce.switch import Switch
from tests.support.roce.weather import CALM, Weather

SINK = "10.0.0.1"
PIECE = 1 << 16
"""Bytes of one RDMA WRITE: a flow is as many of them as it takes, and all write the same memory."""


class Incast:
    """`flows` senders, each a NIC of its own, before one receiver. They write `sizes` bytes from `begins` on.

    `ends` are the times at which the last byte of each was acknowledged. `congestion` None: no control.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        switch: Switch,
        congestion: CongestionSettings | None,
        *,
        begins: Sequence[float] = (),
        weather: Weather = CALM,
        window_bytes: int = WINDOW_BYTES,
        seed: int = 35,
    ) -> None:
        chance = random.Random(seed)
        self.switch = switch
        self.network = MemoryNetwork(weather, random.Random(f"weather {seed}"), switch=switch)
        self.sink = Nic(SINK, rng=chance, window_bytes=window_bytes)
        self.senders: list[End] = []
        self.sinks: list[End] = []
        self.sizes = list(sizes)
        self.begins = list(begins) or [0.0] * len(self.sizes)
        self.ends = [0.0] * len(self.sizes)
        self.sink.control_congestion(congestion)
        self.network.attach(self.sink, SINK)
        for number in range(len(self.sizes)):
            nic = Nic(f"10.0.0.{number + 2}", rng=chance, window_bytes=window_bytes)
            nic.control_congestion(congestion)
            sender, receiver = make_end(nic, PIECE, depth=1024), make_end(self.sink, PIECE)
            for end, peer in ((sender, receiver), (receiver, sender)):
                move_up(end, attributes_for(end, peer, path_mtu=Mtu.MTU_4096, timeout=17))
            self.network.attach(nic, nic.address)
            self.senders.append(sender)
            self.sinks.append(receiver)

    def run(self, most_seconds: float = 10.0) -> list[float]:
        """How long each flow took. AssertionError where one did not end, or not well."""
        starts = sorted(range(len(self.sizes)), key=self.begins.__getitem__)
        for number in starts:
            self.network.run(most_seconds=max(0.0, self.begins[number] - self.network.now))
            self.network.now = max(self.network.now, self.begins[number])
            self._post(number)
        over = self.network.run(self._all_ended, most_seconds=most_seconds, most_steps=10_000_000)
        assert over, f"flows did not end by {self.network.now:.4f} s: {self.ends}"
        return [end - begin for end, begin in zip(self.ends, self.begins, strict=True)]

    def start(self) -> None:
        """Post all flows, for a test that runs the network by itself."""
        for number in range(len(self.sizes)):
            self._post(number)

    def _post(self, number: int) -> None:
        sender, receiver = self.senders[number], self.sinks[number]
        for at in range(0, self.sizes[number], PIECE):
            length = min(PIECE, self.sizes[number] - at)
            last = at + length == self.sizes[number]
            flags = SendFlags.SIGNALED if last else SendFlags(0)
            sge = Sge(sender.region.address, length, sender.region.lkey)
            sender.post(SendOpcode.RDMA_WRITE, sge, flags=flags, to=receiver, wr_id=number)

    def _all_ended(self) -> bool:
        for number, sender in enumerate(self.senders):
            if not self.ends[number] and (done := sender.polled()):
                assert [each.status.name for each in done] == ["SUCCESS"]
                self.ends[number] = self.network.now
        return all(self.ends)


def paced(switch: Switch, **changes: object) -> CongestionSettings:
    """Settings for ports that are as fast as the switch's."""
    return replace(CongestionSettings(switch.rate), **changes)  # type: ignore[arg-type]
