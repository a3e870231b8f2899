"""A guest's control session in the first process and gets of it in a reader: both over one pool in memory."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator

import pytest

from agent.fs.control import guest_reads
from agent.fs.control.face import SESSION_INO, ControlFace
from agent.fs.control.guest_reads import GuestReads
from agent.fs.control.start_prestage import prestage_nothing
from agent.fs.guest_sessions import OUTCOMES, Bound, GuestWords, shared_words
from agent.fs.interface import Caller, FsError
from agent.fs.virtiofs.guest_view import EPOCH_SHIFT
from agent.fs.virtiofs.processes.messages import decode_bound, encode_bound
from agent.pool.access import ServedVolume
from agent.pool.counters import MissCause
from agent.pool.steps import settle
from host_shim.control_wire import (
    FLAG_NO_ANSWER,
    Operation,
    Outcome,
    Request,
    data_offset,
    decode_answer_untrusted,
    value_xattr,
)
from tests.support.pool.memory_pool import MemoryPool, key_of

CALLER = Caller(0, 0)
EPOCH = 3
VALUE_BYTES = 16384


class Both:
    """A session that is open in the first process, and the reader's view of it."""

    def __init__(self, descriptor: int) -> None:
        self.pool = MemoryPool((4, 4), value_bytes=VALUE_BYTES)
        self.agent, self.reader = self.pool.agent(), self.pool.agent()
        self.words = GuestWords(descriptor)
        self.asked = 0
        self.may_read = True
        channel, others = self.agent.channel, self.reader.channel
        self.face = ControlFace(
            [self.agent.served], lambda: channel, dict, prestage_nothing, words=GuestWords(descriptor)
        )
        theirs = ControlFace(
            [self.reader.served], lambda: others, dict, prestage_nothing, may_read=self.is_readable
        )
        self.reads = GuestReads(
            theirs, [self.reader.served], lambda: others, self.is_readable, self.words, self.look
        )
        self.own_handle = settle(self.face.open(CALLER, SESSION_INO, os.O_RDWR), channel).handle
        self.handle = self.own_handle | EPOCH << EPOCH_SHIFT

    def is_readable(self, volume: ServedVolume) -> bool:
        return self.may_read

    def look(self, handle: int) -> Bound:
        self.asked += 1
        assert handle == self.handle
        version = self.words.version_of(handle)
        return decode_bound(encode_bound(Bound(version, self.face.bindings(self.own_handle))))

    def tell(
        self, operation: Operation, *numbers: int, first: int = 0, lengths: tuple[int, ...] = ()
    ) -> None:
        keys = tuple(map(key_of, numbers))
        if operation is Operation.OUTCOME:
            keys = (b"",) * len(numbers)
        flags = FLAG_NO_ANSWER if operation in (Operation.GET, Operation.PUT) else 0
        request = Request(operation, 1, "v", keys, first, flags=flags, lengths=lengths).encode()
        settle(self.face.write(SESSION_INO, self.own_handle, 0, memoryview(request)), self.agent.channel)

    def answer(self) -> bytes:
        room = memoryview(bytearray(1 << 16))
        got = settle(self.face.read(SESSION_INO, self.own_handle, 0, room), self.agent.channel)
        return decode_answer_untrusted(room[:got]).body

    def get(self, ticket: int, size: int = VALUE_BYTES, within: int = 0) -> bytes:
        """By the reader. Raises FsError."""
        room = memoryview(bytearray(size))
        offset = data_offset(ticket) + within
        got = settle(self.reads.read(SESSION_INO, self.handle, offset, room), self.reader.channel)
        return bytes(room[:got])

    def get_by_first(self, ticket: int, size: int = VALUE_BYTES, within: int = 0) -> bytes:
        room = memoryview(bytearray(size))
        offset = data_offset(ticket) + within
        got = settle(self.face.read(SESSION_INO, self.own_handle, offset, room), self.agent.channel)
        return bytes(room[:got])

    def get_by_name(self, number: int, size: int = VALUE_BYTES) -> bytes:
        room = memoryview(bytearray(size))
        name = value_xattr("v", key_of(number))
        return bytes(settle(self.reads.getxattr(CALLER, SESSION_INO, name, room), self.reader.channel))


@pytest.fixture
def both() -> Iterator[Both]:
    descriptor = shared_words()
    try:
        made = Both(descriptor)
    finally:
        os.close(descriptor)
    yield made
    made.face.release(SESSION_INO, made.own_handle)


def value(number: int, size: int = VALUE_BYTES) -> bytes:
    return random.Random(number).randbytes(size)


def refused(both: Both, *arguments: int) -> int:
    with pytest.raises(FsError) as refusal:
        both.get(*arguments)
    return refusal.value.errno


def test_a_reader_has_what_is_bound(both: Both) -> None:
    for number in range(4):
        both.agent.put(key_of(number), value(number, 1000 * number + 1))
    both.tell(Operation.GET, 0, 1, 2, 3)
    assert [both.get(ticket) for ticket in range(4)] == [value(n, 1000 * n + 1) for n in range(4)]
    assert both.asked == 1, "bindings are remembered"
    both.tell(Operation.OUTCOME, 0, 1, 2, 3, 4)
    assert list(both.answer()) == [Outcome.HIT] * 4 + [Outcome.UNKNOWN]
    assert both.reader.tally.gets_hit == 4
    assert both.agent.tally.gets_hit == 0


def test_a_ticket_that_is_bound_anew_is_another_key(both: Both) -> None:
    for number in (1, 2):
        both.agent.put(key_of(number), value(number))
    for turn in range(6):
        both.tell(Operation.GET, 1 + turn % 2)
        assert both.get(0) == value(1 + turn % 2)
    assert both.asked == 6


def test_what_is_bound_is_learned_with_the_answer(both: Both) -> None:
    both.agent.put(key_of(1), value(1))
    both.tell(Operation.GET, 1)
    bound = both.look(both.handle)
    both.reads.learn(both.handle, bound)
    assert both.get(0) == value(1)
    assert both.asked == 1, "by the test"
    both.tell(Operation.GET, 2)
    both.reads.learn(both.handle, bound)
    assert both.get(0) == b"", "an old answer is not believed"
    assert both.asked == 2


def test_a_miss_has_its_cause_in_the_first_process(both: Both) -> None:
    both.tell(Operation.GET, 1, 2)
    both.agent.put(key_of(2), value(2))
    assert both.get(0) == b""
    both.tell(Operation.OUTCOME, 1, 2)
    assert list(both.answer()) == [Outcome.NEVER_STORED, Outcome.UNKNOWN]
    assert both.reader.tally.misses[MissCause.NEVER_STORED] == 1


def test_what_is_no_whole_value_is_the_first_process(both: Both) -> None:
    both.agent.put(key_of(1), value(1))
    both.agent.put(key_of(2), value(2, 100))
    both.tell(Operation.GET, 1, 2)
    assert refused(both, 0, 4096, 4096) == errno.EREMOTE, "behind the beginning"
    assert refused(both, 0, 4096) == errno.EREMOTE, "shorter than the value"
    assert both.reader.tally.gets_hit == both.reader.tally.bytes_read == 0, "counted by who serves it"
    assert both.get(1, 100) == value(2, 100)
    assert both.get(0) == value(1)
    assert refused(both, 2) == errno.EREMOTE, "bound to nothing"
    assert both.get_by_first(0, 4096, 4096) == value(1)[4096:8192]
    both.may_read = False
    assert refused(both, 0) == errno.EREMOTE


def test_a_request_that_is_too_small_is_tried_again_after_a_while(both: Both) -> None:
    both.agent.put(key_of(1), value(1, 5000))
    both.agent.put(key_of(2), value(2, 100))
    both.tell(Operation.GET, 1, 2)
    assert refused(both, 0, 4096) == errno.EREMOTE
    for _ in range(guest_reads.MISFITS):
        assert refused(both, 1, 4096) == errno.EREMOTE
        assert both.get(1, 4097) == value(2, 100), "of another length"
    assert both.get(1, 4096) == value(2, 100)


def test_a_whole_value_has_no_rest_of_another(both: Both) -> None:
    both.agent.put(key_of(1), value(1, 4096))
    both.tell(Operation.GET, 1)
    assert both.get(0, 4096) == value(1, 4096)
    both.agent.delete(key_of(1))
    both.agent.put(key_of(1), value(2))
    assert both.get_by_first(0, 4096, 4096) == b"", "what was served has ended"
    assert both.get(0, 4096, 4096) == b""
    assert refused(both, 0, 4096, 4095) == errno.EREMOTE
    assert both.get_by_first(0, 100, 4000) == value(2)[4000:4100], "read anew"
    both.tell(Operation.GET, 1)
    assert both.get_by_first(0, 4096, 4096) == value(2)[4096:8192]


def test_a_whole_value_has_no_rest_of_another_where_its_length_is_forgotten(both: Both) -> None:
    """A client that slept between its two reads, while others had thousands of gets."""
    both.agent.put(key_of(1), value(1, 4096))
    both.agent.put(key_of(2), value(2, 10))
    both.tell(Operation.GET, 1)
    assert both.get(0, 4096) == value(1, 4096)
    both.agent.delete(key_of(1))
    both.agent.put(key_of(1), value(3))
    for _ in range(OUTCOMES // 64):
        both.tell(Operation.GET, *[2] * 64, first=1)
        for ticket in range(64):
            assert both.get(1 + ticket) == value(2, 10)
    assert both.get_by_first(0, 4096, 4096) == b""
    both.tell(Operation.OUTCOME, 0)
    assert list(both.answer()) == [Outcome.UNKNOWN]


@pytest.mark.interpreted
def test_what_is_remembered_has_a_bound(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_reads, "BINDINGS_MAX", 10)
    both.agent.put(key_of(0), value(0))
    for _ in range(20):
        both.tell(Operation.GET, *range(6))
        assert both.get(0) == value(0)
        assert both.reads._remembered <= 16
        assert len(both.reads._sessions) == 1


def test_what_the_first_process_has_begun_is_left_to_it(both: Both) -> None:
    both.agent.put(key_of(1), value(1))
    both.tell(Operation.GET, 1, 1)
    assert both.get_by_first(0, 4096) == value(1)[:4096]
    assert refused(both, 0) == errno.EREMOTE
    assert both.get(1) == value(1)


def test_tickets_to_be_written_are_not_read(both: Both) -> None:
    both.agent.put(key_of(1), value(1))
    both.tell(Operation.GET, 1)
    assert both.get(0) == value(1)
    both.tell(Operation.PUT, 1, lengths=(VALUE_BYTES,))
    assert refused(both, 0) == errno.EREMOTE


def test_a_session_that_is_closed_reads_nothing(both: Both) -> None:
    both.agent.put(key_of(1), value(1))
    both.tell(Operation.GET, 1)
    assert both.get(0) == value(1)
    both.face.release(SESSION_INO, both.own_handle)
    assert refused(both, 0) == errno.EREMOTE
    both.own_handle = settle(both.face.open(CALLER, SESSION_INO, os.O_RDWR), both.agent.channel).handle


def test_a_prestaged_key_is_got_from_the_first_process_once(both: Both) -> None:
    both.agent.put(key_of(1), value(1, 500))
    both.tell(Operation.PRESTAGE, 1)
    assert list(both.answer()) == [Outcome.REFUSED]
    both.tell(Operation.GET, 1)
    assert refused(both, 0) == errno.EREMOTE
    assert both.get(0) == value(1, 500)
    both.tell(Operation.PRESTAGE, 1)
    both.answer()
    with pytest.raises(FsError):
        both.get_by_name(1)
    assert both.get_by_name(1) == value(1, 500)


def test_a_value_by_its_name(both: Both) -> None:
    both.agent.put(key_of(1), value(1, 5000))
    assert both.get_by_name(1) == value(1, 5000)
    for number, size, code in ((1, 4999, errno.ERANGE), (2, 5000, errno.ENODATA)):
        with pytest.raises(FsError) as refusal:
            both.get_by_name(number, size)
        assert refusal.value.errno == code
    for name in (b"user.other", b"security.selinux"):
        with pytest.raises(FsError) as refusal:
            both.reads.getxattr(CALLER, SESSION_INO, name, memoryview(bytearray(10)))
        assert refusal.value.errno == errno.EREMOTE
