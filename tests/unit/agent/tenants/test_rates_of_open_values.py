"""The bandwidth of a tenant whose values stay open: they are read again and again without a new get."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from agent.pool.counters import MissCause
from agent.pool.map.document import VolumeWish, plan_pool
from agent.pool.read.get import SlotReader
from agent.pool.write.put import SlotWriter
from agent.tenancy.open_rates import OpenRates
from tests.support.pool.memory_pool import key_of, nguid_of
from tests.unit.agent.tenants.test_quotas import ROOT, SIZE, Shelf


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_a_value_that_stays_open_is_read_again_at_the_tenants_rate_alone(shelf: Shelf) -> None:
    """A guest may bind one ticket and read it over and over."""
    size = 1 << 16
    shelf.limit(bandwidth=10 * size)
    agent, value = shelf.agent(), random.Random(2).randbytes(size)
    agent.put("blue", 1, value)
    channel, reading, into = agent.channel, SlotReader(agent.volumes["blue"], key_of(1)), bytearray(size)
    began = channel.now()
    for _ in range(30):
        for half in (0, size // 2):
            part = memoryview(into)[half : half + size // 2]
            assert channel.run(reading.read(channel, half, part, channel.now() + 5)) == size // 2
        assert into == value
    assert channel.now() - began == pytest.approx(3.0, abs=0.5), "30 times at 10 a second"
    reads = [channel.run(reading.read(channel, 0, memoryview(into), channel.now() + 0.05)) for _ in range(9)]
    assert (reads[-1], reading.cause) == (0, MissCause.LATE)


def test_a_reader_keeps_what_is_open_there_to_the_rate(shelf: Shelf) -> None:
    agent = shelf.agent()
    agent.put("blue", 1, bytes(1 << 16))
    rates = OpenRates(shelf.pool_map, list(agent.volumes.values()), 2)
    channel, reading = agent.channel, SlotReader(agent.volumes["blue"], key_of(1))

    def seconds(times: int) -> float:
        began, into = channel.now(), memoryview(bytearray(1 << 16))
        for _ in range(times):
            assert channel.run(reading.read(channel, 0, into, channel.now() + 5)) == 1 << 16
        return channel.now() - began

    assert seconds(10) == 0.0
    shelf.limit(bandwidth=10 << 16)
    rates.follow(shelf.pool_map)
    assert seconds(20) == pytest.approx(2.0, abs=0.5)
    assert agent.volumes["blue-files"].bandwidth is None


def test_values_that_never_come_to_their_end_count_as_well(shelf: Shelf) -> None:
    unit = 1 << 16
    wish = VolumeWish(name="blue", value_bytes=4 * unit, unit_bytes=unit, share=0.8, tenant="blue")
    shelf.pool_map = plan_pool([(nguid_of(number), SIZE) for number in range(2)], [wish], ROOT)
    shelf.limit(bandwidth=10 * unit)
    agent = shelf.agent()
    channel, data = agent.channel, memoryview(bytes(2 * unit))
    began = channel.now()
    for number in range(10):
        writing = SlotWriter(agent.volumes["blue"], key_of(number), length=4 * unit)
        channel.run(writing.write(channel, 0, data, channel.now() + 5))
        writing.drop()
    assert channel.now() - began == pytest.approx(2.0, abs=0.5), "20 units at 10 a second"
    began = channel.now()
    for number in range(10, 15):
        writing = SlotWriter(agent.volumes["blue"], key_of(number), length=4 * unit)
        channel.run(writing.write(channel, 0, data, channel.now() + 5))
        assert channel.run(writing.write(channel, 2 * unit, data, channel.now() + 5))
    assert channel.now() - began == pytest.approx(2.0, abs=0.5), "each byte counts once"
