"""What a connection manager bears: bytes that are no message, messages out of place, strangers, too many."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.roce.cm.connection import Connection
from emulator.roce.cm.limits import MAX_CONNECTIONS
from emulator.roce.cm.states import CmState
from emulator.roce.nic.verbs import Address, VerbsError
from emulator.roce.wire.cm_ip import IpCmHeader
from emulator.roce.wire.cm_messages import (
    CmMessage,
    CmPath,
    ConnectReject,
    ConnectReply,
    ConnectRequest,
    DisconnectReply,
    DisconnectRequest,
    MessageReceipt,
    ReadyToUse,
    RejectReason,
    ServiceReply,
    ServiceRequest,
    TransportType,
    decode_cm_untrusted,
    encode_cm,
)
from tests.support.roce.connection_managers import FIRST, SECOND, CmPair

STRANGER = "10.0.0.9"


def request_of(pair: CmPair) -> ConnectRequest:
    """A good REQ of the first end that has not been delivered."""
    pair.first.request(SECOND, pair.now)
    pair.first.take_output()
    message = pair.first.sent.pop()
    assert isinstance(message, ConnectRequest)
    return message


def deliver(pair: CmPair, message: CmMessage, ip: str = FIRST) -> list[CmMessage]:
    """Bring a message to the second end; what it answers."""
    pair.second.sent.clear()
    pair.second.receive(memoryview(encode_cm(message, 5)), 256, Address(ip), pair.now)
    pair.second.take_output()
    return pair.second.sent


def test_truncated_and_overlong_datagrams() -> None:
    pair = CmPair()
    mad = encode_cm(request_of(pair), 1)
    for size in [*range(0, 256), 257, 4096]:
        pair.second.manager.receive(mad[:size].ljust(size, b"\0"), FIRST, 0.0)
    assert pair.second.manager.counters["mad length"] == 258
    assert pair.second.events == []
    assert pair.second.take_output() == []


def test_other_management_classes_are_counted_and_dropped() -> None:
    pair = CmPair()
    mad = bytearray(encode_cm(request_of(pair), 1))
    for position, value in ((0, 2), (1, 4), (2, 1), (3, 0x83), (17, 0x19), (17, 0x99)):
        changed = mad.copy()
        changed[position] = value
        pair.second.manager.receive(changed, FIRST, 0.0)
    counters = pair.second.manager.counters
    assert counters["mad class"] == 4
    assert counters["cm attribute"] == 2
    assert pair.second.take_output() == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"transport_type": TransportType.UC}, RejectReason.INVALID_TRANSPORT_SERVICE_TYPE),
        ({"path_mtu": 0}, RejectReason.INVALID_PATH_MTU),
        ({"path_mtu": 6}, RejectReason.INVALID_PATH_MTU),
        ({"service_id": 0x01060001}, RejectReason.INVALID_SERVICE_ID),
        ({"service_id": 4420}, RejectReason.INVALID_SERVICE_ID),
        ({"queue_pair": 1}, RejectReason.NO_QUEUE_PAIR),
        ({"private_data": b""}, RejectReason.UNSUPPORTED_REQUEST),
        ({"private_data": b"\x10" + bytes(91)}, RejectReason.UNSUPPORTED_REQUEST),
        (
            {"private_data": IpCmHeader(b"\x0a\0\0\1", b"\x0a\0\0\7", 5).encode()},
            RejectReason.UNSUPPORTED_REQUEST,
        ),
    ],
)
def test_a_request_that_is_refused_for_what_it_says(changes: dict[str, object], reason: int) -> None:
    pair = CmPair()
    request = replace(request_of(pair), **changes)  # type: ignore[arg-type]
    (answer,) = deliver(pair, request)
    assert isinstance(answer, ConnectReject)
    assert (answer.remote_id, answer.reason) == (request.local_id, reason)
    assert pair.second.events == []
    assert pair.second.manager.connections == 0


def test_a_request_for_another_gid() -> None:
    pair = CmPair()
    request = request_of(pair)
    path = request.primary
    (answer,) = deliver(pair, replace(request, primary=replace(path, remote_gid=bytes(16))))
    assert isinstance(answer, ConnectReject)
    assert answer.reason == RejectReason.PRIMARY_GID_REJECTED


def test_a_request_in_another_ones_name_is_not_answered() -> None:
    pair = CmPair()
    assert deliver(pair, request_of(pair), STRANGER) == []
    assert pair.second.manager.counters["wrong address"] == 1
    assert pair.second.events == []


def test_a_stranger_who_knows_the_ids_changes_nothing() -> None:
    pair = CmPair()
    _, passive = pair.connect()
    ids = (passive.remote_id, passive.local_id)
    messages: list[CmMessage] = [
        DisconnectRequest(*ids, passive.local_qpn),
        ConnectReject(*ids, 0, 28),
        DisconnectReply(*ids),
        ReadyToUse(*ids),
        MessageReceipt(*ids, 0, 31),
        ConnectReply(*ids, 0x100, 0, 7),
    ]
    for message in messages:
        assert deliver(pair, message, STRANGER) == []
    assert passive.state is CmState.ESTABLISHED
    assert pair.second.manager.counters["wrong address"] == len(messages)
    assert pair.second.events == []


def test_messages_that_do_not_fit_the_connection() -> None:
    pair = CmPair()
    _, passive = pair.connect()
    remote, local = passive.remote_id, passive.local_id
    # Its queue pair is another; its communication ID is another; it answers nothing that was sent.
    assert deliver(pair, DisconnectRequest(remote, local, passive.local_qpn + 1)) == []
    (answer,) = deliver(pair, DisconnectRequest(remote + 1, local, passive.local_qpn))
    assert isinstance(answer, DisconnectReply)
    for message in (
        DisconnectReply(remote, local),
        MessageReceipt(remote, local, 1, 10),
        ConnectReply(remote, local, 0x100, 0, 7),
    ):
        assert deliver(pair, message) == []
    assert passive.state is CmState.ESTABLISHED
    assert pair.second.manager.counters["out of state"] == 4
    assert pair.second.events == []


def test_messages_for_nobody() -> None:
    pair = CmPair()
    (reject,) = deliver(pair, ConnectReply(1, 2, 0x100, 0, 7))
    assert isinstance(reject, ConnectReject)
    assert (reject.remote_id, reject.reason) == (1, RejectReason.INVALID_COMMUNICATION_ID)
    (goodbye,) = deliver(pair, DisconnectRequest(1, 2, 3))
    assert goodbye == DisconnectReply(2, 1, bytes(224))
    for message in (ReadyToUse(1, 2), DisconnectReply(1, 2), ConnectReject(1, 2, 0, 4), ServiceReply(1, 0)):
        assert deliver(pair, message) == []
    (answer,) = deliver(pair, ServiceRequest(77, 0x01110035))
    assert isinstance(answer, ServiceReply)
    assert (answer.request_id, answer.status) == (77, 1)


def test_the_tables_are_bounded() -> None:
    pair = CmPair()
    request = request_of(pair)
    for number in range(1, MAX_CONNECTIONS + 50):
        deliver(pair, replace(request, local_id=number, queue_pair=number + 1))
        for event in pair.second.events:
            event.connection.accept(pair.second.parameters(), pair.now)
        pair.second.events.clear()
    answers = deliver(pair, replace(request, local_id=1 << 20, queue_pair=1 << 20))
    assert pair.second.manager.connections == MAX_CONNECTIONS
    assert isinstance(answers[0], ConnectReject)
    assert answers[0].reason == RejectReason.NO_RESOURCES
    with pytest.raises(VerbsError):
        pair.second.manager.create(print)
    pair.network.detach(FIRST)
    pair.network.run(most_seconds=600.0)
    assert pair.second.manager.connections == 0


def _some_message(dice: random.Random, known: list[Connection]) -> bytes:
    """A message of any kind, whose IDs and fields are often those of real connections."""

    def some_id() -> int:
        ids = [number for c in known for number in (c.local_id, c.remote_id)]
        return dice.choice([*ids, 0, 0xFFFFFFFF, dice.getrandbits(32)])

    gids = [bytes(10) + b"\xff\xff" + bytes([10, 0, 0, last]) for last in (1, 2, 9)]
    header = IpCmHeader(gids[0][12:], gids[1][12:], dice.getrandbits(16)).encode()
    qpn = dice.choice([c.local_qpn for c in known] + [0, 1, 0xFFFFFF])
    message: CmMessage = dice.choice(
        [
            ConnectRequest(
                some_id(), dice.choice([0x01061144, 0]), dice.getrandbits(64), qpn, 0,
                CmPath(dice.choice(gids), dice.choice(gids)), dice.randrange(8),
                private_data=dice.choice([header, b"", bytes(92)]),
            ),
            ConnectReply(some_id(), some_id(), qpn, 0, dice.getrandbits(64)),
            ConnectReject(some_id(), some_id(), dice.randrange(4), dice.randrange(40)),
            ReadyToUse(some_id(), some_id()),
            MessageReceipt(some_id(), some_id(), dice.randrange(4), dice.randrange(32)),
            DisconnectRequest(some_id(), some_id(), qpn),
            DisconnectReply(some_id(), some_id()),
            ServiceRequest(some_id(), dice.getrandbits(64)),
            ServiceReply(some_id(), dice.randrange(256)),
        ]
    )  # fmt: skip
    mad = bytearray(encode_cm(message, dice.getrandbits(64)))
    for _ in range(dice.choice([0, 0, 0, 1, 5])):
        mad[dice.randrange(256)] = dice.randrange(256)
    return bytes(mad)


@given(st.integers(0, 1 << 32))
def test_any_messages_at_any_time_crash_nothing(chosen: int) -> None:
    dice = random.Random(chosen)
    pair = CmPair(seed=chosen)
    known: list[Connection] = []
    for _ in range(40):
        end = dice.choice([pair.first, pair.second])
        match dice.randrange(5):
            case 0 if len(known) < 20:
                known.append(end.request(SECOND if end is pair.first else FIRST, pair.now))
            case 1:
                pair.network.run(most_seconds=dice.random())
            case _:
                source = dice.choice([FIRST, SECOND, STRANGER])
                pair.network.inject(_some_message(dice, known), Address(source), Address(end.ip))
        for answering in (pair.first, pair.second):
            for event in answering.events:
                connection = event.connection
                if connection not in known:
                    known.append(connection)
                if connection.state is CmState.REQ_RECEIVED and dice.random() < 0.7:
                    connection.accept(answering.parameters(), pair.now)
                elif connection.state is CmState.REP_RECEIVED:
                    connection.establish(pair.now)
            answering.events.clear()
    for connection in known:
        connection.destroy(pair.now)
    for end in (pair.first, pair.second):
        end.manager.receive(_some_message(dice, known), STRANGER, pair.now)
    for _ in range(100):
        # Requests that were forged and accepted late are somebody's too.
        if not pair.network.run(lambda: pair.first.events or pair.second.events, most_seconds=1000.0):
            break
        for end in (pair.first, pair.second):
            for event in end.events:
                event.connection.destroy(pair.now)
            end.events.clear()
    assert pair.first.manager.connections == pair.second.manager.connections == 0


@given(st.binary(min_size=256, max_size=256))
def test_random_bytes(raw: bytes) -> None:
    pair = CmPair()
    head = encode_cm(ReadyToUse(0, 0), 0)[:16]
    pair.second.manager.receive(raw, FIRST, 0.0)
    pair.second.manager.receive(head + raw[16:], FIRST, 0.0)
    for _, mad in pair.second.manager.take_output():
        decode_cm_untrusted(mad)
    assert pair.second.manager.connections == 0
