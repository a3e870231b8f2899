"""The network in memory: rows and single datagrams, every kind of weather, partitions, runs by seed."""

from __future__ import annotations

import random

import pytest

from emulator.roce.nic.verbs import Address, Burst
from tests.support.roce.memory_network import MAX_IN_FLIGHT, Decision, MemoryNetwork
from tests.support.roce.weather import CALM, STORM, Weather

HERE, THERE = "10.0.0.1", "10.0.0.2"


class Station:
    """Sends what it is given, keeps what it gets, and may want to be called at a time."""

    def __init__(self) -> None:
        self.got: list[tuple[float, bytes, int, str]] = []
        self.outgoing: list[Burst] = []
        self.alarms: list[float] = []

    def receive(
        self,
        burst: memoryview,
        segment_size: int,
        source: Address,
        now: float,
        group: str = "",
        marked: bool = False,
    ) -> None:
        self.got.append((now, bytes(burst), segment_size, source.ip))

    def deadline(self) -> float | None:
        return min(self.alarms, default=None)

    def advance(self, now: float) -> None:
        self.alarms = [alarm for alarm in self.alarms if alarm > now]

    def next_burst(self, now: float) -> Burst | None:
        return self.outgoing.pop(0) if self.outgoing else None

    def send(self, data: bytes, segment_size: int, ip: str = THERE) -> None:
        self.outgoing.append(Burst(memoryview(data), segment_size, Address(ip)))

    def packets(self) -> list[bytes]:
        """What came, datagram by datagram."""
        return [
            data[start : start + size] for _, data, size, _ in self.got for start in range(0, len(data), size)
        ]


def network(weather: Weather = CALM, seed: int = 1, **more: bool) -> tuple[MemoryNetwork, Station, Station]:
    net = MemoryNetwork(weather, random.Random(seed), **more)  # type: ignore[arg-type]
    here, there = Station(), Station()
    net.attach(here, HERE)
    net.attach(there, THERE)
    return net, here, there


@pytest.mark.parametrize("weather", [CALM, Weather(jitter_s=1e-6), Weather(loss=1e-9)])
def test_a_burst_arrives_whole(weather: Weather) -> None:
    net, here, there = network(weather)
    data = random.Random(0).randbytes(2500)
    here.send(data, 1000)
    net.run()
    ((arrival, got, size, source),) = there.got
    assert (got, size, source) == (data, 1000, HERE)
    assert weather.delay_s <= arrival <= weather.delay_s + weather.jitter_s


def test_parted_each_datagram_arrives_by_itself() -> None:
    net, here, there = network(parted=True)
    here.send(bytes(2500), 1000)
    net.run()
    assert [(len(data), size) for _, data, size, _ in there.got] == [(1000, 1000), (1000, 1000), (500, 500)]


def test_the_senders_buffer_is_its_own_again() -> None:
    net, here, there = network()
    buffer = bytearray(b"first")
    here.outgoing.append(Burst(memoryview(buffer), 5, Address(THERE)))
    net.collect()
    buffer[:] = b"later"
    net.run()
    assert there.packets() == [b"first"]


def test_a_lost_datagram_parts_the_row_that_it_was_in() -> None:
    net, here, there = network(Weather(loss=0.2), seed=4)
    data = b"".join(bytes([number]) * 10 for number in range(60))
    here.send(data, 10)
    net.run()
    numbers = [packet[0] for packet in there.packets()]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 60 - net.counters.lost
    assert 3 < net.counters.lost < 30
    for _, row, size, _ in there.got:
        # Within a row nothing is missing.
        assert [row[at] - row[0] for at in range(0, len(row), size)] == list(range(len(row) // size))
    assert max(len(row) for _, row, _, _ in there.got) > 10


def test_duplicates_and_damage_are_what_the_counters_say() -> None:
    net, here, there = network(Weather(duplicate=0.2, corrupt=0.2, truncate=0.1), seed=2)
    original = {bytes([number]) * 50 for number in range(200)}
    for packet in original:
        here.send(packet, 50)
    net.run()
    packets = there.packets()
    assert len([data for _, data, _, _ in there.got]) == 200 + net.counters.duplicated
    damaged = [packet for packet in packets if packet not in original]
    assert 0 < len(damaged) <= net.counters.damaged + net.counters.duplicated
    assert any(len(packet) < 50 for packet in damaged)
    assert net.counters.sent == 200


def test_reordering_lets_later_ones_overtake() -> None:
    net, here, there = network(Weather(reorder=0.3, reorder_s=1e-3), seed=3)
    for number in range(50):
        here.send(bytes([number]), 1)
        net.run(most_seconds=1e-5)
    net.run()
    numbers = [packet[0] for packet in there.packets()]
    assert numbers != sorted(numbers)
    assert sorted(numbers) == list(range(50))


def test_a_partition_and_its_end() -> None:
    net, here, there = network()
    net.partition(HERE, THERE)
    here.send(b"lost", 4)
    net.run()
    assert there.got == []
    assert net.counters.partitioned == 1
    net.heal()
    here.send(b"back", 4)
    net.run()
    assert there.packets() == [b"back"]


def test_what_is_for_nobody_and_what_comes_too_late() -> None:
    net, here, there = network()
    here.send(b"x", 1, "10.9.9.9")
    here.send(b"y", 1)
    net.collect()
    net.detach(THERE)
    net.run()
    assert net.counters.nobody == 2
    assert there.got == []
    with pytest.raises(ValueError, match="taken"):
        net.attach(there, HERE)


def test_what_is_in_flight_is_bounded() -> None:
    net, here, _ = network(Weather(delay_s=1.0))
    for _ in range(MAX_IN_FLIGHT // 64 + 1):
        for _ in range(64):
            here.send(b"z", 1)
        net.collect()
    assert net.in_flight == MAX_IN_FLIGHT
    assert net.counters.full == 64


def test_time_jumps_to_the_next_deadline_and_no_further_than_asked() -> None:
    net, here, _ = network()
    here.alarms = [3.0, 5.0]
    assert net.step()
    assert net.now == 3.0
    assert not net.step(4.0)
    assert net.now == 3.0
    assert net.run(lambda: not here.alarms)
    assert net.now == 5.0
    assert not net.run(lambda: False)


def test_a_station_that_never_rests_is_found_out() -> None:
    net, here, _ = network()
    here.deadline = lambda: 1.0  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="come to rest"):
        net.run(most_steps=100)


@pytest.mark.parametrize("parted", [False, True])
def test_a_run_is_its_seed(seed: int, parted: bool) -> None:
    def story(chosen: int) -> list[Decision]:
        told: list[Decision] = []
        net = MemoryNetwork(STORM, random.Random(chosen), parted=parted, log=told.append)
        here, there = Station(), Station()
        net.attach(here, HERE)
        net.attach(there, THERE)
        for _ in range(20):
            here.send(bytes(1500), 100)
            net.run()
        return told

    assert story(seed) == story(seed)
    assert story(seed) != story(seed + 1)
    assert {decision.what for decision in story(seed)} == {"delivered", "lost", "duplicated", "damaged"}


def test_a_tap_hears_what_is_sent() -> None:
    heard: list[tuple[bytes, str]] = []
    net = MemoryNetwork(tap=lambda burst, source, now: heard.append((bytes(burst.data), source.ip)))
    here = Station()
    net.attach(here, HERE)
    here.send(b"into the void", 13)
    net.run()
    assert heard == [(b"into the void", HERE)]


@pytest.mark.parametrize("wrong", [{"loss": 1.1}, {"corrupt": -0.1}, {"jitter_s": -1.0}])
def test_weather_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Weather(**wrong)
