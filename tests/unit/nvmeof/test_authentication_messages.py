"""Authentication messages: every field survives, the kernel's bytes are ours, bad ones are refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvmeof.authentication.responses import Exchange
from nvmeof.authentication.secret import parse_secret
from nvmeof.errors import MalformedPdu
from nvmeof.wire.authentication import (
    Challenge,
    ControllerMessage,
    Failure,
    FailureReason,
    HashId,
    HostMessage,
    Negotiate,
    Protocol,
    Reply,
    Success1,
    Success2,
    decode_controller_message_untrusted,
    decode_host_message_untrusted,
    describe_reason,
    transaction_of,
)
from nvmeof.wire.fabrics import decode_authentication
from nvmeof.wire.sqe import decode_sqe_untrusted

KERNEL = json.loads(
    (Path(__file__).parents[2] / "vectors" / "dhchap" / "kernel_both_ways.json").read_text("ascii")
)
U8, U16, U32 = st.integers(0, 0xFF), st.integers(0, 0xFFFF), st.integers(0, 0xFFFF_FFFF)
IDS = st.lists(U8, max_size=30).map(tuple)
LENGTHS = st.sampled_from([0, 1, 32, 48, 64, 255])


def _of(length: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=length, max_size=length)


HOST_MESSAGES = st.one_of(
    st.builds(Negotiate, U16, st.lists(st.builds(Protocol, IDS, IDS), max_size=3).map(tuple), U8),
    LENGTHS.flatmap(
        lambda n: st.builds(Reply, U16, _of(n), U32, st.none() | _of(n), st.binary(max_size=1024))
    ),
    st.builds(Success2, U16),
    st.builds(Failure, U16, U8, st.just(True), U8),
)
CONTROLLER_MESSAGES = st.one_of(
    st.builds(Challenge, U16, U8, U8, U32, st.binary(max_size=255), st.binary(max_size=1024)),
    LENGTHS.flatmap(lambda n: st.builds(Success1, U16, st.just(n), st.none() | _of(n))),
    st.builds(Failure, U16, U8, st.just(False), U8),
)


@given(HOST_MESSAGES)
def test_what_a_host_sends_survives(message: HostMessage) -> None:
    raw = message.encode()
    assert decode_host_message_untrusted(raw) == message
    assert transaction_of(raw) == message.transaction


@given(CONTROLLER_MESSAGES, st.integers(0, 100))
def test_what_a_controller_gives_survives_with_zeros_behind_it(
    message: ControllerMessage, padding: int
) -> None:
    assert decode_controller_message_untrusted(message.encode() + bytes(padding)) == message


@given(st.one_of(HOST_MESSAGES, CONTROLLER_MESSAGES), st.data())
def test_truncated_messages_are_malformed(message: HostMessage | ControllerMessage, data: Any) -> None:
    raw = message.encode()
    short = raw[: data.draw(st.integers(0, len(raw) - 1))]
    from_host = isinstance(message, Negotiate | Reply | Success2) or (
        isinstance(message, Failure) and message.from_host
    )
    if from_host:
        with pytest.raises(MalformedPdu):
            decode_host_message_untrusted(short)
    elif not (isinstance(message, Success1) and message.response is None and len(short) >= 16):
        with pytest.raises(MalformedPdu):
            decode_controller_message_untrusted(short)


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(raw: bytes) -> None:
    for decode in (decode_host_message_untrusted, decode_controller_message_untrusted):
        with contextlib.suppress(MalformedPdu):
            decode(raw)  # type: ignore[operator]
    transaction_of(raw)


GOLDEN: list[tuple[str, Any]] = [
    (
        "00 00 0000 2211 05 02 01 00 02 03 0201" + "00" * 28 + "050403" + "00" * 27 + "07" + "00" * 63,
        Negotiate(0x1122, (Protocol((2, 1), (5, 4, 3)), Protocol((), (), 7)), 5),
    ),
    (
        "01 01 0000 2211 03 00 02 04 0200 88776655 a1a2a3 b1b2",
        Challenge(0x1122, 2, 4, 0x55667788, b"\xa1\xa2\xa3", b"\xb1\xb2"),
    ),
    (
        "01 02 0000 2211 02 00 01 00 0300 88776655 a1a2 c1c2 b1b2b3",
        Reply(0x1122, b"\xa1\xa2", 0x55667788, b"\xc1\xc2", b"\xb1\xb2\xb3"),
    ),
    ("01 02 0000 2211 02 00 00 00 0100 00000000 a1a2 0000 b1", Reply(0x1122, b"\xa1\xa2", 0, None, b"\xb1")),
    ("01 03 0000 2211 02 00 01 00000000000000 a1a2", Success1(0x1122, 2, b"\xa1\xa2")),
    ("01 03 0000 2211 02 00 00 00000000000000 0000", Success1(0x1122, 2)),
    ("01 04 0000 2211" + "00" * 10, Success2(0x1122)),
    ("00 f0 0000 2211 01 06", Failure(0x1122, FailureReason.INCORRECT_PAYLOAD, from_host=True)),
    ("00 f1 0000 2211 01 04", Failure(0x1122, FailureReason.HASH_UNUSABLE, from_host=False)),
]


@pytest.mark.parametrize(("text", "message"), GOLDEN, ids=lambda each: type(each).__name__)
def test_golden(text: str, message: Any) -> None:
    """Laid out by hand after TP8006, every field with a value of its own."""
    raw = bytes.fromhex(text)
    assert message.encode() == raw
    is_host = isinstance(message, Negotiate | Reply | Success2) or getattr(message, "from_host", False)
    assert (decode_host_message_untrusted if is_host else decode_controller_message_untrusted)(raw) == message


def test_more_ids_than_places_are_malformed() -> None:
    raw = bytearray(Negotiate(1, (Protocol((1,), (0,)),)).encode())
    raw[8 + 2] = 31
    with pytest.raises(MalformedPdu):
        decode_host_message_untrusted(raw)


@pytest.mark.parametrize("exchange", KERNEL["exchanges"], ids=["queue-0", "queue-1"])
def test_the_kernels_messages(exchange: dict[str, str]) -> None:
    """Decoded, encoded again to the same bytes, and the two responses computed anew."""
    raw = {name: bytes.fromhex(text) for name, text in exchange.items()}
    negotiate = decode_host_message_untrusted(raw["negotiate"])
    challenge = decode_controller_message_untrusted(raw["challenge"])
    reply = decode_host_message_untrusted(raw["reply"])
    success1 = decode_controller_message_untrusted(raw["success1"])
    success2 = decode_host_message_untrusted(raw["success2"])
    for name, message in zip(raw, (negotiate, challenge, reply, success1, success2), strict=True):
        assert message.encode() == raw[name]
    assert isinstance(negotiate, Negotiate)
    assert negotiate.protocols == (Protocol((1, 2, 3), (0, 1, 2, 3, 4, 5)),)
    assert isinstance(challenge, Challenge)
    assert isinstance(reply, Reply)
    assert isinstance(success1, Success1)
    assert isinstance(success2, Success2)
    assert reply.challenge is not None
    assert challenge.sequence
    assert reply.sequence == challenge.sequence + 1
    agreed = Exchange(HashId.SHA256, challenge.transaction, KERNEL["host_nqn"], KERNEL["subsystem_nqn"])
    host, own = parse_secret(KERNEL["host_secret"]), parse_secret(KERNEL["controller_secret"])
    assert agreed.host_response(host, challenge.challenge, challenge.sequence) == reply.response
    assert agreed.controller_response(own, reply.challenge, reply.sequence) == success1.response


def test_the_kernels_commands() -> None:
    lengths = []
    for text in KERNEL["commands"]:
        fields = decode_authentication(decode_sqe_untrusted(bytes.fromhex(text)))
        assert (fields.secp, fields.spsp0, fields.spsp1) == (0xE9, 1, 1)
        lengths.append((fields.receive, fields.length))
    assert lengths == [(False, 72), (True, 4096), (False, 80), (True, 4096), (False, 16)]


def test_reasons_in_words() -> None:
    assert describe_reason(FailureReason.GROUP_UNUSABLE) == "group unusable"
    assert describe_reason(0x77) == "reason 0x77"
