"""The threads that lend slots, before processes that borrow, end, hang, and talk nonsense."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from agent.pool.errors import PutElsewhere
from agent.pool.volume.directory_cache import COOLDOWN_SECONDS
from agent.pool.write.borrowed_slots import write_borrowed
from agent.pool.write.slot_messages import Ask, End, Value, decode_places, encode_ask
from agent.remote.fabric import Fabric
from agent.service import slot_lender
from agent.service.slot_lender import Borrower, SlotLender, link_pairs
from agent.service.slot_links import BorrowedLinks
from tests.support.halting import halt
from tests.support.pool.lending import Lending, content, nothing_is_held
from tests.support.pool.memory_pool import VOLUME_ID, key_of
from tests.support.waiting import wait_until

LINKS = 2
SOON = 30.0
"""Seconds, of a busy machine."""
CHILD = """
import socket, sys, time
from agent.pool.write.slot_messages import *
fd, step, volume = int(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3])
link = socket.socket(fileno=fd)
ask = Ask(volume, 1.0, 0, [Value(bytes([n]) * 16, 4096) for n in range(1, 4)])
if step != "idle":
    link.sendall(encode_ask(ask))
if step in ("told", "partly", "lent"):
    places = decode_places(link.recv(MESSAGE_BYTES_MAX), 3)
    assert all(isinstance(each, LentSlot) for each in places), places
if step == "told":
    link.sendall(encode_written([(n, Fate.NOT_SENT) for n in range(3)]))
if step == "partly":
    link.sendall(encode_written([(0, Fate.NOT_SENT)]))
    decode_ended(link.recv(MESSAGE_BYTES_MAX), 1)
print("there", flush=True)
time.sleep(600)
"""


class Stand:
    """A lender before memory, whose readers are whatever a test makes them."""

    def __init__(self, *, on_one_processor: bool = False) -> None:
        self.memory = Lending((1, 1))
        channel = cast(Any, self.memory.first.channel)
        served = [self.memory.first.served]
        self.lender = SlotLender(
            served, lambda _: channel, range(LINKS), LINKS, self.memory, on_one_processor=on_one_processor
        )
        self.borrower = Borrower()
        ours, self.theirs = link_pairs(LINKS)
        self.lender.start()
        self.lender.begin(1, ours, self.borrower)
        self.child: subprocess.Popen[bytes] | None = None

    def spawn(self, step: str) -> subprocess.Popen[bytes]:
        descriptor = self.theirs[0].fileno()
        command = [sys.executable, "-P", "-c", CHILD, str(descriptor), step, VOLUME_ID.hex()]
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[descriptor])
        self.close()
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == b"there\n"
        return self.child

    def close(self) -> None:
        for each in self.theirs:
            each.close()

    def end(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            assert self.child.stdout is not None
            self.child.stdout.close()
        self.borrower.has_ended()
        self.close()
        self.lender.stop()

    def reserved(self) -> int:
        return sum(len(each.reserved) for each in self.memory.first.cache.snapshot())

    def cooling(self) -> int:
        now = self.memory.first.channel.now()
        return sum(
            until > now + COOLDOWN_SECONDS / 2
            for each in self.memory.first.cache.snapshot()
            for until in each.cooldown_until.values()
        )


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = Stand()
    yield made
    made.end()


def links_of(stand: Stand) -> BorrowedLinks:
    nguids = tuple(each.nguid for each in stand.memory.pool.settings.extents)
    return BorrowedLinks(stand.theirs, Fabric((), nguids), SOON)


def test_values_over_real_sockets(stand: Stand) -> None:
    links, reader = links_of(stand), stand.memory.reader
    for turn in range(5):
        numbers = range(turn * 20, turn * 20 + 20)
        keys, values = [key_of(n) for n in numbers], [memoryview(content(n)) for n in numbers]
        steps = write_borrowed(reader.volume, reader.channel, links, keys, values, SOON)
        assert reader.channel.run(steps) == [True] * 20
    wait_until(lambda: not stand.reserved(), SOON, "the last call to end")
    for number in range(100):
        assert stand.memory.pool.agent().get(key_of(number)) == content(number)


def processors_of_lenders() -> set[frozenset[int]]:
    """Where each thread that lends may run."""
    numbers = [each.native_id for each in threading.enumerate() if each.name.startswith("slots-")]
    return {frozenset(os.sched_getaffinity(number)) for number in numbers if number is not None}


def test_threads_that_lend_may_share_one_processor() -> None:
    before = os.sched_getaffinity(0)
    stand = Stand(on_one_processor=True)
    try:
        wait_until(lambda: [len(each) for each in processors_of_lenders()] == [1], SOON, "one processor")
        assert os.sched_getaffinity(0) == before
    finally:
        stand.end()


def test_where_linux_refuses_that_slots_are_lent_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    stand = Stand(on_one_processor=True)
    try:
        steps = write_borrowed(
            stand.memory.reader.volume,
            stand.memory.reader.channel,
            links_of(stand),
            [key_of(1)],
            [memoryview(content(1))],
            SOON,
        )
        assert stand.memory.reader.channel.run(steps) == [True]
        assert processors_of_lenders() == {frozenset(os.sched_getaffinity(0))}
    finally:
        stand.end()


def test_all_links_in_use(stand: Stand) -> None:
    links = links_of(stand)
    with links.take(1), links.take(1), pytest.raises(PutElsewhere), links.take(1):
        raise AssertionError("there are two")
    with links.take(1), links.take(1):
        pass


def test_where_processors_are_few_there_are_links_for_batches_alone(stand: Stand) -> None:
    nguids = tuple(each.nguid for each in stand.memory.pool.settings.extents)
    links = BorrowedLinks(stand.theirs, Fabric((), nguids), SOON, lends_single=False)
    with pytest.raises(PutElsewhere), links.take(1):
        raise AssertionError("for one value")
    with links.take(2), links.take(2):
        pass


def test_half_of_the_workers_have_calls_that_are_patient(stand: Stand) -> None:
    links = links_of(stand)
    for _ in range(2):
        with links.take(1) as first, links.take(1) as second:
            assert first.is_patient
            assert not second.is_patient, "one of two"
        with links.take(1) as again:
            assert again.is_patient


class Told:
    """The duty of a worker whose door has others that rest."""

    def __init__(self) -> None:
        self.stuck = threading.Event()

    def may_hold_up(self) -> bool:
        return True

    def is_stuck(self) -> None:
        self.stuck.set()


def test_a_worker_that_waits_for_slots_lets_another_read() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told = Told()
    links = BorrowedLinks([near], Fabric((), ()), SOON, duty=lambda: cast(Any, told))

    def answer() -> None:
        if told.stuck.wait(SOON):
            far.send(b"lent")

    answering = threading.Thread(target=answer)
    answering.start()
    with near, far:
        with links.take(1) as link:
            assert link.exchange(b"ask") == b"lent"
            told.stuck.clear()
            with pytest.raises(PutElsewhere), links.take(1):
                raise AssertionError("there is one")
            assert told.stuck.is_set(), "it waited for a link"
        answering.join()


STEPS = [("idle", 0), ("asked", 3), ("lent", 3), ("partly", 2), ("told", 0)]


@pytest.mark.parametrize(("step", "lent"), STEPS)
def test_a_process_that_is_killed(stand: Stand, step: str, lent: int) -> None:
    """Its slots are nobody's until its end was waited for, and then cool down."""
    child = stand.spawn(step)
    wait_until(lambda: stand.reserved() == lent, SOON, "slots to be lent")
    child.send_signal(signal.SIGKILL)
    if lent:
        wait_until(stand.borrower.is_to_end.is_set, SOON, "the lender to hear of its end")
        assert stand.reserved() == lent
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    stand.borrower.has_ended()
    wait_until(lambda: not stand.reserved(), SOON, "its slots to be let go of")
    assert stand.cooling() == lent
    wait_until(lambda: not len(stand.memory.first.volume.key_locks), SOON, "its keys to be let go of")
    nothing_is_held(stand.memory.first)


@pytest.mark.expects_log("does not tell what became of slots")
def test_a_process_that_hangs_is_ended(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_lender, "TELL_SECONDS", -0.5)
    child = stand.spawn("lent")
    halt(child.pid)
    wait_until(stand.borrower.is_to_end.is_set, SOON, "the lender to lose patience")
    assert stand.reserved() == 3, "it may go on and write"
    child.kill()
    child.wait()
    stand.borrower.has_ended()
    wait_until(lambda: not stand.reserved(), SOON)
    assert stand.cooling() == 3


@pytest.mark.expects_log("asks for slots by no message")
@pytest.mark.parametrize(
    "nonsense",
    [
        b"\0",
        b"x" * 5000,
        encode_ask(Ask(VOLUME_ID, 1.0, 0, [])),
    ],
)
def test_nonsense_ends_a_process(stand: Stand, nonsense: bytes) -> None:
    stand.theirs[0].sendall(nonsense)
    wait_until(stand.borrower.is_to_end.is_set, SOON)
    stand.borrower.has_ended()


@pytest.mark.expects_log("a slot that is not lent")
def test_a_slot_that_is_not_lent_is_not_told_of(stand: Stand) -> None:
    link = stand.theirs[0]
    link.sendall(encode_ask(Ask(VOLUME_ID, 1.0, 0, [Value(key_of(1), 5)])))
    link.recv(4096)
    link.sendall(bytes([3, 1, 9, 0]))
    wait_until(stand.borrower.is_to_end.is_set, SOON)
    assert stand.reserved() == 1
    stand.borrower.has_ended()
    wait_until(lambda: not stand.reserved(), SOON)
    assert stand.cooling() == 1


def test_a_volume_that_lends_nothing(stand: Stand) -> None:
    link = stand.theirs[0]
    link.settimeout(5)
    ask = [Value(key_of(1), 5), Value(key_of(2), 5)]
    link.sendall(encode_ask(Ask(bytes(16), 1.0, 0, ask)))
    assert decode_places(link.recv(4096), 2) == [(End.ELSEWHERE, None)] * 2
    stand.memory.first.volume.change(erased=True)
    link.sendall(encode_ask(Ask(VOLUME_ID, 1.0, 0, ask)))
    assert decode_places(link.recv(4096), 2) == [(End.ELSEWHERE, None)] * 2


def test_a_value_longer_than_the_volumes(stand: Stand) -> None:
    link = stand.theirs[0]
    link.settimeout(5)
    link.sendall(encode_ask(Ask(VOLUME_ID, 1.0, 0, [Value(key_of(1), 1 << 30)])))
    assert decode_places(link.recv(4096), 1) == [(End.BAD, None)]


def test_the_next_process_of_a_reader_is_lent_to(stand: Stand) -> None:
    stand.spawn("lent")
    child = stand.child
    assert child is not None
    child.kill()
    child.wait()
    stand.borrower.has_ended()
    ours, theirs = link_pairs(LINKS)
    stand.lender.begin(1, ours, Borrower())
    theirs[0].settimeout(5)
    theirs[0].sendall(encode_ask(Ask(VOLUME_ID, 1.0, 0, [Value(key_of(1), 1 << 30)])))
    assert theirs[0].recv(4096)
    for each in theirs:
        each.close()


def test_links_keep_messages_apart() -> None:
    ours, theirs = link_pairs(LINKS)
    assert len(ours) == len(theirs) == LINKS
    for each in (*ours, *theirs):
        assert each.type is socket.SOCK_SEQPACKET
        each.close()
