"""NVMe/TCP PDUs and their receiver: the kernel's own bytes, every truncation, every malformation."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import crcmod.predefined
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvmeof.errors import FatalErrorStatus, LocalProtocolError, MalformedPdu, RemoteProtocolError
from nvmeof.limits import LONG_AHEAD_BYTES, STAGING_BYTES
from nvmeof.tcp.crc32c import crc32c
from nvmeof.tcp.pdu import (
    FROM_CONTROLLER,
    FROM_HOST,
    NO_DIGESTS,
    R2T,
    C2HData,
    CapsuleCmd,
    CapsuleResp,
    DataPdu,
    Digests,
    H2CData,
    ICReq,
    ICResp,
    Pdu,
    TermReq,
    termination_for,
)
from nvmeof.tcp.receiver import BadDataDigest, Event, PduReceiver
from nvmeof.wire.cqe import Cqe
from nvmeof.wire.fabrics import Connect, decode_connect_data_untrusted
from nvmeof.wire.identify import decode_identify_controller_untrusted
from nvmeof.wire.sqe import Sqe
from tests.support.lab.packet_capture import read_connections
from tests.support.nvme.pdus import encode_header, encode_pdu

VECTORS = Path(__file__).parents[2] / "vectors" / "nvme_tcp"
CAPTURES = VECTORS.with_name("kernel_tcp")
BOTH = Digests(True, True)
ALL_DIGESTS = [Digests(h, d) for h in (False, True) for d in (False, True)]


class Collector:
    """Owner of a receiver: gives each PDU's data a buffer, in one piece or in several."""

    def __init__(self, pieces: int = 1) -> None:
        self.pieces = pieces
        self.data: list[bytearray] = []

    def place(self, pdu: DataPdu) -> memoryview | list[memoryview]:
        buffer = bytearray(pdu.data_length)
        self.data.append(buffer)
        view = memoryview(buffer)
        if self.pieces == 1:
            return view
        size = -(-len(view) // self.pieces)
        return [view[i : i + size] for i in range(0, len(view), size)]


def feed(receiver: PduReceiver, raw: bytes, chunk: int = 1 << 20) -> list[Event]:
    """All of `raw`, at most `chunk` bytes a time."""
    events: list[Event] = []
    position = 0
    while position < len(raw):
        buffer = receiver.next_buffer()
        count = min(len(buffer), chunk, len(raw) - position)
        buffer[:count] = raw[position : position + count]
        position += count
        events += receiver.received(count)
    return events


def feed_with_what_follows(receiver: PduReceiver, raw: bytes, chunk: int = 1 << 20) -> list[Event]:
    """The same, amid a payload into that and the buffer behind it at once."""
    events: list[Event] = []
    position = 0
    while position < len(raw):
        buffers = receiver.next_buffers() if receiver.payload_left else [receiver.next_buffer()]
        taken = 0
        for buffer in buffers:
            part = raw[position + taken : position + min(chunk, taken + len(buffer))]
            buffer[: len(part)] = part
            taken += len(part)
        position += taken
        events += receiver.received(taken)
    return events


def whole(pdu: Pdu, digests: Digests = NO_DIGESTS, data: bytes = b"", alignment: int = 4) -> bytes:
    return b"".join(encode_pdu(pdu, digests, alignment, (data,) if data else ()))


def check_stream(raw: bytes, allowed: frozenset[int], chunk: int) -> tuple[int, list[Event]]:
    """Receive one direction of a real connection; every PDU must re-encode to the very same bytes."""
    owner = Collector()
    receiver = PduReceiver(owner, allowed)  # type: ignore[arg-type]
    position = 0
    seen: list[Event] = []
    while position < len(raw):
        (size,) = struct.unpack_from("<I", raw, position + 4)
        pdu_bytes = raw[position : position + size]
        if len(pdu_bytes) < size:
            break
        events = feed(receiver, pdu_bytes, chunk)
        assert len(events) == 1
        event = events[0]
        assert not isinstance(event, BadDataDigest)
        data = bytes(owner.data[-1]) if getattr(event, "data_length", 0) else b""
        assert whole(event, receiver.digests, data) == pdu_bytes
        if isinstance(event, ICReq | ICResp):
            receiver.digests = Digests(event.header_digest, event.data_digest)
        seen.append(event)
        position += size
    return position, seen


def vectors(name: str) -> Iterator[tuple[str, str, bytes]]:
    for line in (VECTORS / name).read_text().splitlines():
        if not line.startswith("#"):
            direction, kind, raw = line.split()
            yield direction, kind, bytes.fromhex(raw)


@pytest.mark.parametrize("name", ["kernel_digests.hex", "kernel_plain.hex"])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_kernel_vectors(name: str, chunk: int) -> None:
    """PDUs of the Linux kernel parse, prove their digests, and are what we would have sent."""
    digests = BOTH if "digests" in name else NO_DIGESTS
    kinds = set()
    for direction, kind, raw in vectors(name):
        allowed = FROM_HOST if direction == "h2c" else FROM_CONTROLLER
        owner = Collector()
        receiver = PduReceiver(owner, allowed, NO_DIGESTS if kind.startswith("IC") else digests)
        (event,) = feed(receiver, raw, chunk)
        assert type(event).__name__ == kind
        assert not receiver.mid_pdu
        data = bytes(owner.data[0]) if owner.data else b""
        assert whole(event, receiver.digests, data) == raw  # type: ignore[arg-type]
        kinds.add(kind)
    assert {"ICReq", "ICResp", "CapsuleCmd", "CapsuleResp", "C2HData"} <= kinds


def test_kernel_vectors_say_what_they_should() -> None:
    """The contents, too: the kernel's Connect, and nvmet's Identify."""
    owner = Collector()
    receiver = PduReceiver(owner, FROM_HOST | FROM_CONTROLLER, BOTH)
    events = [
        event
        for _, kind, raw in vectors("kernel_digests.hex")
        if not kind.startswith("IC")
        for event in feed(receiver, raw)
    ]
    connect = events[0]
    assert isinstance(connect, CapsuleCmd)
    fields = Connect.of(connect.sqe)
    assert (fields.qid, fields.sqsize, fields.recfmt) == (0, 31, 0)
    who = decode_connect_data_untrusted(owner.data[0])
    assert who.cntlid == 0xFFFF
    assert who.host_nqn.startswith("nqn.2014-08.org.nvmexpress:uuid:")
    identify = decode_identify_controller_untrusted(owner.data[1])
    # Every field that the record has is where nvmet puts it; the others are left 0.
    assert all(ours in (0, theirs) for ours, theirs in zip(identify.encode(), owner.data[1], strict=True))
    assert decode_identify_controller_untrusted(identify.encode()) == identify
    assert identify.model == "Linux"
    assert identify.subnqn == who.subsystem_nqn
    (r2t,) = [event for event in events if isinstance(event, R2T)]
    assert (r2t.offset, r2t.length) == (0, 32768)


@pytest.mark.parametrize("name", ["tcp_nvme", "tcp_nodig", "tcp_dhchap"])
def test_whole_captures_of_the_kernel(name: str) -> None:
    count = 0
    for connection in read_connections(CAPTURES / f"{name}.pcap.gz"):
        for raw, allowed in ((connection.from_client, FROM_HOST), (connection.from_server, FROM_CONTROLLER)):
            end, events = check_stream(raw, allowed, 1 << 20)  # type: ignore[arg-type]
            assert end == len(raw)
            count += len(events)
    assert count > 70


# --- round trips ----------------------------------------------------------------

U16 = st.integers(0, 0xFFFF)
U32 = st.integers(0, 0xFFFF_FFFF)
SIZES = st.sampled_from(
    [0, 4, 8, LONG_AHEAD_BYTES - 24, LONG_AHEAD_BYTES, 4096, 5000, STAGING_BYTES - 24, STAGING_BYTES]
)
PDUS: st.SearchStrategy[Pdu] = st.one_of(
    st.builds(CapsuleCmd, st.tuples(st.integers(0, 255), U16, U32).map(lambda first: Sqe(*first)), SIZES),
    st.builds(CapsuleResp, st.tuples(U16, st.integers(0, 0x7FF), U32).map(lambda first: Cqe(*first))),
    st.builds(H2CData, U16, U16, U32, SIZES.filter(bool), st.booleans()),
    st.builds(C2HData, U16, U32, SIZES.filter(bool), st.booleans(), st.booleans()),
    st.builds(R2T, U16, U16, U32, U32),
    st.builds(TermReq, st.booleans(), U16, U32, st.binary(max_size=128)),
)


@given(
    st.lists(PDUS, min_size=1, max_size=8),
    st.sampled_from(ALL_DIGESTS),
    st.sampled_from([4, 8, 64, 128]),
    st.integers(1, 3),
    st.one_of(st.just(1), st.just(1 << 20), st.integers(2, 600), st.integers(1000, 9000)),
    st.sampled_from([feed, feed_with_what_follows]),
    st.booleans(),
)
def test_any_pdus_in_any_chunks(
    pdus: list[Pdu],
    digests: Digests,
    alignment: int,
    pieces: int,
    chunk: int,
    feeding: Callable[[PduReceiver, bytes, int], list[Event]],
    awaits_long: bool,
) -> None:
    """What is sent arrives, whatever the boundaries of the pieces and of the receives."""
    raw = b""
    payloads = []
    for number, pdu in enumerate(pdus):
        data = random.Random(number).randbytes(getattr(pdu, "data_length", 0))
        raw += whole(pdu, digests, data, alignment)
        if data:
            payloads.append(data)
    owner = Collector(pieces)
    receiver = PduReceiver(owner, FROM_HOST | FROM_CONTROLLER, digests)
    receiver.awaits_long = awaits_long
    assert feeding(receiver, raw, chunk) == pdus
    assert [bytes(data) for data in owner.data] == payloads
    assert not receiver.mid_pdu
    assert receiver.payload_left == 0


def test_many_short_payloads_come_by_one_receive() -> None:
    pdus = [C2HData(number, 0, 4096) for number in range(7)]
    raw = b"".join(whole(pdu, data=bytes([pdu.cid]) * 4096) for pdu in pdus)
    owner = Collector()
    receiver = PduReceiver(owner, FROM_CONTROLLER)
    buffer = receiver.next_buffer()
    buffer[: len(raw)] = raw
    assert receiver.received(len(raw)) == pdus
    assert [bytes(data) for data in owner.data] == [bytes([number]) * 4096 for number in range(7)]


def test_little_of_a_long_payload_is_read_ahead_of_its_place() -> None:
    receiver = PduReceiver(Collector(), FROM_CONTROLLER)
    receiver.awaits_long = True
    raw = whole(C2HData(1, 0, 1 << 20), data=bytes(1 << 20))
    assert len(receiver.next_buffer()) == LONG_AHEAD_BYTES
    feed(receiver, raw[:LONG_AHEAD_BYTES])
    assert receiver.payload_left == (1 << 20) - LONG_AHEAD_BYTES + 24
    assert [len(each) for each in receiver.next_buffers()] == [receiver.payload_left, LONG_AHEAD_BYTES]


@pytest.mark.parametrize(
    "pdu",
    [
        ICReq(True, True, 3, 31, 5),
        ICResp(True, False, 0x400000, 7, 1),
        ICReq(),
        TermReq(True, FatalErrorStatus.OUT_OF_RANGE, 77, b"header"),
    ],
)
def test_initialization_and_termination(pdu: Pdu) -> None:
    raw = whole(pdu)
    assert len(raw) in (128, 30)
    assert feed(PduReceiver(Collector(), FROM_HOST | FROM_CONTROLLER), raw, 1) == [pdu]


def test_data_pdu_golden() -> None:
    """Laid out by hand: C2HData with both digests, LAST and SUCCESS."""
    body = bytes.fromhex("07 0f 18 1c 24000000 3412 0000 00100000 04000000 00000000".replace(" ", ""))
    data = b"\x01\x02\x03\x04"
    crc = crcmod.predefined.mkPredefinedCrcFun("crc-32c")
    raw = body + struct.pack("<I", crc(body)) + data + struct.pack("<I", crc(data))
    assert whole(C2HData(0x1234, 0x1000, 4, True, True), BOTH, data) == raw
    assert encode_header(R2T(1, 2, 3, 4)).hex() == "09001800180000000100020003000000" + "0400000000000000"


def test_crc32c_against_another_hand() -> None:
    judge = crcmod.predefined.mkPredefinedCrcFun("crc-32c")
    data = random.Random(35).randbytes(10_000)
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(data) == judge(data)
    assert crc32c(memoryview(data)[100:], crc32c(data[:100])) == judge(data)


# --- truncation and malformation ------------------------------------------------------


@pytest.mark.parametrize("digests", ALL_DIGESTS)
def test_truncated_at_every_byte(digests: Digests) -> None:
    """A stream that ends early yields no PDU that was not whole, and knows that it ended amid one."""
    pdus: list[Pdu] = [CapsuleResp(Cqe(1)), C2HData(2, 0, 40), R2T(3, 4, 0, 8), CapsuleResp(Cqe(5))]
    pieces = [whole(pdu, digests, bytes(getattr(pdu, "data_length", 0))) for pdu in pdus]
    raw = b"".join(pieces)
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    for cut in range(len(raw) + 1):
        receiver = PduReceiver(Collector(), FROM_CONTROLLER, digests)
        events = feed(receiver, raw[:cut])
        assert len(events) == sum(end <= cut for end in ends)
        assert receiver.mid_pdu == (cut not in (0, *ends))


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        (0, 0x08, FatalErrorStatus.INVALID_HEADER_FIELD),
        (0, 0xFF, FatalErrorStatus.INVALID_HEADER_FIELD),
        (0, 0x06, FatalErrorStatus.SEQUENCE_ERROR),
        (1, 0x05, FatalErrorStatus.INVALID_HEADER_FIELD),
        (1, 0x06, FatalErrorStatus.INVALID_HEADER_FIELD),
        (2, 23, FatalErrorStatus.INVALID_HEADER_FIELD),
        (2, 0, FatalErrorStatus.INVALID_HEADER_FIELD),
        (3, 20, FatalErrorStatus.INVALID_HEADER_FIELD),
        (3, 26, FatalErrorStatus.INVALID_HEADER_FIELD),
        (3, 255, FatalErrorStatus.INVALID_HEADER_FIELD),
        (4, 24, FatalErrorStatus.INVALID_HEADER_FIELD),
        (7, 0xFF, FatalErrorStatus.INVALID_HEADER_FIELD),
        (16, 4, FatalErrorStatus.INVALID_HEADER_FIELD),
    ],
)
def test_malformed_header(field: int, value: int, status: FatalErrorStatus) -> None:
    raw = bytearray(whole(C2HData(1, 0, 8), data=bytes(8)))
    raw[field] = value
    with pytest.raises(MalformedPdu) as caught:
        feed(PduReceiver(Collector(), FROM_CONTROLLER), bytes(raw), 1)
    assert caught.value.fatal_error_status == status
    if status == FatalErrorStatus.INVALID_HEADER_FIELD:
        assert caught.value.information in (field, 4)


@pytest.mark.parametrize(
    "raw",
    [
        bytes.fromhex("0001800080000000") + bytes(120),  # ICReq with a digest flag
        bytes.fromhex("0000800081000000") + bytes(121),  # ICReq of 129 bytes
        bytes.fromhex("0000800080000000") + bytes(2) + b"\x20" + bytes(117),  # HPDA 32
        bytes.fromhex("0000800080000000") + bytes(3) + b"\x04" + bytes(116),  # an unknown digest
        bytes.fromhex("0200180099000000") + bytes(145),  # a termination of 153 bytes
        bytes.fromhex("0200180017000000") + bytes(16),  # a termination of 23 bytes
        bytes.fromhex("0400480047000000") + bytes(64),  # a capsule shorter than its header
        bytes.fromhex("0600180018000000") + bytes(16),  # data without data
    ],
)
def test_malformed_from_a_host(raw: bytes) -> None:
    with pytest.raises(MalformedPdu):
        feed(PduReceiver(Collector(), FROM_HOST), raw)


def test_bytes_on_the_heels_of_initialization() -> None:
    raw = whole(ICReq()) + b"\x04"
    with pytest.raises(MalformedPdu) as caught:
        feed(PduReceiver(Collector(), FROM_HOST), raw)
    assert caught.value.fatal_error_status == FatalErrorStatus.SEQUENCE_ERROR


@given(st.binary(min_size=8, max_size=300), st.sampled_from(ALL_DIGESTS), st.booleans())
def test_noise(raw: bytes, digests: Digests, from_host: bool) -> None:
    """Any bytes: PDUs, or one exception that says how to answer."""
    receiver = PduReceiver(Collector(), FROM_HOST if from_host else FROM_CONTROLLER, digests)
    try:
        feed(receiver, raw, 50)
    except RemoteProtocolError as error:
        answer = termination_for(error, from_host=not from_host, header=receiver.wrong_header)
        assert answer is not None
        assert 24 <= len(answer) <= 152


@given(st.data())
def test_a_flipped_bit_is_seen(data: st.DataObject) -> None:
    """With both digests no single flipped bit of a PDU goes unnoticed."""
    raw = bytearray(whole(C2HData(1, 0, 64), BOTH, bytes(range(64))))
    position = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[position // 8] ^= 1 << position % 8
    receiver = PduReceiver(Collector(), FROM_CONTROLLER, BOTH)
    events: list[Event] = []
    with contextlib.suppress(RemoteProtocolError):
        events = feed(receiver, bytes(raw))
    assert all(isinstance(event, BadDataDigest) for event in events)


def test_wrong_digests_are_told_apart() -> None:
    raw = bytearray(whole(C2HData(1, 0, 8), BOTH, bytes(8)))
    raw[8] ^= 1
    receiver = PduReceiver(Collector(), FROM_CONTROLLER, BOTH)
    with pytest.raises(RemoteProtocolError) as caught:
        feed(receiver, bytes(raw))
    assert caught.value.fatal_error_status == FatalErrorStatus.HEADER_DIGEST_ERROR
    assert caught.value.information == struct.unpack_from("<I", raw, 24)[0]
    assert receiver.wrong_header == bytes(raw[:24])
    raw[8] ^= 1
    raw[-1] ^= 1
    receiver = PduReceiver(Collector(), FROM_CONTROLLER, BOTH)
    good = whole(CapsuleResp(Cqe(9)), BOTH)
    assert feed(receiver, bytes(raw) + good) == [BadDataDigest(C2HData(1, 0, 8)), CapsuleResp(Cqe(9))]


def test_redirection_amid_a_payload() -> None:
    owner = Collector()
    receiver = PduReceiver(owner, FROM_CONTROLLER, BOTH)
    data = random.Random(1).randbytes(2000)
    raw = whole(C2HData(1, 0, 2000), BOTH, data)
    assert feed(receiver, raw[:1000]) == []
    left = receiver.payload_left
    elsewhere = bytearray(left)
    with pytest.raises(LocalProtocolError):
        receiver.redirect([memoryview(elsewhere)[1:]])
    receiver.redirect([memoryview(elsewhere)])
    assert feed(receiver, raw[1000:]) == [C2HData(1, 0, 2000)]
    assert bytes(elsewhere) == data[-left:]
    assert bytes(owner.data[0][-left:]) == bytes(left)


def test_an_owner_that_gives_the_wrong_room() -> None:
    class Wrong:
        def place(self, pdu: DataPdu) -> memoryview:
            return memoryview(bytearray(7))

    with pytest.raises(LocalProtocolError):
        feed(PduReceiver(Wrong(), FROM_CONTROLLER), whole(C2HData(1, 0, 8), data=bytes(8)))


def outcome_of(raw: bytes, *, from_host: bool, chunk: int, by_steps: bool) -> object:
    """The events, the data, and what was wrong at last."""
    owner = Collector()
    receiver = PduReceiver(owner, FROM_HOST if from_host else FROM_CONTROLLER)
    if by_steps:
        receiver._takes_answers = receiver._takes_commands = False
    events: list[Event] = []
    wrong: object = None
    try:
        for at in range(0, len(raw), chunk):
            left = memoryview(raw)[at : at + chunk]
            while left:
                room = receiver.next_buffer()
                count = min(len(room), len(left))
                room[:count] = left[:count]
                left = left[count:]
                events += receiver.received(count)
    except RemoteProtocolError as error:
        wrong = (error.reason, error.fatal_error_status, error.information, receiver.wrong_header)
    return list(map(repr, events)), list(map(bytes, owner.data)), wrong, receiver.mid_pdu


def test_one_look_finds_what_steps_find(seed: int) -> None:
    """Commands, completions and data without digests, well and with wrong headers, in any pieces."""
    dice = random.Random(seed)
    for _ in range(400):
        from_host = dice.random() < 0.5
        stream = bytearray()
        for _ in range(dice.randint(1, 5)):
            data = dice.randbytes(dice.choice((0, 1, 24, 512)))
            if from_host:
                sqe = Sqe(dice.randrange(256), dice.randrange(1 << 16), dice.randrange(1 << 32))
                raw = whole(CapsuleCmd(sqe, len(data)), NO_DIGESTS, data, dice.choice((4, 4, 32)))
            elif data and dice.random() < 0.7:
                pdu = C2HData(dice.randrange(1 << 16), 0, len(data), True, dice.random() < 0.5)
                raw = whole(pdu, NO_DIGESTS, data, dice.choice((4, 4, 32)))
            else:
                cqe = Cqe(dice.randrange(1 << 16), dice.randrange(1 << 11), dice.randrange(1 << 64))
                raw = whole(CapsuleResp(cqe))
            wrong = bytearray(raw)
            if dice.random() < 0.3:
                wrong[dice.randrange(24)] ^= 1 << dice.randrange(8)
            stream += wrong
        chunk = dice.choice((1, 7, 24, 72, 100, 4096))
        by_one_look, by_steps = (
            outcome_of(bytes(stream), from_host=from_host, chunk=chunk, by_steps=each)
            for each in (False, True)
        )
        assert by_one_look == by_steps
