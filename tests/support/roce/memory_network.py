"""A network in memory, in virtual time, with weather: any number of stations, one seeded source of chance.

    network = MemoryNetwork(Weather(loss=0.05), random.Random(seed))
    network.attach(first, "10.0.0.1"); network.attach(second, "10.0.0.2")
    network.run(until=lambda: done, most_seconds=10.0)

Time stands still while stations act, and jumps to the next arrival or the next deadline when all is quiet; a
run is a function of its seed. With `parted` every datagram arrives by itself, as from a kernel; without, the
datagrams of a burst that suffered alike arrive as one row, as by UDP_GRO: a device has a path for each.

With a `Switch` all datagrams queue for their destination's link, by themselves, and may be marked (ECN).
"""

from __future__ import annotations

import errno
import heapq
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from emulator.roce.nic.verbs import ROCE_PORT, Address, Burst
from emulator.roce.runtime.driver_seat import Station
from tests.support.roce.switch import Switch
from tests.support.roce.weather import CALM, Dice, Fate, Weather

MAX_IN_FLIGHT: Final = 1 << 16
"""Rows on their way; more are dropped and counted, as by a switch that is full."""

MAX_STATIONS: Final = 4096
MAX_GROUPS: Final = 4096


class Sender(Protocol):
    """What can be asked for its packets."""

    def next_burst(self, now: float) -> Burst | None:
        """See `Station`."""


def output_of(sender: Sender, now: float = 0.0) -> list[Burst]:
    """All that a device wants to send, copied."""
    result = []
    while (burst := sender.next_burst(now)) is not None:
        result.append(burst._replace(data=memoryview(bytes(burst.data))))
    return result


class Decision(NamedTuple):
    """One datagram, or a whole burst in weather that knows only delay, and what became of it: for logs."""

    now: float
    source: str
    destination: str
    size: int
    what: str
    """`delivered`, `lost`, `duplicated`, `damaged`, `partitioned`, `nobody` or `full`."""


@dataclass(slots=True)
class NetworkCounters:
    """Datagrams, by what became of them."""

    sent: int = 0
    lost: int = 0
    duplicated: int = 0
    damaged: int = 0
    partitioned: int = 0
    nobody: int = 0
    full: int = 0


class _Flight(NamedTuple):
    """A row on its way; ordered by arrival, then by departure."""

    arrival: float
    number: int
    data: bytearray
    segment_size: int
    source: Address
    destination: Address
    group: str = ""
    """The multicast group that it was sent to, if any; `destination` is the member that this copy is for."""
    marked: bool = False
    """The switch has marked it."""


class MemoryNetwork:
    """See the top of this file. `log` hears every decision; `tap` hears every row as it leaves its sender."""

    def __init__(
        self,
        weather: Weather = CALM,
        chance: random.Random | None = None,
        *,
        parted: bool = False,
        switch: Switch | None = None,
        log: Callable[[Decision], None] | None = None,
        tap: Callable[[Burst, Address, float], None] | None = None,
    ) -> None:
        self.now = 0.0
        self.parted = parted
        self._switch = switch
        self.counters = NetworkCounters()
        self._dice = Dice(weather, chance if chance is not None else random.Random(0))
        self._log = log
        self._tap = tap
        self._stations: dict[str, Station] = {}
        self._groups: dict[str, list[str]] = {}
        self._partitions: set[frozenset[str]] = set()
        self._flights: list[_Flight] = []
        self._launched = 0

    @property
    def weather(self) -> Weather:
        """May be changed at any moment; what is on its way keeps its fate."""
        return self._dice.weather

    @weather.setter
    def weather(self, weather: Weather) -> None:
        self._dice.weather = weather

    @property
    def in_flight(self) -> int:
        """Rows on their way."""
        return len(self._flights)

    # --- who is there ------------------------------------------------------------

    def join(self, group: str, ip: str) -> None:
        """The station at `ip` gets what is sent to a multicast group. OSError (ENOBUFS) for too many."""
        if group not in self._groups and len(self._groups) >= MAX_GROUPS:
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        members = self._groups.setdefault(group, [])
        if ip not in members:
            members.append(ip)

    def leave(self, group: str, ip: str) -> None:
        """It gets no more of it; nothing happens where it did not."""
        members = self._groups.get(group, [])
        if ip in members:
            members.remove(ip)
            if not members:
                del self._groups[group]

    def attach(self, station: Station, ip: str) -> None:
        """Put a station at an address; ValueError if somebody is there."""
        if ip in self._stations or len(self._stations) >= MAX_STATIONS:
            raise ValueError(f"{ip} is taken, or the network is full")
        self._stations[ip] = station

    def detach(self, ip: str) -> None:
        """The station vanishes, as a machine that is switched off; what is on its way to it is lost."""
        del self._stations[ip]
        for group in list(self._groups):
            self.leave(group, ip)

    def partition(self, first: str, second: str) -> None:
        """Nothing passes between the two from now on; what is on its way still arrives."""
        self._partitions.add(frozenset((first, second)))

    def heal(self) -> None:
        """End all partitions."""
        self._partitions.clear()

    # --- time ----------------------------------------------------------------------

    def collect(self) -> None:
        """Take what the stations want to send. Needed after calls to a station from outside `run`."""
        for ip, station in list(self._stations.items()):
            self._collect(ip, station)

    def step(self, most: float = float("inf")) -> bool:
        """Go to the next arrival or deadline, if it is not after `most`, and do all that is due then.

        False if there is none; then time has not moved.
        """
        self.collect()
        now = self._next()
        if now is None or now > most:
            return False
        self.now = max(self.now, now)
        while self._flights and self._flights[0].arrival <= self.now:
            self._land(heapq.heappop(self._flights))
        for ip, station in list(self._stations.items()):
            deadline = station.deadline()
            if deadline is not None and deadline <= self.now:
                station.advance(self.now)
                self._collect(ip, station)
        return True

    def run(
        self,
        until: Callable[[], object] | None = None,
        *,
        most_seconds: float = 60.0,
        most_steps: int = 1_000_000,
    ) -> bool:
        """Step until the condition holds (True), nothing happens any more, or the time is over (False).

        Raises AssertionError after `most_steps`: somebody asks for attention over and over, without need.
        """
        end = self.now + most_seconds
        for _ in range(most_steps):
            if until is not None and until():
                return True
            if not self.step(end):
                return until is not None and bool(until())
        raise AssertionError(f"the network does not come to rest: {self.now:.6f} s, {self.counters}")

    def _next(self) -> float | None:
        times = [self._flights[0].arrival] if self._flights else []
        for station in self._stations.values():
            deadline = station.deadline()
            if deadline is not None:
                times.append(deadline)
        return min(times, default=None)

    # --- datagrams -------------------------------------------------------------------

    def _collect(self, ip: str, station: Station) -> None:
        source = Address(ip, ROCE_PORT)
        for burst in output_of(station, self.now):
            if self._tap is not None:
                self._tap(burst, source, self.now)
            self._send(burst, source)

    def inject(self, data: bytes, source: Address, destination: Address, delay_s: float = 0.0) -> None:
        """A datagram from nowhere, which the weather spares: for hostile tests."""
        self._launch(bytearray(data), max(len(data), 1), source, destination, self.now + delay_s)

    def _send(self, burst: Burst, source: Address) -> None:
        data, segment_size, destination = burst
        members = self._groups.get(destination.ip)
        if members is None:
            self._send_to(data, segment_size, source, destination)
            return
        for ip in members:
            self._send_to(data, segment_size, source, Address(ip, destination.port), destination.ip)

    def _send_to(
        self, data: memoryview, segment_size: int, source: Address, destination: Address, group: str = ""
    ) -> None:
        count = -(-len(data) // segment_size)
        self.counters.sent += count
        if destination.ip not in self._stations:
            self.counters.nobody += count
            self._tell(source, destination, len(data), "nobody")
            return
        if self._partitions and frozenset((source.ip, destination.ip)) in self._partitions:
            self.counters.partitioned += count
            self._tell(source, destination, len(data), "partitioned")
            return
        if self._switch is not None:
            self._send_through(self._switch, data, segment_size, source, destination, group)
            return
        weather = self._dice.weather
        if not weather.changes_packets and not self.parted:
            arrival = self.now + weather.delay_s
            self._launch(bytearray(data), segment_size, source, destination, arrival, group)
            self._tell(source, destination, len(data), "delivered")
            return
        for arrival, size, row in self._rows(data, segment_size, source, destination):
            self._launch(row, size, source, destination, arrival, group)

    def _send_through(
        self,
        switch: Switch,
        data: memoryview,
        segment_size: int,
        source: Address,
        destination: Address,
        group: str,
    ) -> None:
        """Each datagram queues in the switch, and then has the weather's delays."""
        for start in range(0, len(data), segment_size):
            packet = data[start : start + segment_size]
            carried = switch.carry(destination.ip, len(packet), self.now)
            fate = self._dice.fate(len(packet)) if carried is not None else Fate(())
            self._count(fate, source, destination, len(packet))
            left, marked = carried if carried is not None else (0.0, False)
            for delay in fate.delays:
                row = bytearray(packet)
                self._launch(row, len(row), source, destination, left + delay, group, marked)

    def _rows(
        self, data: memoryview, segment_size: int, source: Address, destination: Address
    ) -> Iterator[tuple[float, int, bytearray]]:
        """Arrival, segment size and bytes of each row that a burst falls into.

        Undamaged neighbours travel together unless `parted`, held up as the first of them.
        """
        row = bytearray()
        row_arrival = 0.0
        for start in range(0, len(data), segment_size):
            packet = data[start : start + segment_size]
            fate = self._dice.fate(len(packet))
            whole = len(fate.delays) == 1 and not fate.flips and not fate.cut
            self._count(fate, source, destination, len(packet))
            if whole and not self.parted:
                if not row:
                    row_arrival = self.now + fate.delays[0]
                row += packet
                continue
            if row:
                yield row_arrival, segment_size, row
                row = bytearray()
            for index, delay in enumerate(fate.delays):
                copy = bytearray(packet)
                if index == 0:
                    for bit in fate.flips:
                        copy[bit >> 3] ^= 1 << (bit & 7)
                    if fate.cut:
                        del copy[-fate.cut :]
                yield self.now + delay, max(len(copy), 1), copy
        if row:
            yield row_arrival, segment_size, row

    def _count(self, fate: Fate, source: Address, destination: Address, size: int) -> None:
        counters = self.counters
        what = "delivered"
        if not fate.delays:
            counters.lost += 1
            what = "lost"
        elif fate.flips or fate.cut:
            counters.damaged += 1
            what = "damaged"
        if len(fate.delays) > 1:
            counters.duplicated += 1
            what = "duplicated"
        self._tell(source, destination, size, what)

    def _tell(self, source: Address, destination: Address, size: int, what: str) -> None:
        if self._log is not None:
            self._log(Decision(self.now, source.ip, destination.ip, size, what))

    def _launch(
        self,
        data: bytearray,
        segment_size: int,
        source: Address,
        destination: Address,
        arrival: float,
        group: str = "",
        marked: bool = False,
    ) -> None:
        if len(self._flights) >= MAX_IN_FLIGHT:
            self.counters.full += -(-len(data) // segment_size)
            self._tell(source, destination, len(data), "full")
            return
        self._launched += 1
        flight = _Flight(arrival, self._launched, data, segment_size, source, destination, group, marked)
        heapq.heappush(self._flights, flight)

    def _land(self, flight: _Flight) -> None:
        station = self._stations.get(flight.destination.ip)
        if station is None:
            self.counters.nobody += 1
            return
        data = memoryview(flight.data)
        station.receive(data, flight.segment_size, flight.source, self.now, flight.group, flight.marked)
        self._collect(flight.destination.ip, station)
