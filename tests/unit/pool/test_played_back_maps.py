"""Old maps are played back under a serving agent. They bear the seal, so they are genuine as far as they go.

The pool has grown by one namespace, which old maps do not name. So looks at what an old map names prove
nothing of the newest one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.attach.map_history import MapHistory
from agent.errors import G35Error
from agent.membership.join import join, settle
from agent.pool.map import commit
from agent.pool.map.commit import change_map, simply
from agent.pool.map.document import MapNamespace, PoolMap, plan_pool
from agent.pool.map.map_seal import MapSeal
from agent.pool.map.replicas import KEY_PLACES, read_copies, write_superblock
from agent.pool.map.superblock import COPY_OFFSETS
from agent.pool.map.tenant_changes import with_limits, without_key
from tests.support.sim.forged_pool import (
    BLOCKS,
    KEYS,
    NEWCOMER,
    NGUIDS,
    NUMBERS,
    ON_KEYS,
    SIZE,
    WISHES,
    AgentOfPool,
    Viewer,
)
from tests.support.sim.forgeries import ROOT
from tests.support.sim.two_faced_flash import TwoFacedNamespace

OLD = (0, 1, 2, 3)
"""The namespaces that the pool was formatted with."""
JOINED = 4
SAID = "no namespace carries pool map"


class GrownPool:
    """A pool whose fifth namespace joined; the flash is shared by all who look."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared = [TwoFacedNamespace(SIZE) for _ in NGUIDS]
        self.viewer = Viewer(self.shared)
        self.seal = MapSeal(ROOT)
        self.formatted = self.seal.put(plan_pool(BLOCKS, WISHES, ROOT, KEYS))
        self.play_back(self.formatted, *OLD)
        self.agent = AgentOfPool(Viewer(self.shared), folder)
        channel = self.viewer.channel
        self.joined = channel.run(join(channel, self.formatted, [NEWCOMER], NUMBERS, seal=self.seal))
        self.settled = channel.run(settle(channel, self.joined, NUMBERS, self.seal))

    def play_back(self, pool_map: PoolMap, *numbers: int) -> None:
        for number in numbers:
            places = KEY_PLACES if number in ON_KEYS else COPY_OFFSETS
            self.viewer.channel.run(
                write_superblock(self.viewer.channel, number, NGUIDS[number], pool_map, places)
            )

    def change(self, wanted: PoolMap) -> PoolMap:
        """As a verb that reaches all."""
        channel = self.viewer.channel
        change = simply(lambda _: wanted)
        return channel.run(change_map(channel, self.settled, NUMBERS, change, seal=self.seal)).pool_map

    def carried(self, number: int) -> list[PoolMap | None]:
        member: MapNamespace = self.settled.namespaces[
            [each.nguid for each in self.settled.namespaces].index(NGUIDS[number].hex())
        ]
        copies = self.viewer.channel.run(read_copies(self.viewer.channel, number, member, {}))
        return [each.pool_map for each in copies]

    def start_again(self) -> None:
        self.agent.close()
        self.agent = AgentOfPool(self.agent.viewer, self.folder)

    def look(self, rounds: int = 3) -> PoolMap:
        for _ in range(rounds):
            self.agent.look()
        return self.agent.watch.pool_map


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrownPool]:
    monkeypatch.setattr(commit, "PAUSE_SECONDS", 0.0)
    made = GrownPool(tmp_path)
    yield made
    made.agent.close()


def order(pool: GrownPool) -> list[str]:
    return [each.nguid for each in pool.settled.namespaces]


def test_the_numbers_of_the_namespaces_are_those_of_the_map(pool: GrownPool) -> None:
    assert order(pool) == [nguid.hex() for nguid in NGUIDS]
    assert (pool.formatted.version, pool.joined.version, pool.settled.version) == (1, 2, 3)


def test_while_a_namespace_that_joined_carries_the_newest_map_it_is_gone_by(
    pool: GrownPool, caplog: pytest.LogCaptureFixture
) -> None:
    assert pool.look() == pool.settled
    pool.play_back(pool.formatted, *OLD)
    assert pool.look() == pool.settled
    assert SAID not in caplog.text


def test_a_map_that_few_have_carried_is_gone_by_while_a_namespace_that_joined_carries_it(
    pool: GrownPool, caplog: pytest.LogCaptureFixture
) -> None:
    """It was never noted as seen on most."""
    pool.play_back(pool.formatted, *OLD[:-1])
    assert pool.look() == pool.settled
    MapHistory(pool.folder).refuse(pool.formatted)
    pool.play_back(pool.formatted, *OLD)
    assert pool.look() == pool.settled
    assert SAID not in caplog.text


@pytest.mark.expects_log(SAID)
def test_no_older_map_is_followed_than_one_that_most_namespaces_have_carried(
    pool: GrownPool, caplog: pytest.LogCaptureFixture
) -> None:
    assert pool.look() == pool.settled
    pool.play_back(pool.formatted, *OLD)
    pool.play_back(pool.joined, JOINED)
    assert pool.look() == pool.settled
    assert caplog.text.count(SAID) == 1, "once"
    with pytest.raises(G35Error, match="version 2, and this agent has seen 3"):
        pool.start_again()


@pytest.mark.expects_log(SAID)
def test_nor_by_an_agent_that_was_started_meanwhile(pool: GrownPool) -> None:
    assert pool.look() == pool.settled
    pool.play_back(pool.formatted, *OLD)
    pool.start_again()
    assert pool.look() == pool.settled
    pool.play_back(pool.joined, JOINED)
    assert pool.look() == pool.settled


@pytest.mark.expects_log(SAID, "was erased")
def test_a_newer_map_is_followed_afterwards_and_a_key_that_is_over_is_over(pool: GrownPool) -> None:
    assert pool.look() == pool.settled
    erased = pool.seal.put(without_key(pool.formatted, "blue"))
    pool.play_back(erased, *OLD, JOINED)
    by = pool.look()
    assert by.version == pool.settled.version
    assert by.namespaces == pool.settled.namespaces
    assert [each.settings.name for each in pool.agent.volumes if each.erased] == ["blue"]
    pool.play_back(pool.settled, *OLD, JOINED)
    newest = pool.change(with_limits(pool.settled, "red", quota_slots=7))
    assert pool.look() == newest


@pytest.mark.expects_log(SAID, "it is blank", "carries the pool's map again")
def test_a_map_that_few_have_carried_is_left_once_no_namespace_carries_it(pool: GrownPool) -> None:
    """As a join that ended after its first copy was written, and another change since."""
    pool.play_back(pool.formatted, *OLD)
    pool.viewer.channel.namespaces[JOINED].blocks.clear()
    assert pool.look() == pool.formatted
    pool.play_back(pool.joined, 0)
    assert pool.look() == pool.joined
    other = pool.seal.put(with_limits(pool.formatted, "red", quota_slots=9))
    assert other.version == pool.joined.version
    pool.play_back(other, *OLD)
    assert pool.look() == other


def test_the_newest_map_is_written_back_where_old_ones_lie(pool: GrownPool) -> None:
    assert pool.look() == pool.settled
    pool.play_back(pool.formatted, *OLD)
    pool.look()
    pool.agent.mend()
    for number in (*OLD, JOINED):
        assert all(each == pool.settled for each in pool.carried(number)), number
    assert pool.look() == pool.settled
