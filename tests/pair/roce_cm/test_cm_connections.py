"""Two connection managers over a network in memory: what is agreed, what is refused, how it ends."""

from __future__ import annotations

import errno

import pytest

from emulator.roce.cm.attributes import queue_pair_attributes
from emulator.roce.cm.events import CmEventType, ConnectionParameters
from emulator.roce.cm.limits import CmTimes
from emulator.roce.cm.states import LEGAL, CmState
from emulator.roce.nic.verbs import Access, Mtu, QpState, VerbsError
from emulator.roce.wire.cm_ip import PortSpace
from emulator.roce.wire.cm_messages import ConnectReject, ConnectReply, ConnectRequest, RejectReason
from tests.support.roce.connection_managers import FIRST, PORT, SECOND, CmEnd, CmPair


def test_every_state_can_be_reached_and_left_for_the_end() -> None:
    reached = {CmState.IDLE}
    while True:
        further = reached.union(*(LEGAL[state] for state in reached))
        if further == reached:
            break
        reached = further
    assert reached == set(CmState)
    assert all(LEGAL[state] or state is CmState.CLOSED for state in CmState)


def test_private_data_both_ways_and_what_both_ends_agree_on() -> None:
    pair = CmPair(mtu=Mtu.MTU_1024)
    pair.first.manager.mtu = Mtu.MTU_1024
    asked = pair.first.parameters(b"hello", depth=5, retry_count=3, rnr_retry_count=6)
    active, passive = pair.request(asked)
    assert passive.local_port == PORT
    assert (passive.remote_ip, passive.remote_port) == (FIRST, active.local_port)
    given = ConnectionParameters(0x222, b"welcome", responder_resources=9, initiator_depth=2)
    passive.accept(given, pair.now)
    pair.run(lambda: pair.first.events)
    answer = pair.first.events.pop(0)
    assert answer.type is CmEventType.CONNECT_RESPONSE
    assert answer.private_data == b"welcome".ljust(196, b"\0")
    assert answer.parameters is not None
    # Crossed: 9 of the peer's own wish became 5, for we asked for no more; its depth of 2 is our limit.
    assert (answer.parameters.initiator_depth, answer.parameters.responder_resources) == (5, 2)
    active.establish(pair.now, b"go")
    pair.run(lambda: pair.second.events)
    established = pair.second.events.pop(0)
    assert established.type is CmEventType.ESTABLISHED
    assert established.private_data == b"go".ljust(224, b"\0")
    assert active.state is passive.state is CmState.ESTABLISHED
    for mine, other in ((active, passive), (passive, active)):
        ready, _ = queue_pair_attributes(mine, QpState.RTR)
        sending, _ = queue_pair_attributes(other, QpState.RTS)
        assert ready.rq_psn == sending.sq_psn
        assert ready.dest_qpn == other.local_qpn
        assert ready.path_mtu is Mtu.MTU_1024
        assert ready.max_dest_rd_atomic == sending.max_rd_atomic
        assert ready.av is not None
        assert ready.av.ip == mine.remote_ip
        assert (sending.retry_count, sending.rnr_retry) == ((3, 6) if other is passive else (3, 7))
    assert (active.responder_resources, active.initiator_depth) == (2, 5)


def test_a_request_brings_what_the_peer_asked_for() -> None:
    pair = CmPair()
    parameters = ConnectionParameters(0x77, bytes(range(56)), 3, 7, True, 2, 1, True)
    pair.first.request(SECOND, pair.now, parameters)
    pair.run(lambda: pair.second.events)
    (event,) = pair.second.events
    assert event.private_data == bytes(range(56))
    assert event.parameters == ConnectionParameters(0x77, bytes(range(56)), 7, 3, True, 2, 1, True)


def test_access_rights_come_with_the_request() -> None:
    pair = CmPair()
    connection = pair.first.manager.create(pair.first.events.append)
    before, _ = queue_pair_attributes(connection, QpState.INIT)
    assert before.access == Access(0)
    for state in (QpState.RTR, QpState.RTS, QpState.ERR):
        with pytest.raises(VerbsError, match="knows nothing"):
            queue_pair_attributes(connection, state)
    active, passive = pair.request(pair.first.parameters(depth=0))
    after, _ = queue_pair_attributes(active, QpState.INIT)
    assert after.access == Access.REMOTE_WRITE
    passive.accept(pair.second.parameters(depth=4), pair.now)
    assert queue_pair_attributes(passive, QpState.INIT)[0].access == Access.REMOTE_WRITE
    active, _ = CmPair().connect()
    assert Access.REMOTE_READ in queue_pair_attributes(active, QpState.INIT)[0].access


@pytest.mark.parametrize("by_active", [True, False])
def test_disconnected_by_either_side(by_active: bool) -> None:
    pair = CmPair()
    active, passive = pair.connect()
    (active if by_active else passive).disconnect(pair.now)
    pair.run(lambda: pair.first.events and pair.second.events)
    assert pair.first.kinds() == pair.second.kinds() == ["DISCONNECTED"]
    assert [event.status for event in pair.first.events + pair.second.events] == [0, 0]
    active.disconnect(pair.now)
    passive.disconnect(pair.now)
    pair.run(lambda: len(pair.first.events) + len(pair.second.events) == 4)
    assert pair.first.kinds() == pair.second.kinds() == ["DISCONNECTED", "TIMEWAIT_EXIT"]
    assert pair.first.manager.connections == pair.second.manager.connections == 0


def test_disconnected_by_both_sides_at_once() -> None:
    pair = CmPair()
    active, passive = pair.connect()
    active.disconnect(pair.now)
    passive.disconnect(pair.now)
    pair.network.run()
    assert pair.first.kinds() == pair.second.kinds() == ["DISCONNECTED", "TIMEWAIT_EXIT"]


def test_nobody_listens() -> None:
    pair = CmPair()
    pair.listener.close()
    pair.listener.close()
    connection = pair.first.request(SECOND, pair.now)
    pair.run(lambda: pair.first.events)
    (event,) = pair.first.events
    assert (event.type, event.status) == (CmEventType.REJECTED, RejectReason.INVALID_SERVICE_ID)
    assert connection.state is CmState.CLOSED
    assert pair.first.manager.connections == pair.second.manager.connections == 0


def test_rejected_by_the_consumer_with_its_own_reason() -> None:
    pair = CmPair()
    _, passive = pair.request()
    passive.reject(pair.now, b"\0\0\6\0")
    pair.run(lambda: pair.first.events)
    (event,) = pair.first.events
    assert (event.type, event.status) == (CmEventType.REJECTED, RejectReason.CONSUMER_DEFINED)
    assert event.private_data == b"\0\0\6\0".ljust(148, b"\0")
    assert pair.second.manager.connections == 0
    with pytest.raises(VerbsError):
        passive.accept(pair.second.parameters(), pair.now)


def test_rejected_by_the_active_side_after_the_reply() -> None:
    pair = CmPair()
    active, passive = pair.request()
    passive.accept(pair.second.parameters(), pair.now)
    pair.run(lambda: pair.first.events)
    active.reject(pair.now, b"changed my mind")
    pair.run(lambda: pair.second.events)
    (event,) = pair.second.events
    assert (event.type, event.status) == (CmEventType.REJECTED, RejectReason.CONSUMER_DEFINED)
    pair.network.run()
    assert pair.first.manager.connections == pair.second.manager.connections == 0


def test_a_path_mtu_that_is_too_large() -> None:
    pair = CmPair(mtu=Mtu.MTU_1024)
    pair.first.request(SECOND, pair.now)
    pair.run(lambda: pair.first.events)
    (event,) = pair.first.events
    assert (event.type, event.status) == (CmEventType.REJECTED, RejectReason.INVALID_PATH_MTU)
    (rejection,) = pair.second.sent
    assert isinstance(rejection, ConnectReject)
    assert rejection.information == bytes([Mtu.MTU_1024 << 4])


def test_a_queue_pair_that_is_still_in_a_connection_is_stale() -> None:
    pair = CmPair()
    _, passive = pair.connect()
    # The machine restarts: it knows nothing of the connection, and happens to use the same queue pair.
    pair.network.detach(FIRST)
    reborn = CmEnd(FIRST, seed=99)
    pair.network.attach(reborn, FIRST)
    parameters = ConnectionParameters(passive.remote_qpn)
    reborn.request(SECOND, pair.now, parameters)
    pair.run(lambda: reborn.events)
    assert (reborn.events[0].type, reborn.events[0].status) == (
        CmEventType.REJECTED,
        RejectReason.STALE_CONNECTION,
    )
    assert pair.second.kinds() == ["DISCONNECTED"]
    pair.network.run()
    # Once time-wait is over, it may.
    pair.second.events.clear()
    reborn.events.clear()
    reborn.request(SECOND, pair.now, parameters)
    pair.run(lambda: pair.second.events)
    assert pair.second.kinds() == ["CONNECT_REQUEST"]


def test_the_backlog_is_bounded_and_a_request_comes_again() -> None:
    pair = CmPair()
    pair.listener.close()
    pair.listener = pair.second.listen(backlog=2)
    for _ in range(3):
        pair.first.request(SECOND, pair.now)
    pair.run(lambda: pair.second.manager.counters["backlog full"])
    assert pair.second.kinds() == ["CONNECT_REQUEST"] * 2
    pair.second.events[0].connection.reject(pair.now)
    pair.run(lambda: len(pair.second.events) == 3)
    assert pair.first.kinds() == ["REJECTED"]


def test_a_peer_that_never_answers() -> None:
    times = CmTimes(response_exponent=12, tries=3)
    pair = CmPair(times=times)
    pair.network.partition(FIRST, SECOND)
    pair.first.request(SECOND, pair.now)
    pair.run(lambda: pair.first.events)
    (event,) = pair.first.events
    assert (event.type, event.status) == (CmEventType.UNREACHABLE, -errno.ETIMEDOUT)
    assert pair.first.count(ConnectRequest) == 4
    assert pair.first.manager.connections == 0


def test_a_user_that_is_slow_to_accept_is_waited_for() -> None:
    times = CmTimes(response_exponent=12, tries=3)
    pair = CmPair(times=times)
    active, passive = pair.request()
    # Far longer than all tries; the MRA that answers the repeated REQ makes the peer wait.
    pair.network.run(most_seconds=4.0)
    assert pair.first.events == []
    passive.accept(pair.second.parameters(), pair.now)
    pair.run(lambda: pair.first.events)
    assert pair.first.kinds() == ["CONNECT_RESPONSE"]
    # And as slow to say that it is ready.
    pair.network.run(most_seconds=4.0)
    active.establish(pair.now)
    pair.run(lambda: pair.second.events)
    assert pair.second.kinds() == ["ESTABLISHED"]


def test_a_peer_that_vanishes_before_it_is_ready() -> None:
    times = CmTimes(response_exponent=12, tries=3)
    pair = CmPair(times=times)
    _, passive = pair.request()
    pair.network.partition(FIRST, SECOND)
    passive.accept(pair.second.parameters(), pair.now)
    pair.run(lambda: pair.second.events)
    (event,) = pair.second.events
    assert (event.type, event.status) == (CmEventType.UNREACHABLE, -errno.ETIMEDOUT)
    assert pair.second.count(ConnectReply) == 4


def test_disconnecting_from_a_peer_that_is_gone() -> None:
    pair = CmPair(times=CmTimes(response_exponent=12))
    active, _ = pair.connect()
    pair.network.partition(FIRST, SECOND)
    active.disconnect(pair.now)
    pair.run(lambda: pair.first.events)
    (event,) = pair.first.events
    assert (event.type, event.status) == (CmEventType.DISCONNECTED, -errno.ETIMEDOUT)


def test_a_late_reply_is_told_that_nobody_waits() -> None:
    pair = CmPair()
    active, passive = pair.request()
    active.destroy(pair.now)
    pair.network.heal()
    pair.run(lambda: pair.second.events)
    assert (pair.second.events[0].type, pair.second.events[0].status) == (
        CmEventType.REJECTED,
        RejectReason.TIMEOUT,
    )
    # The same with the goodbye lost.
    pair = CmPair()
    active, passive = pair.request()
    pair.first.filter = lambda message: False
    active.destroy(pair.now)
    pair.network.collect()
    pair.first.filter = lambda message: True
    passive.accept(pair.second.parameters(), pair.now)
    pair.run(lambda: pair.second.events)
    assert pair.second.events[0].status == RejectReason.INVALID_COMMUNICATION_ID


@pytest.mark.parametrize("state", ["REQ sent", "REQ received", "REP sent", "REP received", "established"])
def test_destroyed_in_any_state_nothing_is_left(state: str) -> None:
    pair = CmPair(times=CmTimes(response_exponent=12, tries=2))
    if state == "REQ sent":
        pair.first.request(SECOND, pair.now).destroy(pair.now)
    else:
        active, passive = pair.request()
        if state == "REQ received":
            passive.destroy(pair.now)
        else:
            passive.accept(pair.second.parameters(), pair.now)
            if state == "REP sent":
                passive.destroy(pair.now)
            else:
                pair.run(lambda: pair.first.events)
                if state == "established":
                    active.establish(pair.now)
                active.destroy(pair.now)
                active.destroy(pair.now)
    while pair.network.run(lambda: pair.first.events or pair.second.events):
        for end in (pair.first, pair.second):
            for event in end.events:
                if event.type is not CmEventType.TIMEWAIT_EXIT:
                    event.connection.destroy(pair.now)
            end.events.clear()
    assert pair.first.manager.connections == pair.second.manager.connections == 0
    assert pair.listener.waiting == 0


def test_data_before_the_last_message_establish_too() -> None:
    pair = CmPair()
    active, passive = pair.request()
    passive.accept(pair.second.parameters(), pair.now)
    pair.run(lambda: pair.first.events)
    pair.first.filter = lambda message: False
    active.establish(pair.now)
    pair.network.collect()
    assert pair.second.manager.find(passive.local_qpn) is passive
    passive.communication_established()
    passive.communication_established()
    assert pair.second.kinds() == ["ESTABLISHED"]
    assert passive.deadline is None


def test_what_a_call_refuses() -> None:
    pair = CmPair()
    manager = pair.first.manager
    with pytest.raises(VerbsError) as taken:
        pair.second.listen()
    assert taken.value.errno == errno.EADDRINUSE
    assert pair.second.listen(0).port >= 32768
    with pytest.raises(VerbsError):
        manager.listen(PortSpace.TCP, 1 << 16, print)
    connection = manager.create(print)
    with pytest.raises(VerbsError, match="not been resolved"):
        connection.resolve_route()
    for address in ("::1", "somewhere", ""):
        with pytest.raises(VerbsError):
            connection.resolve_address(address, 1)
    with pytest.raises(VerbsError):
        connection.resolve_address(SECOND, 1 << 16)
    with pytest.raises(VerbsError):
        connection.connect(ConnectionParameters(5), 0.0)
    connection.sink = lambda event: None
    connection.resolve_address(SECOND, 1)
    for wrong in (
        ConnectionParameters(1),
        ConnectionParameters(5, bytes(57)),
        ConnectionParameters(5, responder_resources=256),
        ConnectionParameters(5, retry_count=8),
    ):
        with pytest.raises(VerbsError):
            connection.connect(wrong, 0.0)
    for call in (connection.establish, connection.reject, connection.disconnect):
        with pytest.raises(VerbsError):
            call(0.0)
    assert connection.state is CmState.IDLE
