"""Bad bytes at a controller's TCP queue: the right termination, and nothing else is touched."""

from __future__ import annotations

import random

import pytest

from nvmeof.controller.target import Target
from nvmeof.controller.tcp_rules import TcpSettings
from nvmeof.errors import FatalErrorStatus
from nvmeof.tcp.crc32c import crc32c
from nvmeof.tcp.pdu import R2T, C2HData, CapsuleCmd, CapsuleResp, Digests, H2CData, ICReq, ICResp, TermReq
from nvmeof.wire.cqe import Cqe
from nvmeof.wire.fabrics import Connect, ConnectData
from nvmeof.wire.properties import Property
from nvmeof.wire.sqe import IoOpcode, Sqe
from nvmeof.wire.status import Status
from tests.support.nvme.entries import fabrics_entry, in_capsule, transport
from tests.support.nvme.heap_storage import HeapStorage
from tests.support.nvme.pdus import encode_header, encode_pdu
from tests.support.nvme.raw_host import (
    ENABLE,
    HOST,
    HOST_ID,
    SUBSYSTEM,
    RawHost,
    make_target,
    open_admin,
    open_io,
)

FES = FatalErrorStatus


def flush(cid: int = 1) -> Sqe:
    return Sqe(IoOpcode.FLUSH, cid, 1, transport(0))


def a_target() -> Target:
    return make_target(HeapStorage())[0]


def with_byte(data: bytes, position: int, value: int) -> bytes:
    return data[:position] + bytes([value]) + data[position + 1 :]


@pytest.mark.parametrize(
    ("data", "status", "information"),
    [
        (encode_header(CapsuleCmd(flush())), FES.SEQUENCE_ERROR, 0),
        (encode_header(ICResp()), FES.SEQUENCE_ERROR, 0),
        (encode_header(R2T(0, 0, 0, 0)), FES.SEQUENCE_ERROR, 0),
        (encode_header(ICReq(version=1)), FES.UNSUPPORTED_PARAMETER, 8),
        (with_byte(encode_header(ICReq()), 2, 24), FES.INVALID_HEADER_FIELD, 2),
        (with_byte(encode_header(ICReq()), 4, 24), FES.INVALID_HEADER_FIELD, 4),
        (with_byte(encode_header(ICReq()), 0, 0x55), FES.INVALID_HEADER_FIELD, 0),
    ],
)
def test_first_words(data: bytes, status: int, information: int) -> None:
    host = RawHost(a_target(), initialize=False)
    host.send(data)
    term = host.termination()
    assert (term.fatal_error_status, term.information) == (status, information)
    assert data.startswith(term.header)
    assert host.queue.finished


def test_a_second_icreq() -> None:
    host = RawHost(a_target())
    host.send_pdu(ICReq())
    assert host.termination().fatal_error_status == FES.SEQUENCE_ERROR


def test_the_host_may_end_the_connection_with_a_request() -> None:
    host, _ = open_admin(a_target())
    host.send_pdu(TermReq(True, 1))
    assert host.queue.finished
    assert not host.pdus


def test_digests_are_granted_as_allowed() -> None:
    host = RawHost(a_target(), initialize=False, settings=TcpSettings(allow_data_digest=False))
    host.send(encode_header(ICReq(header_digest=True, data_digest=True)))
    (answer, _) = host.pdus[0]
    assert answer == ICResp(header_digest=True, data_digest=False, max_h2c_data=2 << 20)


@pytest.mark.parametrize("alignment", [0, 3, 31])
def test_data_for_the_host_begin_where_it_wants_them(alignment: int) -> None:
    target = a_target()
    _, cntlid = open_admin(target)
    host = RawHost(target, data_alignment=alignment)
    host.connect(1, cntlid)
    capsule = encode_header(CapsuleCmd(Sqe(IoOpcode.READ, 1, 1, transport(4096))))
    buffer = host.queue.next_buffer()
    buffer[:72] = capsule
    host.queue.received(72, host.now)
    raw = b"".join(host.queue.outgoing())
    assert raw[3] % ((alignment + 1) * 4) == 0
    assert raw[3] >= 24


@pytest.mark.parametrize(
    ("change", "status", "information"),
    [
        ({"ttag": 0x7777}, FES.INVALID_HEADER_FIELD, 10),
        ({"cid": 55}, FES.INVALID_HEADER_FIELD, 8),
        ({"offset": 4096}, FES.OUT_OF_RANGE, 12),
        ({"data_length": 8196, "last": False}, FES.OUT_OF_RANGE, 12),
        ({"last": False}, FES.INVALID_HEADER_FIELD, 1),
        ({"data_length": 4096}, FES.INVALID_HEADER_FIELD, 1),
    ],
)
def test_data_that_nobody_asked_for(change: dict[str, int], status: int, information: int) -> None:
    storage = HeapStorage()
    target, _ = make_target(storage)
    admin, io = open_io(target)
    io.submit(Sqe(IoOpcode.WRITE, 5, 1, transport(8192), 0, 0, 1))
    (request, _) = io.pdus.pop()
    assert isinstance(request, R2T)
    fields = {"cid": 5, "ttag": request.ttag, "offset": 0, "data_length": 8192, "last": True} | change
    io.send_pdu(H2CData(**fields), b"q" * fields["data_length"])  # type: ignore[arg-type]
    term = io.termination()
    assert (term.fatal_error_status, term.information) == (status, information)
    assert not any(storage.memory)
    assert admin.property_get(Property.VS)


def test_a_data_pdu_beyond_maxh2cdata() -> None:
    target = a_target()
    _, io = open_io(target, settings=TcpSettings(max_h2c_data=4096))
    io.submit(Sqe(IoOpcode.WRITE, 5, 1, transport(8192), 0, 0, 1))
    (request, _) = io.pdus.pop()
    assert isinstance(request, R2T)
    io.send_pdu(H2CData(5, request.ttag, 0, 8192), b"q" * 8192)
    assert io.termination().fatal_error_status == FES.LIMIT_EXCEEDED


def test_more_data_in_a_capsule_than_announced() -> None:
    target = a_target()
    _, io = open_io(target)
    io.submit(Sqe(IoOpcode.WRITE, 5, 1, in_capsule(20480), 0, 0, 4), bytes(20480))
    assert io.termination().fatal_error_status == FES.LIMIT_EXCEEDED


def test_a_wrong_header_digest() -> None:
    host = RawHost(a_target(), digests=Digests(header=True))
    raw = bytearray(encode_header(CapsuleCmd(flush()), Digests(header=True)))
    raw[20] ^= 1
    host.send(bytes(raw))
    term = host.termination()
    assert term.fatal_error_status == FES.HEADER_DIGEST_ERROR
    assert term.information == int.from_bytes(raw[72:76], "little")


@pytest.mark.parametrize("direct", [True, False])
def test_a_data_digest_is_of_what_is_sent(direct: bool) -> None:
    """Also where a Write reaches the medium before the data of a Read have left the queue."""
    storage, data_alone = HeapStorage(direct=direct), Digests(data=True)
    target, _ = make_target(storage)
    _, cntlid = open_admin(target)
    io = RawHost(target, digests=data_alone)
    assert io.connect(1, cntlid).status == 0
    storage.memory[:4096] = b"o" * 4096
    capsule = encode_header(CapsuleCmd(Sqe(IoOpcode.READ, 1, 1, transport(4096))), data_alone)
    io.queue.next_buffer()[: len(capsule)] = capsule
    io.queue.received(len(capsule), io.now)
    outgoing = io.queue.outgoing()
    storage.memory[:4096] = b"n" * 4096
    pdu = b"".join(outgoing)[: 24 + 4096 + 4]
    assert int.from_bytes(pdu[-4:], "little") == crc32c(pdu[24:-4])


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_a_wrong_data_digest_fails_the_command_and_nothing_else(direct: bool, inside: bool) -> None:
    storage = HeapStorage(direct=direct)
    target, _ = make_target(storage)
    both = Digests(header=True, data=True)
    admin = RawHost(target, digests=both)
    cntlid = admin.connect().result
    admin.property_set(Property.CC, ENABLE)
    io = RawHost(target, digests=both)
    assert io.connect(1, cntlid).status == 0
    data = b"d" * 8192
    if inside:
        sqe = Sqe(IoOpcode.WRITE, 5, 1, in_capsule(8192), 0, 0, 1)
        parts = encode_pdu(CapsuleCmd(sqe, 8192), both, 4, (data,))
    else:
        io.submit(Sqe(IoOpcode.WRITE, 5, 1, transport(8192), 0, 0, 1))
        (request, _) = io.pdus.pop()
        assert isinstance(request, R2T)
        parts = encode_pdu(H2CData(5, request.ttag, 0, 8192), both, 4, (data,))
    raw = bytearray(b"".join(parts))
    assert int.from_bytes(raw[-4:], "little") == crc32c(data)
    raw[-1] ^= 0x80
    io.send(bytes(raw))
    assert io.answer()[0].status == Status.TRANSIENT_TRANSPORT_ERROR
    assert io.status(Sqe(IoOpcode.WRITE, 5, 1, transport(8192), 0, 0, 1), data) == 0
    assert io.command(Sqe(IoOpcode.READ, 5, 1, transport(8192), 0, 0, 1))[1] == data


# --- malformed and truncated at every byte -----------------------


def a_session() -> bytes:
    """What a host sends from its first word to its first flush."""
    data = ConnectData(HOST_ID, 0xFFFF, SUBSYSTEM, HOST).encode()
    return b"".join(
        [
            encode_header(ICReq()),
            *encode_pdu(CapsuleCmd(fabrics_entry(Connect(0, 31, cattr=4), 0), 1024), data=(data,)),
            encode_header(CapsuleCmd(flush())),
        ]
    )


def still_serves(target: Target) -> None:
    _, io = open_io(target)
    assert io.status(flush()) == 0
    io.queue.connection_lost()


def test_truncated_at_every_byte() -> None:
    target = a_target()
    whole = a_session()
    for length in range(len(whole)):
        host = RawHost(target, initialize=False)
        host.send(whole[: min(length, 128)])
        host.send(whole[128:length])
        host.queue.end_of_stream()
        assert host.queue.finished
        assert not any(isinstance(pdu, TermReq) for pdu, _ in host.pdus)
        host.queue.connection_lost()
    assert not target.controllers
    still_serves(target)


def test_every_byte_changed() -> None:
    """Whatever a single wrong byte does, the answer is a completion, silence or a termination request."""
    target = a_target()
    whole = a_session()
    dice = random.Random(35)
    ended = 0
    for position in range(len(whole)):
        for value in {0, 0xFF, whole[position] ^ 1 << dice.randrange(8)} - {whole[position]}:
            host = RawHost(target, initialize=False)
            changed = with_byte(whole, position, value)
            send_blindly(host, changed[:128])
            send_blindly(host, changed[128:])
            ended += host.queue.ending
            host.queue.connection_lost()
    assert ended > 40
    still_serves(target)


def send_blindly(host: RawHost, data: bytes) -> None:
    """Send, and look at the answers as bytes: with digests wrongly agreed they cannot all be decoded."""
    if host.queue.ending:
        return
    rest = memoryview(data)
    while rest and not host.queue.ending:
        buffer = host.queue.next_buffer()
        count = min(len(buffer), len(rest))
        buffer[:count] = rest[:count]
        host.queue.received(count, host.now)
        rest = rest[count:]
    raw = b"".join(host.queue.outgoing())
    host.queue.sent(len(raw))
    if host.queue.terminated:
        assert raw[-24 - 128 :].find(b"\x03") >= 0


def test_random_pdus() -> None:
    target = a_target()
    dice = random.Random(35)
    ended = 0
    for _ in range(400):
        host = RawHost(target)
        for _ in range(5):
            kind = dice.choice([0, 2, 4, 6, dice.randrange(256)])
            hlen = {0: 128, 2: 24, 4: 72, 6: 24}.get(kind, dice.randrange(256))
            body = dice.randbytes(dice.choice([0, 16, 64, 120, 200]))
            plen = dice.choice([hlen, 8 + len(body), dice.randrange(1 << 32)])
            head = bytes([kind, dice.choice([0, 0, 4, dice.randrange(256)]), hlen, dice.choice([0, hlen])])
            send_blindly(host, head + plen.to_bytes(4, "little") + body)
        ended += host.queue.ending
        host.queue.connection_lost()
    assert ended > 100
    still_serves(target)


def test_answers_are_what_a_controller_may_send() -> None:
    """The decoder of the test would refuse them otherwise; here it is shown that it does."""
    host, _ = open_admin(a_target())
    assert isinstance(CapsuleResp(Cqe(1)), CapsuleResp)
    host.send_pdu(C2HData(1, 0, 4), b"abcd")
    assert host.termination().fatal_error_status == FES.SEQUENCE_ERROR
