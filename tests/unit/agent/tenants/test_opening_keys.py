"""A process that seals nothing opens what another one seals, before, amid and after a rotation."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.pool.counters import MissCause
from agent.pool.read.get import SlotReader
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Volume
from agent.tenancy.opening_keys import OpeningKeys
from tests.support.pool.memory_channel import MemoryChannel
from tests.support.pool.memory_pool import key_of
from tests.unit.agent.tenants.test_key_rotation import ROOT, Agent, Shelf, value_of


class Opening:
    """A process that opens values by the pool map of now."""

    def __init__(self, shelf: Shelf) -> None:
        self.channel = MemoryChannel(shelf.namespaces)
        entry = shelf.pool_map.volumes[0]
        settings, secret = shelf.pool_map.settings(entry), shelf.pool_map.secret(entry, ROOT)
        self.volume = Volume(settings, secret, DirectoryCache(1 << 20), Timing())
        self.keys = OpeningKeys(shelf.pool_map, [self.volume], ROOT)

    def get(self, number: int) -> bytes | MissCause:
        reading, into = SlotReader(self.volume, key_of(number)), bytearray(self.volume.settings.value_bytes)
        got = self.channel.run(reading.read(self.channel, 0, memoryview(into), self.channel.now() + 5))
        cause = reading.cause
        reading.close()
        return bytes(into[:got]) if cause is None else cause


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_it_follows_a_rotation(shelf: Shelf) -> None:
    agent, opening = Agent(shelf), Opening(shelf)
    agent.put(1)
    assert opening.get(1) == value_of(1)
    rotated = shelf.rotate()
    opening.keys.follow(rotated)
    assert opening.get(1) == value_of(1)
    newer = Agent(shelf)  # it starts amid the rotation, and so seals with the new key
    newer.put(2)
    assert [opening.get(number) for number in (1, 2)] == [value_of(1), value_of(2)]
    opening.keys.follow(shelf.end())
    assert opening.get(2) == value_of(2)
    assert opening.get(1) is MissCause.WRONG_KEY


def test_it_starts_amid_a_rotation(shelf: Shelf) -> None:
    Agent(shelf).put(1)
    shelf.rotate()
    Agent(shelf).put(2)
    opening = Opening(shelf)
    assert [opening.get(number) for number in (1, 2)] == [value_of(1), value_of(2)]


def test_a_map_with_the_same_keys_changes_none(shelf: Shelf) -> None:
    opening = Opening(shelf)
    codec = opening.volume.codec
    opening.keys.follow(shelf.pool_map)
    assert opening.volume.codec is codec
