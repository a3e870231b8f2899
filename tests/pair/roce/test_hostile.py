"""Packets that nobody honest sends: dropped or answered as the specification says, counted by cause, and
never a byte changed outside what the connection may change."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.roce.nic.counters import Count
from emulator.roce.nic.memory import Bind
from emulator.roce.nic.verbs import Access, Address, Mtu, MwType, QpState, SendOpcode, WcStatus
from emulator.roce.wire.extended import Aeth, AtomicEth, Deth, NakCode, Reth, nak_syndrome
from emulator.roce.wire.flow import flow_of
from emulator.roce.wire.icrc import ICRC_BYTES, icrc_of
from emulator.roce.wire.malformed import Cause
from emulator.roce.wire.opcodes import Opcode, class_of
from emulator.roce.wire.packet import Packet
from tests.support.roce.ends import Pair
from tests.support.roce.memory_network import output_of
from tests.support.roce.packets import decode_packet_untrusted, encode_packet

FLOW = flow_of("10.0.0.1", "10.0.0.2", 4791)
BACK = flow_of("10.0.0.2", "10.0.0.1", 4791)
SOURCE = Address("10.0.0.1")
MTU = 1024


class Victim:
    """A connected `b` whose peer says what the test likes, with right ICRCs."""

    def __init__(self, **how: object) -> None:
        self.pair = Pair(4096, **how)  # type: ignore[arg-type]
        self.end = self.pair.b
        self.nic = self.end.nic
        self.psn = self.pair.a.qp.query().sq_psn
        self.counted = self.nic.counters

    def hear(self, opcode: Opcode, *, psn: int | None = None, payload: bytes = b"", **rest: object) -> None:
        """A packet from the peer; with the next PSN, unless another is given."""
        if psn is None:
            psn = self.psn
            self.psn = self.psn + 1 & 0xFFFFFF
        packet = Packet(opcode, self.end.qp.number, psn, payload, **rest)  # type: ignore[arg-type]
        self.hear_bytes(encode_packet(packet, FLOW))

    def hear_bytes(self, data: bytes, source: Address = SOURCE) -> None:
        """Bytes from the peer, or from somebody else."""
        self.nic.receive(memoryview(data), max(1, len(data)), source, 0.0)

    def said(self) -> list[Packet]:
        """What it answers."""
        return [decode_packet_untrusted(burst.data, BACK, 0) for burst in output_of(self.nic)]

    def nak(self) -> int:
        """The syndrome of its one answer."""
        (answer,) = self.said()
        assert answer.aeth is not None
        return answer.aeth.syndrome

    def reth(self, length: int, offset: int = 0) -> Reth:
        """A range of its memory."""
        return Reth(self.end.region.address + offset, self.end.region.rkey, length)

    @property
    def untouched(self) -> bool:
        """No byte of its memory, or around it, has changed."""
        return self.end.memory.intact and not any(self.end.memory.view)


def _good(victim: Victim) -> bytes:
    packet = Packet(
        Opcode.WRITE_ONLY, victim.end.qp.number, victim.psn, b"x" * 64, True, reth=victim.reth(64)
    )
    return encode_packet(packet, FLOW)


def _sealed(data: bytes) -> bytes:
    return data + icrc_of(data, FLOW).to_bytes(ICRC_BYTES, "little")


def _with(position: int, value: int) -> object:
    def change(data: bytes) -> bytes:
        changed = bytearray(data[:-ICRC_BYTES])
        changed[position] = value
        return _sealed(bytes(changed))

    return change


def _window(victim: Victim) -> int:
    """A window of type 2 over all of its memory; the R_Key."""
    end = victim.end
    window = end.nic.alloc_mw(end.pd, MwType.TYPE_2)
    rkey = window.rkey & ~0xFF | 0x77
    bind = Bind(end.region, end.region.address, 4096, Access.REMOTE_WRITE | Access.REMOTE_READ)
    end.post(SendOpcode.BIND_MW, window=window, window_rkey=rkey, bind=bind)
    output_of(victim.nic)
    assert [c.status for c in end.polled()] == [WcStatus.SUCCESS]
    return rkey


def _invalidate(victim: Victim, rkey: int) -> None:
    victim.end.post(SendOpcode.LOCAL_INV, invalidate_rkey=rkey)
    burst = victim.nic.next_burst(0.0)
    assert burst is None
    assert [c.status for c in victim.end.polled()] == [WcStatus.SUCCESS]


@pytest.mark.parametrize("bound_again", [False, True])
def test_a_write_under_way_ends_where_its_window_is_invalidated(bound_again: bool) -> None:
    victim = Victim()
    end, rkey = victim.end, _window(victim)
    victim.hear(Opcode.WRITE_FIRST, payload=b"A" * MTU, reth=Reth(end.region.address, rkey, 3 * MTU))
    _invalidate(victim, rkey)
    if bound_again:
        _window(victim)
    so_far = bytes(end.memory.view)
    victim.hear(Opcode.WRITE_MIDDLE, payload=b"B" * MTU)
    assert victim.nak() == nak_syndrome(NakCode.REMOTE_ACCESS_ERROR)
    victim.hear(Opcode.WRITE_LAST, payload=b"C" * MTU)
    assert bytes(end.memory.view) == so_far
    assert so_far[:MTU] == b"A" * MTU
    assert end.qp.state is QpState.ERR


def test_a_read_under_way_ends_where_its_window_is_invalidated() -> None:
    victim = Victim()
    rkey = _window(victim)
    victim.hear(Opcode.READ_REQUEST, reth=Reth(victim.end.region.address, rkey, 4 * MTU))
    first = victim.nic.next_burst(0.0)
    assert first is not None
    assert decode_packet_untrusted(first.data, BACK, 0).opcode is Opcode.READ_RESPONSE_FIRST
    victim.nic.keys.invalidate(victim.end.pd, victim.end.qp.number, rkey)
    assert victim.nak() == nak_syndrome(NakCode.REMOTE_ACCESS_ERROR)
    assert victim.end.qp.state is QpState.ERR


def test_a_read_that_is_answered_again_may_lose_its_window_meanwhile() -> None:
    victim = Victim()
    rkey = _window(victim)
    read = {"reth": Reth(victim.end.region.address, rkey, 64)}
    psn = victim.psn
    victim.hear(Opcode.READ_REQUEST, **read)
    assert [answer.opcode for answer in victim.said()] == [Opcode.READ_RESPONSE_ONLY]
    # It comes again, for impatience; the answer to the first is there before this one is answered.
    victim.hear(Opcode.READ_REQUEST, psn=psn, **read)
    victim.end.receive(victim.end.sge(0, 64))
    victim.hear(Opcode.SEND_ONLY_WITH_INVALIDATE, payload=b"done", invalidate=rkey)
    assert all(answer.opcode is Opcode.ACKNOWLEDGE for answer in victim.said())
    assert victim.end.polled()[-1].status is WcStatus.SUCCESS
    assert victim.end.qp.state is QpState.RTS
    assert victim.counted[Count.NO_RESOURCE] == 1


DROPPED = [
    ("wrong icrc", lambda d: d[:-1] + bytes([d[-1] ^ 1]), Cause.ICRC),
    ("a flipped bit of payload", lambda d: d[:40] + bytes([d[40] ^ 1]) + d[41:], Cause.ICRC),
    ("opcode of no service", _with(0, 0xA0), Cause.OPCODE),
    ("transport version", _with(1, 0x01), Cause.VERSION),
    ("another partition", _with(2, 0x12), Count.WRONG_PKEY),
    ("unknown queue pair", _with(7, 0xFF), Count.NO_QUEUE_PAIR),
    ("a datagram for a connection", lambda d: _ud(d), Count.WRONG_SERVICE),
    ("half a header", lambda d: d[:10], Cause.SHORT),
    ("one byte", lambda d: d[:1], Cause.SHORT),
    ("no payload but padding", lambda d: _sealed(d[:1] + b"\x30" + d[2:28]), Cause.PAD),
    ("not a multiple of four", lambda d: _sealed(d[:-5]), Cause.UNALIGNED),
]


def _ud(data: bytes) -> bytes:
    number = int.from_bytes(data[5:8], "big")
    return encode_packet(Packet(Opcode.UD_SEND_ONLY, number, 1, b"", deth=Deth(1, 2)), FLOW)


@pytest.mark.parametrize(
    ("change", "cause"), [case[1:] for case in DROPPED], ids=[case[0] for case in DROPPED]
)
def test_dropped_in_silence_and_counted(change: object, cause: str) -> None:
    victim = Victim()
    victim.hear_bytes(change(_good(victim)))  # type: ignore[operator]
    assert victim.counted[cause] == 1
    assert not victim.said()
    assert victim.untouched
    victim.hear_bytes(_good(victim))
    assert victim.nak() == 0x1F
    assert victim.end.memory.view[:64] == b"x" * 64


def test_from_somebody_else() -> None:
    victim = Victim()
    stranger = flow_of("10.0.0.9", "10.0.0.2", 4791)
    packet = decode_packet_untrusted(_good(victim), FLOW, 0)
    victim.hear_bytes(encode_packet(packet, stranger), Address("10.0.0.9"))
    assert victim.counted[Count.WRONG_PEER] == 1
    victim.hear_bytes(b"x" * 40, Address("::1"))
    assert victim.counted[Count.STRANGE_SOURCE] == 1
    assert victim.untouched


def test_before_it_is_ready() -> None:
    victim = Victim()
    victim.end.qp.reset()
    victim.hear_bytes(_good(victim))
    assert victim.counted[Count.NOT_READY] == 1


def test_a_gap_is_told_once() -> None:
    victim = Victim()
    expected = victim.psn
    for ahead in (1, 2, 3):
        victim.hear(Opcode.SEND_ONLY, psn=expected + ahead & 0xFFFFFF)
    (answer,) = victim.said()
    assert answer.aeth is not None
    assert (answer.psn, answer.aeth.syndrome) == (expected, nak_syndrome(NakCode.PSN_SEQUENCE_ERROR))
    assert victim.counted[Count.OUT_OF_SEQUENCE] == 3
    assert victim.end.qp.state is QpState.RTS


SEQUENCES = [
    ("a middle without a first", [(Opcode.WRITE_MIDDLE, MTU, {})]),
    ("a last without a first", [(Opcode.SEND_LAST, 5, {})]),
    (
        "a first in a message",
        [(Opcode.WRITE_FIRST, MTU, {"reth": 3000}), (Opcode.WRITE_ONLY, 5, {"reth": 5})],
    ),
    (
        "another operation in a message",
        [(Opcode.WRITE_FIRST, MTU, {"reth": 3000}), (Opcode.SEND_LAST, 5, {})],
    ),
    (
        "a read in a message",
        [(Opcode.WRITE_FIRST, MTU, {"reth": 3000}), (Opcode.READ_REQUEST, 0, {"reth": 5})],
    ),
    ("a short first", [(Opcode.WRITE_FIRST, 512, {"reth": 3000})]),
    ("a long only", [(Opcode.WRITE_ONLY, MTU + 4, {"reth": MTU + 4})]),
    ("a first that would be an only", [(Opcode.WRITE_FIRST, MTU, {"reth": MTU})]),
    ("an only of another length", [(Opcode.WRITE_ONLY, 64, {"reth": 60})]),
    ("a short middle", [(Opcode.WRITE_FIRST, MTU, {"reth": 3000}), (Opcode.WRITE_MIDDLE, 100, {})]),
    ("an early last", [(Opcode.WRITE_FIRST, MTU, {"reth": 3000}), (Opcode.WRITE_LAST, 100, {})]),
    ("an empty last", [(Opcode.WRITE_FIRST, MTU, {"reth": 3000}), (Opcode.WRITE_LAST, 0, {})]),
    ("more than two GiB", [(Opcode.WRITE_FIRST, MTU, {"reth": (1 << 31) + 1})]),
    ("a read of more than two GiB", [(Opcode.READ_REQUEST, 0, {"reth": (1 << 31) + 1})]),
]


@pytest.mark.parametrize("packets", [case[1] for case in SEQUENCES], ids=[case[0] for case in SEQUENCES])
def test_invalid_requests_end_the_connection(packets: list[tuple[Opcode, int, dict[str, int]]]) -> None:
    victim = Victim()
    for opcode, size, extra in packets:
        rest = {"reth": victim.reth(extra["reth"])} if extra else {}
        victim.hear(opcode, payload=b"y" * size, **rest)
    assert victim.nak() == nak_syndrome(NakCode.INVALID_REQUEST)
    assert victim.end.qp.state is QpState.ERR
    assert victim.end.memory.intact
    assert not any(victim.end.memory.view[MTU:])


ANSWERS = [
    ("an acknowledgement of nothing", Opcode.ACKNOWLEDGE, {"aeth": Aeth(0x1F, 1)}),
    (
        "an answer that nobody asked for",
        Opcode.READ_RESPONSE_ONLY,
        {"aeth": Aeth(0x1F, 1), "payload": b"z" * 64},
    ),
    ("a middle of it", Opcode.READ_RESPONSE_MIDDLE, {"payload": b"z" * MTU}),
    ("an atomic's", Opcode.ATOMIC_ACKNOWLEDGE, {"aeth": Aeth(0x1F, 1), "original": 5}),
    ("a refusal of nothing", Opcode.ACKNOWLEDGE, {"aeth": Aeth(0x62, 1)}),
]


@pytest.mark.parametrize(
    ("opcode", "rest"), [case[1:] for case in ANSWERS], ids=[case[0] for case in ANSWERS]
)
def test_answers_to_nothing_are_ghosts(opcode: Opcode, rest: dict[str, object]) -> None:
    victim = Victim()
    for psn in (0, 5, 0x800000, victim.end.qp.query().sq_psn):
        victim.hear(opcode, psn=psn, **rest)  # type: ignore[arg-type]
    assert victim.counted[Count.GHOST] == 4
    assert victim.end.qp.state is QpState.RTS
    assert victim.untouched


@pytest.mark.parametrize(
    ("opcode", "payload"), [(Opcode.READ_RESPONSE_ONLY, 60), (Opcode.READ_RESPONSE_FIRST, 64), (None, 0)]
)
def test_answers_that_do_not_fit_their_request(opcode: Opcode | None, payload: int) -> None:
    victim = Victim()
    end = victim.end
    psn = end.qp.query().sq_psn
    end.post(SendOpcode.RDMA_READ, end.sge(0, 64), rkey=1)
    victim.said()
    if opcode is None:
        victim.hear(Opcode.ATOMIC_ACKNOWLEDGE, psn=psn, aeth=Aeth(0x1F, 1), original=7)
    else:
        victim.hear(opcode, psn=psn, payload=b"z" * payload, aeth=Aeth(0x1F, 1))
    assert [c.status for c in end.polled()] == [WcStatus.BAD_RESP_ERR]
    assert victim.untouched


def test_more_duplicate_reads_than_it_remembers_are_bounded() -> None:
    victim = Victim()
    first = victim.psn
    for number in range(50):
        victim.hear(Opcode.READ_REQUEST, psn=first + number & 0xFFFFFF, reth=victim.reth(8), acknowledge=True)
    for _ in range(20):
        for number in range(50):
            victim.hear(Opcode.READ_REQUEST, psn=first + number & 0xFFFFFF, reth=victim.reth(8))
    assert len(victim.end.qp.responder.responses) <= 2 * 4 + 2
    assert victim.counted[Count.NO_RESOURCE] == 20 * 46


def test_a_duplicate_read_that_asks_for_more_than_before() -> None:
    victim = Victim()
    psn = victim.psn
    victim.hear(Opcode.READ_REQUEST, reth=victim.reth(64))
    victim.said()
    victim.hear(Opcode.READ_REQUEST, psn=psn, reth=victim.reth(65))
    victim.hear(Opcode.READ_REQUEST, psn=psn, reth=victim.reth(64, 4))
    victim.hear(Opcode.READ_REQUEST, psn=psn, reth=victim.reth(64)._replace(r_key=1))
    assert not victim.said()
    assert victim.counted[Count.NO_RESOURCE] == 3


@given(st.binary(max_size=200), st.integers(1, 64))
def test_noise_changes_nothing(data: bytes, segment_size: int) -> None:
    victim = Victim()
    victim.nic.receive(memoryview(data), segment_size, SOURCE, 0.0)
    assert victim.untouched
    assert not victim.said()


def test_right_icrcs_around_random_headers(seed: int) -> None:
    """20,000 packets that are right but for what they say. The one thing that they may change is memory that
    the peer may write, so half of the region is not registered for that."""
    chance = random.Random(seed)
    opcodes = list(Opcode)
    count = int(os.environ.get("G35_FUZZ", "20000"))
    victim = Victim()
    closed = victim.nic.reg_mr(victim.end.pd, secret := bytearray(b"\x5a" * 256), 0x5000, Access.LOCAL_WRITE)
    for number in range(count):
        if number % 500 == 0 or victim.end.qp.state is not QpState.RTS:
            intact = victim.end.memory.intact and bytes(secret) == b"\x5a" * 256
            assert intact, number
            if victim.end.qp.state is not QpState.RTS:
                output_of(victim.nic)
                victim = Victim(seed=number)
                closed = victim.nic.reg_mr(victim.end.pd, secret, 0x5000, Access.LOCAL_WRITE)
        end = victim.end
        opcode = chance.choice(opcodes)
        known = class_of(opcode)
        payload = chance.choice((0, 1, 60, 1024, 1028, 4096)) if known.payload else 0
        key = chance.choice((end.region.rkey, closed.rkey, chance.getrandbits(32)))
        base = end.region.address if key == end.region.rkey else 0x5000
        address = chance.choice((base, base + 4000, base - 8, (1 << 64) - 8, chance.getrandbits(64)))
        expected = end.qp.responder.expected & 0xFFFFFF
        packet = Packet(
            opcode,
            chance.choice((end.qp.number, end.qp.number, end.qp.number, 1, 77)),
            chance.choice((expected, expected, expected, expected + 1 & 0xFFFFFF, chance.getrandbits(24))),
            bytes(payload),
            chance.random() < 0.5,
            reth=Reth(address, key, chance.choice((0, 1, 64, 1024, 5000, 1 << 31))) if known.reth else None,
            aeth=Aeth(chance.getrandbits(8), 5) if known.aeth else None,
            atomic=AtomicEth(address, key, 1, 0) if known.atomic else None,
            original=9 if known.atomic_ack else None,
            immediate=1 if known.immediate else None,
            invalidate=key if known.invalidate else None,
            deth=Deth(1, 2) if known.deth else None,
        )
        victim.hear_bytes(encode_packet(packet, FLOW))
        if number % 8 == 0:
            victim.nic.next_burst(0.0)
        if number % 16 == 0:
            end.receive(end.sge(0, 2000))
            end.polled()


def test_flipped_bits_of_a_burst_are_found_one_by_one() -> None:
    for number in range(12):
        pair = Pair(1 << 16, changes={"path_mtu": Mtu.MTU_256})
        a, b = pair.a, pair.b
        a.memory.view[:] = b"\x77" * (1 << 16)
        a.post(SendOpcode.RDMA_WRITE, a.sge(0, 256 * 12), to=b)
        first, burst = output_of(a.nic)
        b.nic.receive(first.data, first.segment_size, SOURCE, 0.0)
        damaged = bytearray(burst.data)
        position = min(number, len(damaged) // burst.segment_size - 1) * burst.segment_size
        damaged[position + 100] ^= 0x10
        b.nic.receive(memoryview(damaged), burst.segment_size, SOURCE, 0.0)
        written = 256 + position // burst.segment_size * 256
        assert bytes(b.memory.view[:written]) == b"\x77" * written
        assert not any(b.memory.view[written:])
        assert b.nic.counters[Cause.ICRC] == 1
        pair.run_until(1)
        assert bytes(b.memory.view[: 256 * 12]) == b"\x77" * 256 * 12
