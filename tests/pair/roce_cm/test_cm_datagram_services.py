"""Datagram services of the port space UDP: SIDR between two connection managers (IBTA 12.11)."""

from __future__ import annotations

import errno
import random

import pytest

from emulator.roce.cm.connection import Connection, Listener
from emulator.roce.cm.events import CmEventType, ConnectionParameters
from emulator.roce.cm.service_resolution import UDP_QKEY
from emulator.roce.cm.states import CmState
from emulator.roce.nic.verbs import VerbsError
from emulator.roce.wire.cm_ip import IpCmHeader, PortSpace, service_id
from emulator.roce.wire.cm_messages import (
    CmMessage,
    ServiceReply,
    ServiceRequest,
    SidrStatus,
    decode_cm_untrusted,
    encode_cm,
)
from emulator.roce.wire.flow import packed_address
from tests.support.roce.connection_managers import FIRST, PORT, SECOND, CmEnd, CmPair
from tests.support.roce.weather import Weather


def _listen(end: CmEnd, backlog: int = 0) -> Listener:
    return end.manager.listen(PortSpace.UDP, PORT, end.events.append, backlog)


def _ask(pair: CmPair, private_data: bytes = b"") -> Connection:
    service = pair.first.manager.create(pair.first.events.append, PortSpace.UDP)
    service.resolve_address(SECOND, PORT, PortSpace.UDP)
    service.resolve_route()
    pair.first.events.clear()
    service.connect(ConnectionParameters(private_data=private_data), pair.now)
    return service


def _kinds(end: CmEnd) -> list[CmEventType]:
    return [event.type for event in end.events]


def test_who_asks_learns_the_queue_pair_and_its_key() -> None:
    pair = CmPair()
    _listen(pair.second)
    service = _ask(pair, b"which one?")
    pair.network.run(most_seconds=1.0)
    (request,) = pair.second.events
    assert request.type is CmEventType.CONNECT_REQUEST
    assert request.private_data.rstrip(b"\0") == b"which one?"
    passive = request.connection
    passive.accept(ConnectionParameters(0x4321, b"this one"), pair.now)
    pair.network.run(most_seconds=1.0)
    (told,) = pair.first.events
    assert (told.type, told.private_data.rstrip(b"\0")) == (CmEventType.ESTABLISHED, b"this one")
    assert told.parameters is not None
    assert (told.parameters.qp_num, told.parameters.qkey) == (0x4321, UDP_QKEY)
    assert _kinds(pair.second) == [CmEventType.CONNECT_REQUEST], "nothing more on the passive side"
    assert service.state is passive.state is CmState.RESOLVED
    assert pair.first.manager.deadline() is None
    with pytest.raises(VerbsError) as refused:
        service.disconnect(pair.now)
    assert refused.value.errno == errno.EINVAL
    for one in (service, passive):
        one.destroy(pair.now)
    assert pair.first.manager.connections == pair.second.manager.connections == 0


@pytest.mark.parametrize("how", ["nobody listens", "rejected", "destroyed"])
def test_a_refusal_is_unreachable_with_its_status(how: str) -> None:
    pair = CmPair()
    if how != "nobody listens":
        _listen(pair.second)
    service = _ask(pair)
    pair.network.run(most_seconds=1.0)
    if how != "nobody listens":
        passive = pair.second.events[0].connection
        if how == "rejected":
            passive.reject(pair.now, b"no")
        else:
            passive.destroy(pair.now)
        pair.network.run(most_seconds=1.0)
    (told,) = pair.first.events
    expected = SidrStatus.UNSUPPORTED_SERVICE_ID if how == "nobody listens" else SidrStatus.REJECTED
    assert (told.type, told.status) == (CmEventType.UNREACHABLE, expected)
    assert told.private_data.rstrip(b"\0") == (b"no" if how == "rejected" else b"")
    assert service.state is CmState.CLOSED


def test_silence_ends_too() -> None:
    pair = CmPair()
    pair.first.filter = lambda message: False
    _ask(pair)
    pair.network.run(most_seconds=60.0)
    (told,) = pair.first.events
    assert (told.type, told.status) == (CmEventType.UNREACHABLE, -errno.ETIMEDOUT)


@pytest.mark.parametrize("seed", range(4))
def test_lost_and_doubled_messages_make_one_service(seed: int) -> None:
    pair = CmPair(weather=Weather(loss=0.3, duplicate=0.3), seed=seed)
    _listen(pair.second)
    _ask(pair)
    for _ in range(40):
        pair.network.run(most_seconds=1.0)
        for event in pair.second.events:
            if event.connection.state is CmState.SIDR_RECEIVED:
                event.connection.accept(ConnectionParameters(0x77), pair.now)
    assert _kinds(pair.second) == [CmEventType.CONNECT_REQUEST]
    assert _kinds(pair.first) == [CmEventType.ESTABLISHED]


def _deliver(pair: CmPair, message: CmMessage, ip: str = FIRST) -> list[CmMessage]:
    pair.second.manager.receive(encode_cm(message, 9), ip, pair.now)
    return [decode_cm_untrusted(mad)[0] for _, mad in pair.second.manager.take_output()]


def _request(
    source: str = FIRST, destination: str = SECOND, space: PortSpace = PortSpace.UDP
) -> ServiceRequest:
    header = IpCmHeader(packed_address(source), packed_address(destination), 5000)
    return ServiceRequest(0x55, service_id(space, PORT), private_data=header.encode())


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (_request(source="10.0.0.9"), SidrStatus.REJECTED),
        (_request(destination="10.0.0.9"), SidrStatus.REJECTED),
        (ServiceRequest(0x55, service_id(PortSpace.UDP, PORT)), SidrStatus.REJECTED),
        (_request(space=PortSpace.TCP), SidrStatus.UNSUPPORTED_SERVICE_ID),
        (ServiceRequest(0x55, 4420), SidrStatus.UNSUPPORTED_SERVICE_ID),
    ],
)
def test_requests_that_are_not_what_they_say_are_refused(
    request_: ServiceRequest, status: SidrStatus
) -> None:
    pair = CmPair()
    _listen(pair.second)
    (answer,) = _deliver(pair, request_)
    assert isinstance(answer, ServiceReply)
    assert (answer.request_id, answer.status) == (0x55, status)
    assert pair.second.events == []


def test_answers_that_nobody_asked_for_change_nothing() -> None:
    pair = CmPair()
    service = _ask(pair)
    pair.first.manager.take_output()
    wrong = ServiceReply(service.local_id, SidrStatus.VALID, 0x99, q_key=1)
    pair.first.manager.receive(encode_cm(wrong, 9), "10.0.0.9", pair.now)
    pair.first.manager.receive(encode_cm(ServiceReply(1, 0, 0x99), 9), SECOND, pair.now)
    assert pair.first.events == []
    assert pair.first.manager.counters["wrong address"] == pair.first.manager.counters["unasked"] == 1
    pair.first.manager.receive(encode_cm(wrong, 9), SECOND, pair.now)
    assert _kinds(pair.first) == [CmEventType.ESTABLISHED]


def test_requests_that_wait_are_bounded_by_the_backlog() -> None:
    pair = CmPair()
    _listen(pair.second, backlog=2)
    dice = random.Random(1)
    for _ in range(10):
        request = _request()
        _deliver(
            pair, ServiceRequest(dice.getrandbits(32), request.service_id, private_data=request.private_data)
        )
    assert len(pair.second.events) == 2
    assert pair.second.manager.counters["backlog full"] == 8


def test_a_service_takes_no_connections_and_a_listener_no_services() -> None:
    pair = CmPair()
    _listen(pair.second)
    connection = pair.first.manager.create(pair.first.events.append)
    connection.resolve_address(SECOND, PORT, PortSpace.UDP)
    connection.connect(pair.first.parameters(), pair.now)
    pair.network.run(most_seconds=1.0)
    assert _kinds(pair.first)[-1] is CmEventType.REJECTED
    assert pair.second.events == []
