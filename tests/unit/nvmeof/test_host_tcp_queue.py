"""The host's TCP queue against a scripted controller: what it sends, what it bears, and what it doesn't."""

from __future__ import annotations

import random

import pytest

from nvmeof.errors import CommandFailed, ConnectionLost, FatalErrorStatus, LocalProtocolError, QueueFull
from nvmeof.host import commands
from nvmeof.host.command import Command
from nvmeof.host.tcp_queue import QueueState, TcpQueue, stretch
from nvmeof.tcp.pdu import (
    R2T,
    C2HData,
    CapsuleCmd,
    CapsuleResp,
    Digests,
    H2CData,
    ICReq,
    ICResp,
    Pdu,
    TermReq,
)
from nvmeof.wire.cqe import Cqe
from nvmeof.wire.sqe import Sqe
from nvmeof.wire.status import Status
from tests.support.link import Link
from tests.support.nvme.host_queue_rig import Rig
from tests.support.nvme.nvme_ends import HostEnd, ScriptedController, same

NONE, BOTH = Digests(), Digests(True, True)


def reading(size: int = 8192) -> Command:
    return commands.read(1, 0, size // 4096, memoryview(bytearray(size)))


@pytest.mark.parametrize(
    "command", [commands.authentication_receive(), commands.get_log_page(2, 512)], ids=lambda each: each.name
)
def test_an_answer_to_an_allocation_length_may_be_shorter(command: Command) -> None:
    rig = Rig()
    cid = rig.submit(command)
    rig.say(C2HData(cid, 0, 48, True, False), CapsuleResp(Cqe(cid)), data=bytes([7]) * 48)
    command.check()
    assert command.received == 48
    assert command.data_in is not None
    assert same(command.data_in, (bytes([7]) * 48).ljust(command.in_bytes, b"\0"))


def test_identify_has_its_whole_length_or_fails() -> None:
    rig = Rig()
    command = commands.identify(1)
    cid = rig.submit(command)
    rig.say(C2HData(cid, 0, 2048, True, False), CapsuleResp(Cqe(cid)))
    assert command.status == Status.DATA_TRANSFER_ERROR


def test_initialization_says_what_we_want() -> None:
    queue = TcpQueue(4, digests=BOTH)
    peer = ScriptedController(BOTH)
    link = Link(HostEnd(queue), peer, chunk=1)
    with pytest.raises(LocalProtocolError):
        queue.submit(commands.flush(1), 0.0)
    queue.start()
    with pytest.raises(LocalProtocolError):
        queue.start()
    link.run()
    assert peer.heard == [ICReq(True, True, 0)]
    assert not queue.ready
    peer.initialize()
    link.run()
    assert queue.ready
    assert queue._digests == BOTH


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        (ICResp(True, True, 4096), 11),
        (ICResp(max_h2c_data=4095), 12),
        (ICResp(max_h2c_data=4096, version=1), 8),
    ],
)
def test_initialization_that_does_not_fit(answer: ICResp, field: int) -> None:
    queue = TcpQueue(4)
    host, peer = HostEnd(queue), ScriptedController()
    link = Link(host, peer)
    queue.start()
    link.run()
    peer.say(answer)
    link.run()
    assert peer.termination is not None
    assert peer.termination.fatal_error_status == FatalErrorStatus.UNSUPPORTED_PARAMETER
    assert peer.termination.information == field


def test_initialized_twice() -> None:
    rig = Rig()
    rig.say(ICResp(max_h2c_data=4096))
    assert rig.broke() == FatalErrorStatus.SEQUENCE_ERROR


@pytest.mark.parametrize("digests", [NONE, BOTH])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 16])
def test_read_in_pieces_with_a_completion(digests: Digests, chunk: int) -> None:
    rig = Rig(digests=digests, chunk=chunk)
    command = reading()
    cid = rig.submit(command)
    capsule = rig.peer.heard[-1]
    assert isinstance(capsule, CapsuleCmd)
    assert (capsule.sqe.sgl.length, capsule.sqe.sgl.kind, capsule.sqe.sgl.subtype) == (8192, 5, 0xA)
    data = random.Random(2).randbytes(8192)
    rig.say(C2HData(cid, 0, 4096, last=False), data=data[:4096])
    assert command.received == 4096
    assert not command.done
    rig.say(C2HData(cid, 4096, 4096), data=data[4096:])
    assert command.received == 8192
    assert not command.done
    rig.say(CapsuleResp(Cqe(cid, result=5)))
    assert command.done
    assert (command.status, command.result) == (0, 5)
    assert same(command.data_in, data)
    assert rig.host.ended == [command]
    command.check()


def test_read_with_success_and_progress_within_a_pdu() -> None:
    rig = Rig(chunk=1000)
    command = reading(65536)
    cid = rig.submit(command)
    rig.peer.say(C2HData(cid, 0, 65536, success=True), data=b"x" * 65536)
    seen = [0]
    while rig.link.step():
        assert command.received >= seen[-1]
        seen.append(command.received)
    assert len(set(seen)) > 50
    assert command.done
    assert command.status == 0
    assert rig.queue.in_flight == 0


def test_out_of_order_data_count_from_the_front() -> None:
    rig = Rig()
    command = reading()
    cid = rig.submit(command)
    rig.say(C2HData(cid, 4096, 4096, last=False), data=b"b" * 4096)
    assert command.received == 0
    rig.say(C2HData(cid, 0, 4096, success=True), data=b"a" * 4096)
    assert command.status == 0
    assert same(command.data_in, b"a" * 4096 + b"b" * 4096)


def test_two_reads_at_once() -> None:
    rig = Rig(chunk=77)
    first, second = reading(), reading()
    a, b = rig.submit(first), rig.submit(second)
    assert a != b
    rig.say(
        C2HData(b, 0, 4096, last=False),
        C2HData(a, 0, 8192, success=True),
        C2HData(b, 4096, 4096, success=True),
        data=b"z" * 8192,
    )
    assert first.status == second.status == 0
    assert rig.host.ended == [first, second]


@pytest.mark.parametrize("digests", [NONE, BOTH])
def test_write_in_the_capsule(digests: Digests) -> None:
    rig = Rig(digests=digests, in_capsule=8192)
    parts = [b"a" * 4096, memoryview(bytearray(b"b" * 4096))]
    command = commands.write(1, 7, 2, parts)
    cid = rig.submit(command)
    capsule = rig.peer.heard[-1]
    assert isinstance(capsule, CapsuleCmd)
    assert capsule.sqe.sgl.in_capsule
    assert capsule.data_length == 8192
    assert (capsule.sqe.slba, capsule.sqe.blocks) == (7, 2)
    assert same(b"".join(rig.peer.data), b"a" * 4096 + b"b" * 4096)
    rig.say(CapsuleResp(Cqe(cid)))
    assert command.status == 0


@pytest.mark.parametrize("digests", [NONE, BOTH])
def test_write_by_r2t(digests: Digests) -> None:
    """Two R2Ts, the first answered by several H2CData of at most MAXH2CDATA."""
    rig = Rig(digests=digests, chunk=501)
    data = random.Random(3).randbytes(32768)
    command = commands.write(1, 0, 8, [data[:100], data[100:20000], data[20000:]])
    cid = rig.submit(command)
    rig.peer.heard.clear()
    rig.say(R2T(cid, 7, 0, 20480))
    rig.say(R2T(cid, 8, 20480, 12288))
    heard = [event for event in rig.peer.heard if isinstance(event, H2CData)]
    assert heard == [
        H2CData(cid, 7, 0, 8192, False),
        H2CData(cid, 7, 8192, 8192, False),
        H2CData(cid, 7, 16384, 4096, True),
        H2CData(cid, 8, 20480, 8192, False),
        H2CData(cid, 8, 28672, 4096, True),
    ]
    assert same(b"".join(rig.peer.data), data)
    rig.say(CapsuleResp(Cqe(cid)))
    assert command.status == 0


@pytest.mark.parametrize(("offset", "length"), [(0, 8193), (0, 0), (4096, 4096), (1 << 31, 4096)], ids=str)
def test_r2t_out_of_range(offset: int, length: int) -> None:
    rig = Rig()
    cid = rig.submit(commands.write(1, 0, 2, [bytes(8192)]))
    rig.say(R2T(cid, 1, offset, length))
    assert rig.broke() == FatalErrorStatus.OUT_OF_RANGE


def test_r2t_for_a_read_or_for_nothing() -> None:
    rig = Rig()
    rig.say(R2T(rig.submit(reading()), 1, 0, 4096))
    assert rig.broke() == FatalErrorStatus.OUT_OF_RANGE
    rig = Rig()
    rig.say(R2T(99, 1, 0, 4096))
    assert rig.broke() == FatalErrorStatus.INVALID_HEADER_FIELD


@pytest.mark.parametrize(
    ("pdu", "status"),
    [
        (C2HData(0, 4096, 8192), FatalErrorStatus.OUT_OF_RANGE),
        (C2HData(0, 0xFFFF_FFF0, 4096), FatalErrorStatus.OUT_OF_RANGE),
        (C2HData(9, 0, 4096), FatalErrorStatus.INVALID_HEADER_FIELD),
        (C2HData(0, 0, 4096, last=False, success=True), FatalErrorStatus.INVALID_HEADER_FIELD),
        (CapsuleResp(Cqe(9)), FatalErrorStatus.INVALID_HEADER_FIELD),
        (CapsuleCmd(Sqe(2)), FatalErrorStatus.SEQUENCE_ERROR),
    ],
    ids=["beyond", "far beyond", "unknown", "success not last", "unknown completion", "a command"],
)
def test_a_controller_that_errs(pdu: Pdu, status: FatalErrorStatus) -> None:
    """It gets the right termination, and everything in flight is lost exactly once."""
    rig = Rig()
    lost = [reading(), reading()]
    for command in lost:
        rig.submit(command)
    rig.say(pdu, data=bytes(8192))
    assert rig.broke() == status
    assert sorted(c.cid for c in rig.host.ended) == [0, 1]
    assert all(c.lost and c.done and c.status is None for c in lost)
    with pytest.raises(ConnectionLost):
        lost[0].check()


def test_the_same_data_twice() -> None:
    rig = Rig()
    cid = rig.submit(reading())
    rig.say(C2HData(cid, 0, 8192, last=False), C2HData(cid, 0, 8192), data=bytes(8192))
    assert rig.broke() == FatalErrorStatus.LIMIT_EXCEEDED


def test_data_after_the_completion() -> None:
    rig = Rig()
    command = reading()
    cid = rig.submit(command)
    rig.say(CapsuleResp(Cqe(cid, Status.UNRECOVERED_READ_ERROR)), C2HData(cid, 0, 8192), data=bytes(8192))
    assert rig.queue.state is QueueState.FAILED
    assert command.status == Status.UNRECOVERED_READ_ERROR


def test_success_without_all_the_data_is_a_failure() -> None:
    rig = Rig()
    short, never_asked = reading(), commands.write(1, 0, 2, [bytes(8192)])
    a, b = rig.submit(short), rig.submit(never_asked)
    rig.say(C2HData(a, 0, 4096, success=True), data=bytes(4096))
    rig.say(CapsuleResp(Cqe(b)))
    assert short.status == never_asked.status == Status.DATA_TRANSFER_ERROR
    assert rig.queue.ready


def test_wrong_data_digest_fails_the_command_only() -> None:
    """Status 22h, transient transport error; and nothing of it counts as received."""
    for success in (True, False):
        rig = Rig(digests=BOTH)
        command = reading()
        cid = rig.submit(command)
        rig.link.ways[1].spoil_at = rig.link.ways[1].moved + 28 + 100
        rig.say(C2HData(cid, 0, 8192, success=success), data=b"d" * 8192)
        assert command.received == 0
        if not success:
            rig.say(CapsuleResp(Cqe(cid)))
        assert command.status == Status.TRANSIENT_TRANSPORT_ERROR
        good = reading()
        rig.say(C2HData(rig.submit(good), 0, 8192, success=True), data=b"d" * 8192)
        assert good.status == 0


def test_only_the_digest_is_missing() -> None:
    """An adapter that waits for more payload when none is coming would wait for ever."""
    rig = Rig(digests=BOTH)
    command = reading()
    cid = rig.submit(command)
    way = rig.link.ways[1]
    rig.peer.say(C2HData(cid, 0, 8192, success=True), data=bytes(8192))
    end = way.moved + 28 + 8192
    rig.link._chunk = 1
    while way.moved < end - 1:
        rig.link.step()
    assert rig.queue.receiving is command
    rig.link.step()
    assert rig.queue.receiving is None
    assert (command.received, command.done) == (0, False)
    rig.link.run()
    assert (command.received, command.status) == (8192, 0)


def test_wrong_header_digest_ends_the_connection() -> None:
    rig = Rig(digests=BOTH)
    command = reading()
    cid = rig.submit(command)
    rig.link.ways[1].spoil_at = rig.link.ways[1].moved + 12
    rig.say(C2HData(cid, 0, 8192, success=True), data=bytes(8192))
    assert rig.broke() == FatalErrorStatus.HEADER_DIGEST_ERROR
    assert command.lost


def test_a_failed_command() -> None:
    rig = Rig()
    command = reading()
    cid = rig.submit(command)
    rig.say(CapsuleResp(Cqe(cid, Status.LBA_OUT_OF_RANGE, do_not_retry=True)))
    assert command.failure() == "lba out of range (0x080)"
    assert command.do_not_retry
    with pytest.raises(CommandFailed) as caught:
        command.check()
    assert caught.value.status == Status.LBA_OUT_OF_RANGE
    assert str(caught.value) == "read: lba out of range (0x080)"


def test_the_controller_ends_the_connection() -> None:
    rig = Rig()
    command = reading()
    rig.submit(command)
    rig.say(TermReq(False, FatalErrorStatus.OUT_OF_RANGE, 12))
    assert rig.queue.state is QueueState.FAILED
    assert rig.peer.termination is None
    assert command.lost
    assert "out of range" in str(command.failure())


def test_depth_and_misuse() -> None:
    rig = Rig(depth=2)
    first, second = reading(), reading()
    cid = rig.submit(first)
    rig.submit(second)
    third = reading()
    with pytest.raises(QueueFull):
        rig.queue.submit(third, 0.0)
    assert third.cid == -1
    rig.say(C2HData(cid, 0, 8192, success=True), data=bytes(8192))
    rig.submit(third)
    with pytest.raises(LocalProtocolError):
        rig.queue.submit(third, 0.0)
    with pytest.raises(LocalProtocolError):
        rig.queue.abandon(reading())
    with pytest.raises(LocalProtocolError):
        TcpQueue(0)


def test_ids_come_again_as_late_as_possible() -> None:
    rig = Rig()
    seen = []
    for _ in range(20):
        command = commands.flush(1)
        seen.append(rig.submit(command))
        rig.say(CapsuleResp(Cqe(command.cid)))
    assert seen == list(range(20))
    held = reading()
    rig.submit(held)
    rig.queue._next_cid = 0xFFFE
    assert rig.submit(commands.flush(1)) == 0xFFFE
    assert rig.submit(commands.flush(1)) == 0
    rig.queue._next_cid = held.cid
    assert rig.submit(commands.flush(1)) == held.cid + 1


# --- abandoning -------------------------------------------------------------------


@pytest.mark.parametrize("digests", [NONE, BOTH])
@pytest.mark.parametrize("arrived", [0, 1000, 300_000])
def test_an_abandoned_read_touches_nothing(digests: Digests, arrived: int) -> None:
    """Whenever it is abandoned, its buffer stays as it is from then on, and the queue goes on working."""
    rig = Rig(digests=digests, chunk=1000)
    size = 600 << 10
    command = reading(size)
    cid = rig.submit(command)
    rig.peer.say(C2HData(cid, 0, size, last=False), data=b"n" * size)
    start = rig.link.ways[1].moved
    while rig.link.ways[1].moved - start < arrived:
        rig.link.step()
    assert command.data_in is not None
    kept = command.data_in
    rig.queue.abandon(command)
    kept[:] = b"\xaa" * size
    assert (rig.queue.oldest_abandoned(), rig.queue.abandoned) == (1.0, 1)
    rig.link.run()
    rig.say(CapsuleResp(Cqe(cid)))
    assert same(kept, b"\xaa" * size)
    assert rig.host.ended == []
    assert not command.done
    assert (rig.queue.in_flight, rig.queue.abandoned) == (0, 0)
    assert rig.queue.oldest_abandoned() is None
    after = reading()
    rig.say(C2HData(rig.submit(after), 0, 8192, success=True), data=b"x" * 8192)
    assert after.status == 0
    assert same(after.data_in, b"x" * 8192)


def test_an_abandoned_write_still_sends_what_it_was() -> None:
    """The caller's buffer may hold other things by then; they must not leave."""
    rig = Rig()
    buffer = bytearray(b"w" * 16384)
    command = commands.write(1, 0, 4, [memoryview(buffer)])
    cid = rig.submit(command)
    rig.peer.say(R2T(cid, 1, 0, 8192))
    for _ in range(1):
        rig.link._move(rig.link.ways[1], rig.peer, rig.host)
    rig.queue.abandon(command)
    rig.queue.abandon(command)
    buffer[:] = b"S" * 16384
    rig.link.run()
    rig.say(R2T(cid, 2, 8192, 8192))
    assert same(b"".join(rig.peer.data), b"w" * 16384)
    assert not command.answered_late
    rig.say(CapsuleResp(Cqe(cid)))
    assert rig.queue.in_flight == 0
    assert command.answered_late
    assert not command.done


def test_a_write_that_fails_early_sends_what_it_was() -> None:
    rig = Rig()
    buffer = bytearray(b"w" * 8192)
    command = commands.write(1, 0, 2, [memoryview(buffer)])
    cid = rig.submit(command)
    rig.peer.say(R2T(cid, 1, 0, 8192), CapsuleResp(Cqe(cid, Status.WRITE_FAULT)))
    rig.link._move(rig.link.ways[1], rig.peer, rig.host)
    rig.link._move(rig.link.ways[1], rig.peer, rig.host)
    assert command.status == Status.WRITE_FAULT
    buffer[:] = b"S" * 8192
    rig.link.run()
    assert same(b"".join(rig.peer.data), b"w" * 8192)


def test_failing_ends_everything_once() -> None:
    rig = Rig()
    kept, dropped = reading(), reading()
    rig.submit(kept)
    rig.submit(dropped)
    rig.queue.abandon(dropped)
    assert rig.queue.fail("gone") == [kept]
    assert rig.queue.fail("again") == []
    assert (kept.lost, kept.why_lost) == (True, "gone")
    assert not dropped.done
    assert rig.queue.in_flight == 0
    assert not rig.queue.ready


def test_cut_at_every_byte() -> None:
    """Wherever the stream ends, each command ends exactly once and the completed ones are whole."""
    script = Rig()
    cid = script.submit(reading())
    script.peer.say(C2HData(cid, 0, 8192, success=True), data=b"q" * 8192)
    total = 24 + 8192
    for cut in [*range(0, 40), 4096, total - 1, total]:
        rig = Rig()
        command = reading()
        cid = rig.submit(command)
        rig.link.ways[1].cut_after = rig.link.ways[1].moved + cut
        rig.peer.say(C2HData(cid, 0, 8192, success=True), data=b"q" * 8192)
        rig.link.run()
        rig.link.cut()
        assert command.done
        assert command.lost == (cut < total)
        assert rig.host.ended == [command]
        assert command.received == max(cut - 24, 0)


def test_stretch() -> None:
    parts = [b"abc", b"", memoryview(b"defg"), bytearray(b"h")]
    whole = b"abcdefgh"
    for offset in range(8):
        for length in range(1, 9 - offset):
            assert b"".join(stretch(parts, offset, length)) == whole[offset : offset + length]
