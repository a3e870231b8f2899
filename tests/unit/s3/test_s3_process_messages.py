"""What S3 doors of an agent's processes tell each other: each message comes as it was sent, or is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.fs.files.sealed_reads import BlockRange
from agent.http.counters import summed
from agent.s3.index import StoredObject
from agent.s3.processes import messages
from agent.s3.processes.messages import (
    ELSEWHERE,
    BadMessage,
    Carried,
    Carry,
    Done,
    Find,
    Found,
    Lost,
    Refused,
)
from agent.s3.processes.reader_objects import ranges_within

FOUND = StoredObject("a/ü", 5000, "etag", 17, 3, {"x-amz-meta-a": "b"}, "crc32:AAAA")
BLOCKS = [BlockRange(bytes([at]) * 16, 4096, 0, size) for at, size in enumerate((4096, 904))]


@pytest.mark.parametrize("ask", [Find("one", "blocks", "a/ü", holds=True), Done([1, 2]), Lost("one", 3)])
def test_a_question_comes_as_it_was_sent(ask: messages.Ask) -> None:
    assert messages.decode_ask(messages.encode_ask(ask)) == ask


@pytest.mark.parametrize(
    "reply", [Found(FOUND, 9, {4096: "ab"}, BLOCKS), Found(FOUND, 0, {}, []), Refused("NoSuchKey", "no")]
)
def test_an_answer_comes_as_it_was_sent(reply: messages.Reply) -> None:
    assert messages.decode_reply(messages.encode_reply(reply)) == reply
    assert messages.decode_reply(messages.encode_reply(ELSEWHERE)) is ELSEWHERE


def test_a_request_comes_with_its_bytes() -> None:
    carry, carried = Carry(7, "127.0.0.1", b"PUT / HTTP/1.1\r\n\r\n\n\x00\xff"), Carried(7, goes_on=True)
    assert messages.decode_carry(messages.encode_carry(carry)) == carry
    assert messages.decode_carried(messages.encode_carried(carried)) == carried


@given(st.binary(max_size=64) | st.sampled_from([b"{}", b"[]", b"1", b'{"find": 3}', b'{"found": {}}']))
def test_what_is_no_message_is_said_to_be_none(data: bytes) -> None:
    for decode in (
        messages.decode_ask, messages.decode_reply, messages.decode_carry, messages.decode_carried
    ):  # fmt: skip
        with pytest.raises(BadMessage):
            decode(data)


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(0, 400), st.integers(0, 400))
def test_a_part_of_an_object_is_a_part_of_its_blocks(sizes: list[int], offset: int, length: int) -> None:
    blocks = [BlockRange(bytes([at]) * 16, 64, 0, size) for at, size in enumerate(sizes)]
    whole = [(block.block_id, at) for block in blocks for at in range(block.size)]
    found = [
        (part.block_id, at)
        for part in ranges_within(blocks, offset, length)
        for at in range(part.start, part.start + part.size)
    ]
    assert found == whole[offset : offset + length]


def test_counts_of_several_doors_are_added() -> None:
    one, other = (
        {"bytes_read": 3, "requests": {"GetObject": 2}},
        {"bytes_read": 4, "requests": {"PutObject": 1}},
    )
    assert summed([one, other]) == {"bytes_read": 7, "requests": {"GetObject": 2, "PutObject": 1}}
    assert summed([]) == {}
