"""Connections made and ended in bad weather: both sides agree on what there was, whatever got lost."""

from __future__ import annotations

import random

import pytest

from emulator.roce.cm.connection import Connection
from emulator.roce.cm.events import CmEventType
from emulator.roce.cm.limits import CmTimes
from emulator.roce.cm.states import CmState
from tests.support.roce.connection_managers import FIRST, SECOND, CmEnd, CmPair
from tests.support.roce.weather import Weather

SEEDS = 300

STORM = Weather(
    loss=0.25, duplicate=0.2, corrupt=0.05, truncate=0.05, jitter_s=0.002, reorder=0.2, reorder_s=0.02
)
"""Far worse than data would survive: CM messages have fifteen tries each. Without an ICRC below, corruption
reaches the manager, which a NIC would keep away; so it is rare, and occurs."""

QUIET = Weather(loss=0.25, duplicate=0.2, jitter_s=0.002, reorder=0.2, reorder_s=0.02)
TIMES = CmTimes(response_exponent=12, disconnect_tries=15)


class _Users:
    """What programs do at both ends: accept or reject, establish, and disconnect after a while."""

    def __init__(self, pair: CmPair, dice: random.Random) -> None:
        self.pair = pair
        self.dice = dice
        self.happened: dict[tuple[str, int], list[str]] = {}
        self.established: dict[str, set[int]] = {FIRST: set(), SECOND: set()}
        """Queue pairs of the active side, as each side saw them become connected."""

    def settle(self) -> None:
        """Go on until nothing happens any more."""
        pair = self.pair
        while pair.network.run(lambda: pair.first.events or pair.second.events, most_seconds=200.0):
            self.act()

    def act(self) -> None:
        for end in (self.pair.first, self.pair.second):
            events, end.events[:] = end.events[:], []
            for event in events:
                self.happened.setdefault((end.ip, event.connection.local_id), []).append(event.type.name)
                self._answer(end, event.type, event.connection)

    def _answer(self, end: CmEnd, kind: CmEventType, connection: Connection) -> None:
        now = self.pair.now
        if kind is CmEventType.CONNECT_REQUEST:
            if self.dice.random() < 0.8:
                connection.accept(end.parameters(), now)
            else:
                connection.reject(now, b"no")
        elif kind is CmEventType.CONNECT_RESPONSE:
            connection.establish(now)
            self.established[end.ip].add(connection.local_qpn)
            if self.dice.random() < 0.5:
                connection.disconnect(now)
        elif kind is CmEventType.ESTABLISHED:
            self.established[end.ip].add(connection.remote_qpn)
            if self.dice.random() < 0.5:
                connection.disconnect(now)


def _run(weather: Weather, seed: int) -> tuple[CmPair, _Users, list[Connection]]:
    dice = random.Random(seed)
    pair = CmPair(weather, seed, TIMES)
    users = _Users(pair, dice)
    connections = [pair.first.request(SECOND, pair.now) for _ in range(3)]
    users.settle()
    return pair, users, connections


def test_loss_duplicates_and_reordering_change_nothing(seed: int) -> None:
    outcomes = set()
    for number in range(SEEDS):
        pair, users, connections = _run(QUIET, seed * SEEDS + number)
        # Whoever is connected for one side is, or was, for the other.
        assert users.established[FIRST] >= users.established[SECOND]
        for connection in connections:
            story = users.happened[FIRST, connection.local_id]
            outcomes.add(" ".join(story))
            assert story[0] in ("CONNECT_RESPONSE", "REJECTED")
            assert connection.state in (CmState.ESTABLISHED, CmState.CLOSED)
            if connection.state is CmState.ESTABLISHED:
                passive = pair.second.manager.find(connection.remote_qpn)
                assert passive is not None
                assert passive.state is CmState.ESTABLISHED
                assert (passive.sq_psn, passive.rq_psn) == (connection.rq_psn, connection.sq_psn)
    assert outcomes == {
        "REJECTED",
        "CONNECT_RESPONSE",
        "CONNECT_RESPONSE DISCONNECTED TIMEWAIT_EXIT",
    }


def test_damage_that_nobody_below_has_noticed_crashes_nothing(seed: int) -> None:
    for number in range(SEEDS):
        pair, users, connections = _run(STORM, seed * SEEDS + number)
        for connection in connections:
            assert connection.state in (CmState.ESTABLISHED, CmState.CLOSED, CmState.REP_RECEIVED)
        for connection in connections:
            connection.destroy(pair.now)
        users.settle()
        assert pair.network.in_flight == 0
        assert pair.first.manager.connections == 0


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 8])
def test_the_peer_vanishes_after_so_many_messages(after: int) -> None:
    """Whatever has been said when the peer goes, the other comes to an end of its own."""
    pair = CmPair(seed=after, times=TIMES)
    users = _Users(pair, random.Random(after))
    connection = pair.first.request(SECOND, pair.now)
    gone = False
    for _ in range(200):
        sent = len(pair.first.sent) + len(pair.second.sent)
        if sent >= after and not gone:
            gone = True
            pair.network.detach(SECOND)
        if not pair.network.step(pair.now + 100.0):
            break
        users.act()
    if connection.state is CmState.ESTABLISHED:
        connection.disconnect(pair.now)
        pair.network.run()
    assert connection.state is CmState.CLOSED
    assert pair.first.manager.connections == 0


def test_a_run_is_its_seed() -> None:
    stories = [_run(STORM, 7)[1].happened for _ in range(2)]
    assert stories[0] == stories[1]
