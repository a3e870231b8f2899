"""What processes of one agent tell each other of a guest's queues: each message comes back as it was."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.fs.guest_sessions import Binding, Bound
from agent.fs.virtiofs.processes.messages import (
    ANSWER_BYTES_MAX,
    LINE_BYTES_MAX,
    QUESTION,
    BadMessage,
    Done,
    Place,
    PlacedRegion,
    Refused,
    Run,
    Stop,
    UseCall,
    UseMemory,
    decode_answer,
    decode_bound,
    decode_message,
    decode_written,
    encode_answer,
    encode_bad,
    encode_bound,
    encode_message,
    encode_written,
)
from agent.virtio.memory_table import REGIONS_MAX
from host_shim.control_wire import TICKETS_MAX

REGIONS = [
    PlacedRegion(1 << 40, (1 << 64) - 1, (1 << 63) + number, Place(number, 1 << 50, 1 << 40))
    for number in range(REGIONS_MAX)
]
RUN = Run(
    3, 1024, 65535, 0x1_7000_0000, Place(0, 1, 2), Place(0, 3, 4), Place(1, 5, 6), Place(32, 7, 8), REGIONS
)  # fmt: skip


@pytest.mark.parametrize("message", [RUN, Stop(2), UseCall(1, True), UseCall(1, False), UseMemory(REGIONS)])
def test_a_message_comes_back(message: Run | Stop | UseCall | UseMemory) -> None:
    line = encode_message(message)
    assert len(line) <= LINE_BYTES_MAX
    assert decode_message(line) == message


@pytest.mark.parametrize("answer", [Done(), Done(0), Done(65535), Refused("a ring that bites its tail")])
def test_an_answer_comes_back(answer: Done | Refused) -> None:
    assert decode_answer(encode_answer(answer)) == answer


NAMES = st.sampled_from(["Run", "Stop", "UseCall", "UseMemory", "index", "regions", "descriptors"])
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@given(st.binary(max_size=80) | JSON.map(lambda found: json.dumps(found).encode()))
def test_what_is_no_message_says_so(line: bytes) -> None:
    for decode in (decode_message, decode_answer, decode_bound, decode_written):
        try:
            decode(line)
        except BadMessage:
            continue


def test_how_many_bytes_were_written_is_never_taken_for_a_broken_ring() -> None:
    for count in (0, 1, 255, 256, 0x0101_0101, (1 << 32) - 1):
        assert decode_written(encode_written(count)) == (count, None)
        bound = Bound(count, [Binding(1, count, "v", bytes(16))])
        assert decode_written(encode_written(count, bound)) == (count, bound)
    assert decode_written(encode_bad("abcd")) == "abcd"


def test_all_bindings_of_a_session_come_back() -> None:
    bindings = [
        Binding(number, (1 << 55) + number, f"volume {number % 200}", number.to_bytes(16, "big"))
        for number in range(TICKETS_MAX)
    ]
    answer = encode_written(0, Bound(1 << 60, bindings))
    assert len(answer) <= ANSWER_BYTES_MAX
    assert decode_written(answer) == (0, Bound(1 << 60, bindings))
    assert decode_bound(encode_bound(Bound(0, []))) == Bound(0, [])


def test_a_binding_of_a_volume_too_many_is_left_out() -> None:
    bindings = [Binding(number, number + 1, f"v{number:04}", bytes(16)) for number in range(300)]
    assert decode_bound(encode_bound(Bound(3, bindings))) == Bound(3, bindings[:255])


def test_a_question_has_one_layout() -> None:
    packed = QUESTION.pack(1, 1, 0x0203, 0, 0x0405060708090A0B, 0x0C0D0E0F10111213)
    assert packed == bytes.fromhex("01 01 03 02 00 00 00 00 0b 0a 09 08 07 06 05 04 13 12 11 10 0f 0e 0d 0c")
