"""The states of sessions: every transition of the tables is taken, and no other."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

from agent.fs.control import session as control
from agent.fs.control.session import ControlSession, Ticket
from agent.fs.fuse import session as fuse
from agent.fs.fuse.abi import Opcode
from agent.fs.fuse.session import FuseSession
from tests.support.fs.fuse_peer import FusePeer
from tests.support.fs.memory_filesystem import MemoryFileSystem

NOW = 100.0
TICKET = cast(Ticket, object())


def bind(session: ControlSession) -> None:
    assert session.bind(0, [TICKET], NOW, lambda _more: True) is not None


def close(session: ControlSession) -> None:
    session.close()


def take_back(session: ControlSession) -> None:
    assert session.take_back(NOW + 1) == [TICKET]


WAYS = {
    control.SessionState.NEW: [],
    control.SessionState.BOUND: [bind],
    control.SessionState.TAKEN: [bind, take_back],
    control.SessionState.CLOSED: [close],
}
DEEDS = {
    control.SessionState.BOUND: bind,
    control.SessionState.TAKEN: take_back,
    control.SessionState.CLOSED: close,
}


@pytest.mark.interpreted  # its ticket is none
@pytest.mark.parametrize("wanted", DEEDS)
@pytest.mark.parametrize("state", control.SessionState)
def test_a_control_session_goes_where_its_table_says(
    state: control.SessionState, wanted: control.SessionState
) -> None:
    session = ControlSession("somebody")
    for step in WAYS[state]:
        step(session)
    assert session.state is state
    if wanted in control.LEGAL[state]:
        DEEDS[wanted](session)
        assert session.state is wanted
    else:
        with pytest.raises(AssertionError):
            DEEDS[wanted](session)
        assert session.state is state


def test_every_state_of_a_table_can_be_reached_and_is_in_it() -> None:
    tables: list[tuple[Any, Any]] = [
        (control.SessionState, control.LEGAL),
        (fuse.SessionState, fuse.LEGAL),
    ]
    for states, table in tables:
        assert set(table) == set(states)
        reached = {states.NEW, *itertools.chain.from_iterable(table.values())}
        assert reached == set(states)


@pytest.mark.interpreted
def test_tickets_that_were_bound_lately_are_not_taken_back() -> None:
    session = ControlSession("somebody")
    bind(session)
    assert session.take_back(NOW) == []
    assert session.state is control.SessionState.BOUND
    assert session.bind(0, [TICKET], NOW, lambda _more: False) == [TICKET], "it takes no more room"
    assert session.bind(1, [TICKET], NOW, lambda _more: False) is None


def test_a_session_of_fuse_is_live_from_init_to_its_end() -> None:
    peer = FusePeer(FuseSession(MemoryFileSystem()))
    states = [peer.session.state]
    for opcode in (Opcode.INIT, Opcode.INIT, Opcode.DESTROY, Opcode.INIT):
        if opcode is Opcode.INIT:
            peer.init()
        else:
            peer.ask(opcode)
        states.append(peer.session.state)
    new, live = fuse.SessionState.NEW, fuse.SessionState.LIVE
    assert states == [new, live, live, new, live]
