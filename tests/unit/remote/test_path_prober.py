"""What is read by one path of what was written by the other, while other agents write there as well."""

from __future__ import annotations

from typing import cast

import pytest

from agent.errors import G35Error
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.map.document import VolumeWish, plan_pool
from agent.pool.map.replicas import superblock_copies_are, write_superblock
from agent.pool.map.superblock import BLOCK_BYTES, PROOF_OFFSET
from agent.remote import path_prober
from agent.remote.channel import WorkerChannel
from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from agent.remote.path_prober import TRIES, PathProber, PathProberThread, shows
from nvmeof.host.namespaces import NamespaceInfo
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace, MemoryPending
from tests.support.pool.memory_pool import nguid_of
from tests.support.waiting import wait_until

NGUID, SIZE = nguid_of(1), 16 << 20
ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")
POOL = plan_pool([(NGUID, SIZE)], [VolumeWish(name="v", value_bytes=65536, share=0.5)], ROOT)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_prober, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(path_prober, "EVERY_SECONDS", 0.01)


class Paths(MemoryChannel):
    """A configured path and one by discovery, each to a medium."""

    def __init__(self, first: MemoryNamespace, second: MemoryNamespace, *, carries_pool: bool = True) -> None:
        super().__init__([first])
        for medium in (first, second) if carries_pool else ():
            channel = MemoryChannel([medium])
            channel.run(write_superblock(channel, 0, NGUID, POOL))
        enclosures = [Enclosure(name, nqn="nqn.x", discovered=name == "pod") for name in ("own", "pod")]
        for each in enclosures:
            each.session = object()  # type: ignore[assignment]
            each.namespaces = (NamespaceInfo(1, NGUID, SIZE, 4096),)
        self.media = dict(zip(enclosures, (first, second), strict=True))
        self.fabric = Fabric(enclosures)
        self.fabric.adopt([NGUID])
        self.others = 0
        """How many writes of this agent another agent writes over."""
        for medium in (first, second):
            medium.reads = medium.writes = 0

    def go_by(self, fabric: Fabric) -> Fabric:
        self.namespaces = [self.media[fabric.enclosures[0]]]
        return self.fabric

    def write(self, namespace: int, offset: int, parts, *, more: bool = False) -> MemoryPending:  # type: ignore[no-untyped-def]
        assert offset == PROOF_OFFSET
        pending = super().write(namespace, offset, parts)
        if self.others:
            self.others -= 1
            self.namespaces[0].store(offset, [b"\x77" * BLOCK_BYTES])
        return pending

    def ask(self) -> bool | None:
        [unproven] = self.fabric.unproven()
        return shows(cast(WorkerChannel, self), unproven)


def test_two_ways_to_one_medium_are_one_and_two_media_are_two() -> None:
    medium = MemoryNamespace(SIZE)
    assert Paths(medium, medium).ask() is True
    copy = MemoryNamespace(SIZE)
    paths = Paths(medium, copy)
    assert paths.ask() is False
    assert copy.writes == 0, "nothing is written to what may be another's"
    assert paths.run(superblock_copies_are(paths, 0, NGUID, POOL)), "the superblock is as it was"


def test_other_agents_that_write_there_too_do_not_make_two_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    medium = MemoryNamespace(SIZE)
    paths = Paths(medium, medium)
    paths.others = TRIES - 1
    assert paths.ask() is True
    paths.others = TRIES
    assert paths.ask() is None, "nothing was found out"
    # It is no mismatch, is said of nobody, and is tried again later.
    paths.others = TRIES
    prover = PathProber(paths.fabric)
    prover.turn(cast(WorkerChannel, paths))
    assert paths.fabric.contested == {}
    assert len(paths.fabric.unproven()) == 1
    monkeypatch.setattr(path_prober, "AGAIN_SECONDS", 0.0)
    paths.others = TRIES
    prover = PathProber(paths.fabric)
    prover.turn(cast(WorkerChannel, paths))
    prover.turn(cast(WorkerChannel, paths))
    assert [way.enclosure.name for way in paths.fabric.ways[0]] == ["own", "pod"]


def test_paths_that_are_gone_are_not_remembered() -> None:
    """A discovery controller may list others every time."""
    medium = MemoryNamespace(SIZE)
    paths = Paths(medium, medium)
    paths.others = TRIES
    prover = PathProber(paths.fabric)
    prover._not_before = {(paths.fabric.enclosures[0], bytes([each])): 0.0 for each in range(100)}
    prover.turn(cast(WorkerChannel, paths))
    assert len(prover._not_before) == 1


def test_other_agents_that_write_there_too_do_not_make_one_of_two() -> None:
    copy = MemoryNamespace(SIZE)
    paths = Paths(MemoryNamespace(SIZE), copy)
    paths.others = TRIES - 1
    assert paths.ask() is False
    paths.others = TRIES
    assert paths.ask() is None
    assert copy.writes == 0


def test_a_proof_ends_where_the_agent_does() -> None:
    medium = MemoryNamespace(SIZE)
    paths = Paths(medium, medium)
    paths.others = TRIES
    [unproven] = paths.fabric.unproven()
    assert shows(cast(WorkerChannel, paths), unproven, lambda _: True) is None
    assert medium.writes == 1
    PathProber(paths.fabric).turn(cast(WorkerChannel, paths), pause=lambda _: True)
    assert medium.writes == 1, "no other is begun"


def test_a_thread_of_its_own_finds_it_out() -> None:
    medium = MemoryNamespace(SIZE)
    paths = Paths(medium, medium)
    thread = PathProberThread(paths.fabric, lambda: cast(WorkerChannel, paths))
    thread.start()
    try:
        wait_until(lambda: len(paths.fabric.ways[0]) == 2)
    finally:
        thread.stop()


def test_where_nothing_of_ours_lies_nothing_is_written() -> None:
    blank = MemoryNamespace(SIZE)
    paths = Paths(blank, blank, carries_pool=False)
    assert paths.ask() is None
    assert blank.writes == 0


@pytest.mark.parametrize("which", [0, 1])
def test_what_does_not_answer_says_nothing(which: int) -> None:
    media = MemoryNamespace(SIZE), MemoryNamespace(SIZE)
    paths = Paths(*media)
    media[which].down = True
    with pytest.raises(G35Error):
        paths.ask()
    # The prover leaves it open, and comes again later.
    prover = PathProber(paths.fabric)
    prover.turn(cast(WorkerChannel, paths))
    asked = sum(each.reads for each in media)
    prover.turn(cast(WorkerChannel, paths))
    assert sum(each.reads for each in media) == asked
    assert len(paths.fabric.unproven()) == 1
    assert paths.fabric.contested == {}


def test_a_turn_ends_though_there_is_more_to_ask() -> None:
    medium = MemoryNamespace(SIZE)
    paths = Paths(medium, medium)
    PathProber(paths.fabric).turn(cast(WorkerChannel, paths), seconds=0.0)
    assert medium.reads == 0
    assert len(paths.fabric.unproven()) == 1


def test_what_was_found_is_published() -> None:
    medium = MemoryNamespace(SIZE)
    paths = Paths(medium, medium)
    PathProber(paths.fabric).turn(cast(WorkerChannel, paths))
    assert [way.enclosure.name for way in paths.fabric.ways[0]] == ["own", "pod"]
