"""What two processes of an agent tell each other of lent slots."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from agent.pool.counters import CAUSES, MissCause
from agent.pool.errors import BadPut, PutRefused
from agent.pool.write.slot_messages import (
    MESSAGE_BYTES_MAX,
    VALUES_MAX,
    Ask,
    BadMessage,
    End,
    Fate,
    LentSlot,
    Value,
    decode_ask,
    decode_ended,
    decode_places,
    decode_written,
    encode_ask,
    encode_ended,
    encode_places,
    encode_written,
    end_of,
    refusal_of,
)
from host_shim.transfer_wire import MANY_MAX

ASK = Ask(bytes(range(16)), 4.25, 77, [Value(bytes([n]) * 16, n + 1) for n in range(5)])
SLOT = LentSlot(bytes(range(16, 32)), (1 << 40) + 3, 1 << 50, (1 << 63) + 9, b"finger!!", 0xFFFFFFFF)
PLACES = [SLOT, (End.UNTRIED, None), (End.REFUSED, MissCause.LATE), SLOT._replace(number=0), (End.BAD, None)]
FATES = [(0, Fate.WRITTEN), (63, Fate.UNKNOWN), (7, Fate.FAILED), (8, Fate.NOT_SENT)]
ENDS = [(End.STORED, None), *((End.REFUSED, cause) for cause in CAUSES)]


def test_they_come_as_they_were_sent() -> None:
    assert decode_ask(encode_ask(ASK)) == ASK
    impatient = ASK._replace(is_patient=False)
    assert decode_ask(encode_ask(impatient)) == impatient
    assert decode_places(encode_places(PLACES), len(PLACES)) == PLACES
    assert decode_written(encode_written(FATES)) == FATES
    assert decode_ended(encode_ended(ENDS), len(ENDS)) == ENDS


def test_a_call_of_the_most_values_fits() -> None:
    assert VALUES_MAX == MANY_MAX
    most = Ask(bytes(16), 1e9, 0xFFFFFFFF, [Value(bytes(16), 0xFFFFFFFF)] * VALUES_MAX)
    assert len(encode_ask(most)) <= MESSAGE_BYTES_MAX
    assert decode_ask(encode_ask(most)).seconds == 0xFFFFFFFF / 1000, "as much as there is room for"
    assert len(encode_places([SLOT] * VALUES_MAX)) <= MESSAGE_BYTES_MAX
    too_many = Ask(bytes(16), 1.0, 0, [Value(bytes(16), 1)] * (VALUES_MAX + 1))
    with pytest.raises(BadMessage):
        decode_ask(encode_ask(too_many))


@pytest.mark.parametrize(
    "wrong",
    [
        Ask(bytes(16), 1.0, 0, []),
        Ask(bytes(16), 1.0, 0, [Value(bytes(16), 0)]),
    ],
)
def test_a_call_without_values_and_a_value_without_bytes(wrong: Ask) -> None:
    with pytest.raises(BadMessage):
        decode_ask(encode_ask(wrong))


def test_what_is_told_twice_or_of_nothing() -> None:
    for fates in ([], [(1, Fate.WRITTEN), (1, Fate.FAILED)]):
        with pytest.raises(BadMessage):
            decode_written(encode_written(fates))


def test_an_answer_has_as_many_as_were_asked_for() -> None:
    with pytest.raises(BadMessage):
        decode_places(encode_places(PLACES), len(PLACES) + 1)
    with pytest.raises(BadMessage):
        decode_ended(encode_ended(ENDS), len(ENDS) - 1)


DECODERS: list[tuple[bytes, Callable[[bytes], Any]]] = [
    (encode_ask(ASK), decode_ask),
    (encode_places(PLACES), lambda message: decode_places(message, len(PLACES))),
    (encode_written(FATES), decode_written),
    (encode_ended(ENDS), lambda message: decode_ended(message, len(ENDS))),
]


@pytest.mark.parametrize("which", range(len(DECODERS)))
def test_bytes_that_are_no_message_raise_one_exception(which: int, seed: int) -> None:
    whole, decode = DECODERS[which]
    rng = random.Random(f"slot messages {seed} {which}")
    for other, _ in DECODERS:
        if other is not whole:
            with pytest.raises(BadMessage):
                decode(other)
    cut = [whole[:end] for end in range(len(whole))] + [whole + b"\0"]
    for message in cut:
        with pytest.raises(BadMessage):
            decode(message)
    for _ in range(500):
        message = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            message[rng.randrange(len(message))] = rng.randrange(256)
        try:
            decode(bytes(message))
        except BadMessage:
            continue


def test_a_refusal_is_the_same_in_the_other_process() -> None:
    for cause in (None, *CAUSES):
        refused = refusal_of(end_of(PutRefused("full", cause)))
        assert isinstance(refused, PutRefused)
        assert refused.cause is cause
    assert isinstance(refusal_of(end_of(BadPut("too long"))), BadPut)
