"""A look at all namespaces of a pool: one map is read once, and an enclosure that hangs holds up no other."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from agent.attach.inspect_namespaces import LOOKS_IN_FLIGHT, look_at_all, look_round
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.map.document import PoolMap, VolumeWish, plan_pool
from agent.pool.map.inspect import Content, Inspection
from agent.pool.map.replicas import write_superblock
from agent.pool.map.superblock import BLOCK_BYTES, COPY_OFFSETS, MAP_IO_SECONDS
from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from nvmeof.host.namespaces import NamespaceInfo
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import nguid_of

SIZE = 64 << 20
ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")
WISH = VolumeWish(name="kv", value_bytes=1 << 16, share=1.0)


class Pod:
    """Enclosures of some namespaces each, all of one pool, or blank."""

    def __init__(self, enclosures: int, drives: int, *, blank: bool = False) -> None:
        count = enclosures * drives
        self.namespaces = [MemoryNamespace(SIZE) for _ in range(count)]
        self.channel = MemoryChannel(self.namespaces)
        self.pool_map = plan_pool([(nguid_of(number), SIZE) for number in range(count)], [WISH], ROOT)
        self._rows = [
            [self._row(number) for number in range(first, first + drives)]
            for first in range(0, count, drives)
        ]
        if not blank:
            for number in range(count):
                self.write(number, self.pool_map)

    @staticmethod
    def _row(number: int) -> tuple[int, NamespaceInfo]:
        return number, NamespaceInfo(number + 1, nguid_of(number), SIZE, 4096)

    def write(self, number: int, pool_map: PoolMap) -> None:
        self.channel.run(write_superblock(self.channel, number, nguid_of(number), pool_map))

    def look(self, seconds: float = math.inf) -> list[Inspection]:
        for each in self.namespaces:
            each.reads = 0
        found = self.channel.run(look_at_all(self.channel, self._rows, self.channel.now() + seconds))
        assert sorted(found) == list(range(len(self.namespaces)))
        return [found[number] for number in range(len(self.namespaces))]


def test_a_map_is_read_once_and_of_its_other_copies_the_heads() -> None:
    pod = Pod(4, 25)
    before = pod.channel.tally("").flash_bytes_read
    seen = pod.look()
    bytes_read = pod.channel.tally("").flash_bytes_read - before
    maps = {id(each) for inspection in seen for each in inspection.maps}
    assert len(maps) == 1, "one object, so that nobody compares maps row by row"
    assert all(each.superblock is not None and each.superblock.pool_map == pod.pool_map for each in seen)
    copies = len(COPY_OFFSETS) * len(seen)
    whole = BLOCK_BYTES * (2 + len(pod.pool_map.encode()) // BLOCK_BYTES)
    assert bytes_read == copies * BLOCK_BYTES + whole
    assert sum(each.reads for each in pod.namespaces) == copies + 1


def test_a_head_of_a_map_that_nobody_has_whole_is_no_copy() -> None:
    pod = Pod(1, 3)
    later = pod.pool_map.model_copy(update={"version": 2})
    pod.write(2, later)
    for offset in COPY_OFFSETS:
        pod.namespaces[2].flip(offset + BLOCK_BYTES, 0)
    first, second, torn = pod.look()
    assert first.maps[0] is second.maps[0]
    assert (torn.content, torn.detail) == (Content.FOREIGN, "a damaged superblock")
    pod.write(1, later)
    assert [each.content for each in pod.look()] == 3 * [Content.POOL]


def test_another_map_is_read_for_itself() -> None:
    pod = Pod(2, 2)
    pod.write(3, pod.pool_map.model_copy(update={"version": 2}))
    versions = [each.superblock.pool_map.version for each in pod.look() if each.superblock is not None]
    assert versions == [1, 1, 1, 2]


def test_an_enclosure_that_hangs_holds_up_no_other_and_not_for_longer_than_the_look() -> None:
    pod = Pod(3, 9)
    for number in range(9):
        pod.namespaces[number].hung = True
    began = pod.channel.now()
    seen = pod.look(MAP_IO_SECONDS)
    assert [each.content for each in seen] == 9 * [Content.UNREADABLE] + 18 * [Content.POOL]
    assert {each.detail for each in seen[:9]} == {"late"}
    assert pod.channel.now() - began == pytest.approx(MAP_IO_SECONDS, abs=0.1)
    # Without an end of the look each has its own time, some at once.
    began = pod.channel.now()
    pod.look()
    turns = math.ceil(9 / LOOKS_IN_FLIGHT)
    assert pod.channel.now() - began == pytest.approx(turns * MAP_IO_SECONDS, abs=0.5)


def test_blank_namespaces_are_looked_at_from_both_ends() -> None:
    pod = Pod(2, 5, blank=True)
    pod.namespaces[4].blocks = {SIZE - 4096: b"\x01" * 4096}
    contents = [each.content for each in pod.look()]
    assert contents == 4 * [Content.BLANK] + [Content.FOREIGN] + 5 * [Content.BLANK]


def test_no_namespace_is_no_look() -> None:
    channel = MemoryChannel([])
    assert channel.run(look_at_all(channel, [], math.inf)) == {}


def test_an_enclosure_that_connects_amid_the_look_brings_no_newcomers() -> None:
    """What it shows may be of the pool, whose map is not known yet."""
    pod = Pod(2, 1)
    shelves = [Enclosure(f"shelf-{number}", cast(Any, object())) for number in range(2)]
    for number, shelf in enumerate(shelves):
        shelf.namespaces = (NamespaceInfo(1, nguid_of(number), SIZE, 4096),)
    fabric = Fabric(shelves[:1])
    [(_, _, seen)] = look_round(fabric, cast(Any, pod.channel))
    assert seen.content is Content.POOL
    fabric.enclosures = shelves
    fabric.refresh()
    assert fabric.strays
    assert not fabric.newcomers()
    fabric.adopt([nguid_of(0)])
    assert list(fabric.newcomers()) == [nguid_of(1).hex()]
