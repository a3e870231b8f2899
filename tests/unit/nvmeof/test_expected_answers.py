"""Answers that a host's queue receives straight into their places, many by one call."""

from __future__ import annotations

import random

import pytest

from nvmeof.host import commands
from nvmeof.host.command import Command
from nvmeof.host.tcp_queue import TcpQueue
from nvmeof.limits import EXPECTED_BYTES, UNEXPECTED_ANSWERS
from nvmeof.tcp.pdu import C2HData, CapsuleResp, Digests
from nvmeof.tcp.receiver import EXPECTED_MAX
from nvmeof.wire.cqe import Cqe
from tests.support.nvme.host_queue_rig import Rig
from tests.support.nvme.nvme_ends import same
from tests.support.nvme.pdus import encode_pdu

FAILED = 0x281
DEPTH = 48


def reading(size: int = 8192) -> Command:
    return commands.read(1, 0, size // 4096, memoryview(bytearray(size)))


def submitted(queue: TcpQueue, *wanted: Command) -> list[Command]:
    for command in wanted:
        queue.submit(command, 1.0)
    queue.sent(sum(map(len, queue.output)))
    return list(wanted)


def answer(command: Command, data: bytes) -> bytes:
    """All of it as one PDU."""
    return b"".join(encode_pdu(C2HData(command.cid, 0, len(data), success=True), data=(data,)))


def received(queue: TcpQueue, raw: bytes, most: int) -> tuple[int, list[Command]]:
    """One receive of up to `most` bytes; how many, and what it ended."""
    count = 0
    for buffer in queue.next_buffers():
        part = raw[count : min(most, count + len(buffer))]
        buffer[: len(part)] = part
        count += len(part)
    return count, queue.received(count)


def received_all(queue: TcpQueue, raw: bytes, dice: random.Random, most: int) -> list[Command]:
    ended: list[Command] = []
    while raw:
        count, more = received(queue, raw, dice.randint(1, most))
        raw = raw[count:]
        ended += more
    return ended


def test_answers_in_order_come_by_one_receive() -> None:
    queue = Rig(depth=DEPTH).queue
    asked = submitted(queue, *(reading(20480) for _ in range(12)))
    contents = [random.Random(number).randbytes(20480) for number in range(12)]
    raw = b"".join(map(answer, asked, contents))
    assert received(queue, raw, len(raw)) == (len(raw), asked)
    assert all(
        command.status == 0 and same(command.data_in, data)
        for command, data in zip(asked, contents, strict=True)
    )
    assert queue.receiving is None


def test_no_more_is_received_at_once_than_the_bounds_say() -> None:
    queue = Rig(depth=DEPTH).queue
    submitted(queue, *(reading(4096) for _ in range(DEPTH)))
    assert len(queue.next_buffers()) == 2 * EXPECTED_MAX + 1
    queue = Rig(depth=DEPTH).queue
    size = EXPECTED_BYTES // 4
    submitted(queue, *(reading(size) for _ in range(12)))
    assert [len(each) for each in queue.next_buffers()][1:-1:2] == [size] * 4


@pytest.mark.parametrize("digests", [Digests(True, False), Digests(False, True)])
def test_with_digests_nothing_is_expected(digests: Digests) -> None:
    queue = Rig(depth=DEPTH, digests=digests).queue
    submitted(queue, reading(), reading())
    assert len(queue.next_buffers()) == 1


def test_memory_of_an_abandoned_read_is_not_touched() -> None:
    queue = Rig(depth=DEPTH).queue
    first, second, third = submitted(queue, reading(), reading(), reading())
    queue.abandon(second)
    raw = b"".join(answer(command, b"x" * 8192) for command in (first, second, third))
    ended = received_all(queue, raw, random.Random(1), len(raw))
    assert ended == [first, third]
    assert second.data_in is None
    assert same(third.data_in, b"x" * 8192)


def test_behind_data_of_an_abandoned_read_nothing_is_expected() -> None:
    """More of its data may follow, and they are none of the next reader's."""
    queue = Rig(depth=DEPTH).queue
    first, second = submitted(queue, reading(), reading())
    data = b"f" * 8192
    pieces = [
        b"".join(encode_pdu(C2HData(first.cid, at, 4096, success=bool(at)), data=(data[at : at + 4096],)))
        for at in (0, 4096)
    ]
    queue.next_buffer()[:100] = pieces[0][:100]
    assert queue.received(100) == []
    queue.abandon(first)
    raw = pieces[0][100:] + pieces[1]
    assert received(queue, raw, len(raw)) == (len(raw), [])
    assert same(second.data_in, bytes(8192))
    assert received_all(queue, answer(second, b"s" * 8192), random.Random(1), 1 << 20) == [second]
    assert same(second.data_in, b"s" * 8192)


def test_a_controller_with_an_order_of_its_own_is_taken_as_it_comes_for_a_while() -> None:
    queue = Rig(depth=DEPTH).queue
    first, second = submitted(queue, reading(), reading())
    raw = answer(second, b"b" * 8192) + answer(first, b"a" * 8192)
    assert received(queue, raw, len(raw)) == (len(raw), [second, first])
    assert same(first.data_in, b"a" * 8192)
    assert same(second.data_in, b"b" * 8192)
    for number in range(UNEXPECTED_ANSWERS):
        (command,) = submitted(queue, reading())
        is_expected = len(queue.next_buffers()) > 1
        assert is_expected is (number >= UNEXPECTED_ANSWERS - 2)  # two have come with the surprise
        assert received_all(queue, answer(command, b"c" * 8192), random.Random(number), 1 << 20) == [command]


def test_whatever_comes_is_what_comes_without_expecting(seed: int) -> None:
    """Answers in any order, whole, in pieces, with completions, as errors: both queues end up the same."""
    dice = random.Random(seed)
    for _ in range(50):
        sizes = [4096 * dice.choice((1, 1, 2, 5, 17, 80)) for _ in range(dice.randint(1, 12))]
        pair = [Rig(depth=DEPTH).queue for _ in range(2)]
        asked = [submitted(queue, *map(reading, sizes)) for queue in pair]
        for number in dice.sample(range(len(sizes)), dice.choice((0, 0, 1, len(sizes)))):
            for queue, its in zip(pair, asked, strict=True):
                queue.abandon(its[number])
        order = list(range(len(sizes)))
        if dice.random() < 0.3:
            dice.shuffle(order)
        strange = dice.choice((0.0, 0.1, 0.6))
        raw = bytearray()
        for number in order:
            command, data = asked[0][number], dice.randbytes(sizes[number])
            way = dice.choice(("pieces", "completion", "error")) if dice.random() < strange else "whole"
            if way == "whole":
                raw += answer(command, data)
            elif way == "error":
                raw += b"".join(encode_pdu(CapsuleResp(Cqe(command.cid, status=FAILED))))
            else:
                cut = len(data) // 2 if way == "pieces" else len(data)
                for at in range(0, len(data), cut):
                    piece = data[at : at + cut]
                    last = at + cut == len(data)
                    raw += b"".join(encode_pdu(C2HData(command.cid, at, len(piece), last), data=(piece,)))
                raw += b"".join(encode_pdu(CapsuleResp(Cqe(command.cid))))
        ended = received_all(pair[0], bytes(raw), dice, dice.choice((30, 5000, 1 << 20)))
        pair[1]._unexpected = 1 << 20  # expects nothing
        plain = received_all(pair[1], bytes(raw), dice, 1 << 20)
        assert [asked[0].index(each) for each in ended] == [asked[1].index(each) for each in plain]
        for one, other in zip(*asked, strict=True):
            assert (one.done, one.status, one.received) == (other.done, other.status, other.received)
            assert (one.data_in is None) == (other.data_in is None)
            if one.status == 0:
                assert same(one.data_in, other.data_in or b"")
