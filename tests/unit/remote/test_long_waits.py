"""How many workers of a door wait long in puts, and what becomes of a put that gives way."""

from __future__ import annotations

import threading

import pytest

from agent.pool.counters import MissCause
from agent.pool.late_answers import wait_for
from agent.pool.steps import Acquire, GaveWay, Pending, Steps
from agent.pool.volume.side_by_side import Part, Parts
from agent.remote.channel import WorkerChannel
from agent.remote.circuit_breaker import (
    HANGS_SECONDS,
    LATE_BEFORE_PAUSE,
    NOT_ANSWERING,
    PATIENT_LATE_BEFORE_PAUSE,
    PAUSE_FIRST,
    Health,
)
from agent.remote.long_waits import PATIENCE_LEAST, LongWaits
from nvmeof.host.command import Command
from tests.support.sim.two_paths import BLOCK, PathQueue, TwoPaths

WRITE_DEADLINE = 5.0
DATA = [bytes(BLOCK)]


class Rig(TwoPaths):
    """One path, one of two workers, and the place that the other one may have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        super().__init__(monkeypatch, seed, count=1)
        self.waits = LongWaits(2, 0.05)
        self.channel.share_waits(self.waits)
        self._block = 0

    @property
    def health(self) -> Health:
        return self.fabric.health[0]

    def put(self, *, gives_way: bool = True) -> tuple[MissCause | None, float, Pending]:
        """What becomes of a write, the time that it took, and the write. Each has a place of its own: where
        one was given up, the next is not sent."""
        began, sent = self.clock.now, list[Pending]()
        self._block += 1

        def steps(channel: WorkerChannel) -> Steps[MissCause | None]:
            if gives_way:
                channel.gives_way()
            sent.append(channel.write(0, self._block * BLOCK, DATA))
            return (yield from wait_for(channel, sent[0], began + WRITE_DEADLINE))

        cause = self.channel.run(steps(self.channel))
        return cause, self.clock.now - began, sent[0]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, seed: int) -> Rig:
    return Rig(monkeypatch, seed)


@pytest.mark.parametrize(("workers", "of_one", "of_all"), [(1, 1, 1), (2, 1, 1), (3, 1, 2), (16, 8, 15)])
def test_a_door_keeps_a_worker_free(workers: int, of_one: int, of_all: int) -> None:
    waits, first, second = LongWaits(workers, 0.05), Health(), Health()
    taken = [waits.take(first) for _ in range(workers)]
    assert sum(taken) == of_one
    assert sum(waits.take(second) for _ in range(workers)) == min(of_one, of_all - of_one)
    left = sum(waits.take(None) for _ in range(workers))
    assert of_one + min(of_one, of_all - of_one) + left == of_all
    for _ in range(of_one):
        waits.give_back(first)
    assert waits.take(first), "what is given back is there again"


def test_steps_that_never_wait_long_have_no_place(rig: Rig) -> None:
    rig.channel.share_waits(LongWaits(0, 0.05))
    rig.paths[0].answers = False
    for _ in range(LATE_BEFORE_PAUSE):
        cause, took, _ = rig.put()
        assert (cause, took) == (MissCause.LATE, pytest.approx(PATIENCE_LEAST))
    cause, took, _ = rig.put()
    assert (cause, took) == (MissCause.ENCLOSURE_DOWN, 0.0), "the circuit breaker"


def test_what_a_get_found_late_keeps_no_put_without_a_place_from_its_namespace(rig: Rig) -> None:
    rig.channel.share_waits(LongWaits(0, 0.05))
    rig.health.late(rig.clock.now)
    assert rig.put()[0] is None


def test_patience_is_the_read_deadline_or_a_quarter_of_a_second() -> None:
    assert LongWaits(2, 0.05).patience == PATIENCE_LEAST
    assert LongWaits(2, 2.0).patience == 2.0


def test_a_read_of_a_put_is_not_sent_there_either(rig: Rig) -> None:
    """A put reads directories before it writes."""
    rig.paths[0].answers = False
    assert rig.waits.take(rig.health)
    rig.put()
    sent = rig.paths[0].queues[0].sent

    def steps(channel: WorkerChannel) -> Steps[MissCause | None]:
        channel.gives_way()
        pending = channel.read(0, 0, memoryview(bytearray(BLOCK)))
        return (yield from wait_for(channel, pending, rig.clock.now + WRITE_DEADLINE))

    began = rig.clock.now
    assert rig.channel.run(steps(rig.channel)) is MissCause.ENCLOSURE_DOWN
    assert (rig.clock.now, rig.paths[0].queues[0].sent) == (began, sent)


def test_one_put_waits_to_its_deadline(rig: Rig) -> None:
    rig.paths[0].answers = False
    cause, took, _ = rig.put()
    assert cause is MissCause.LATE
    assert took == pytest.approx(WRITE_DEADLINE)
    assert rig.waits.take(rig.health), "its place is free again"


def test_a_put_beside_others_that_wait_gives_way_and_is_late(rig: Rig) -> None:
    rig.paths[0].answers = False
    assert rig.waits.take(rig.health)  # another worker waits there
    cause, took, _ = rig.put()
    assert cause is MissCause.LATE
    assert took == pytest.approx(PATIENCE_LEAST)
    assert rig.health.late_answers == 1


def test_a_put_to_a_namespace_that_keeps_others_waiting_is_not_sent(rig: Rig) -> None:
    rig.paths[0].answers = False
    assert rig.waits.take(rig.health)
    rig.put()
    sent = rig.paths[0].queues[0].sent
    cause, took, write = rig.put()
    assert cause is MissCause.ENCLOSURE_DOWN
    assert (took, write.fault) == (0.0, NOT_ANSWERING)
    assert rig.paths[0].queues[0].sent == sent

    def asks(channel: WorkerChannel) -> Steps[bool]:
        channel.gives_way()
        return channel.trusts(0)
        yield  # type: ignore[unreachable]

    assert not rig.channel.run(asks(rig.channel)), "a put with a choice goes elsewhere"
    rig.waits.give_back(rig.health)
    cause, took, _ = rig.put()
    assert (cause, took) == (MissCause.LATE, pytest.approx(WRITE_DEADLINE)), "there is a place again"


def test_a_put_that_gave_way_at_one_namespace_has_patience_with_the_next(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that hangs took all its patience, and the next, which is well, takes a moment to answer."""
    rig.paths[0].answers = False
    assert rig.waits.take(rig.health)  # the only place

    def later(queue: PathQueue, command: Command, deadline: float, at_least: int | None = None) -> bool:
        if queue.path.answers and not command.done and rig.clock.now + 0.0005 > deadline:
            rig.clock.now = max(rig.clock.now, deadline)
            return False
        return waits(queue, command, deadline, at_least)

    waits = PathQueue.wait
    monkeypatch.setattr(PathQueue, "wait", later)

    def steps(channel: WorkerChannel) -> Steps[list[MissCause | None]]:
        channel.gives_way()
        causes = []
        for again in (0, 1):
            rig.paths[0].answers = bool(again)
            rig.fabric.health = (Health(),)  # of a namespace that was not heard of before
            pending = channel.write(0, again * BLOCK, DATA)
            causes.append((yield from wait_for(channel, pending, rig.clock.now + WRITE_DEADLINE)))
        return causes

    assert rig.channel.run(steps(rig.channel)) == [MissCause.LATE, None]
    assert rig.health.late_answers == 0


def test_a_namespace_that_answers_others_needs_no_place(rig: Rig) -> None:
    """It is slow, and hangs not. Patience begins anew with each of its answers."""
    rig.paths[0].answers = False
    assert rig.waits.take(rig.health)
    rig.health.answered_at = rig.clock.now + 2.0
    cause, took, _ = rig.put()
    assert cause is MissCause.LATE
    assert took == pytest.approx(2.0 + PATIENCE_LEAST)


def test_who_does_not_give_way_waits_to_the_deadline(rig: Rig) -> None:
    """A file is no cache."""
    rig.paths[0].answers = False
    assert rig.waits.take(rig.health)
    assert rig.put()[0] is MissCause.LATE
    rig.health.breaker.late_in_a_row = 0
    cause, took, _ = rig.put(gives_way=False)
    assert cause is MissCause.LATE
    assert took == pytest.approx(WRITE_DEADLINE)


def test_who_has_patience_reads_what_gets_do_not_wait_for(rig: Rig) -> None:
    def steps(channel: WorkerChannel, *, has_patience: bool) -> Steps[MissCause | None]:
        if has_patience:
            channel.has_patience()
        pending = channel.read(0, 0, memoryview(bytearray(BLOCK)))
        return (yield from wait_for(channel, pending, rig.clock.now + WRITE_DEADLINE))

    def read(*, has_patience: bool) -> tuple[MissCause | None, float]:
        began = rig.clock.now
        cause = rig.channel.run(steps(rig.channel, has_patience=has_patience))
        return cause, rig.clock.now - began

    rig.paths[0].answers = False
    rig.health.patience = 0.003
    for _ in range(LATE_BEFORE_PAUSE):
        assert read(has_patience=False) == (MissCause.LATE, pytest.approx(0.003))
    assert read(has_patience=False) == (MissCause.ENCLOSURE_DOWN, 0.0)
    assert read(has_patience=True) == (MissCause.LATE, pytest.approx(WRITE_DEADLINE))
    rig.health.breaker.late_in_a_row, rig.health.breaker.paused_until = LATE_BEFORE_PAUSE, rig.clock.now + 1
    assert read(has_patience=False) == (MissCause.ENCLOSURE_DOWN, 0.0), "patience ended with those steps"
    rig.paths[0].answers = True
    assert read(has_patience=True)[0] is None
    assert read(has_patience=False)[0] is None, "an answer ends the pause of all"


def test_who_has_patience_is_refused_where_two_have_waited_in_vain(rig: Rig) -> None:
    """With one worker waiting for each, and fewer late answers than gets need to be refused."""

    def steps(channel: WorkerChannel) -> Steps[MissCause | None]:
        channel.has_patience()
        pending = channel.read(0, 0, memoryview(bytearray(BLOCK)))
        return (yield from wait_for(channel, pending, rig.clock.now + WRITE_DEADLINE))

    rig.paths[0].answers = False
    for _ in range(PATIENT_LATE_BEFORE_PAUSE):
        assert rig.channel.run(steps(rig.channel)) is MissCause.LATE
    began = rig.clock.now
    assert rig.channel.run(steps(rig.channel)) is MissCause.ENCLOSURE_DOWN
    assert rig.clock.now == began
    rig.paths[0].answers = True
    rig.clock.now += PAUSE_FIRST
    assert rig.channel.run(steps(rig.channel)) is None, "the probe"


def change(rig: Rig) -> tuple[MissCause | None, float]:
    """What becomes of a read without which a file is not changed, and the time that it took."""

    def steps(channel: WorkerChannel) -> Steps[MissCause | None]:
        channel.waits_for_slow()
        pending = channel.read(0, 0, memoryview(bytearray(BLOCK)))
        return (yield from wait_for(channel, pending, rig.clock.now + WRITE_DEADLINE))

    began = rig.clock.now
    return rig.channel.run(steps(rig.channel)), rig.clock.now - began


def test_a_change_of_a_file_waits_for_what_gets_found_late(rig: Rig) -> None:
    rig.health.patience = 0.0
    for _ in range(LATE_BEFORE_PAUSE):
        rig.health.late(rig.clock.now)
    assert rig.health.refuses(rig.clock.now)
    assert change(rig)[0] is None
    assert not rig.health.refuses(rig.clock.now)


def test_a_change_of_a_file_waits_for_a_drive_that_answers_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.health.patience, rig.paths[0].answers, answered = 0.003, False, list[float]()
    waits = PathQueue.wait

    def wait(queue: PathQueue, command: Command, deadline: float, at_least: int | None = None) -> bool:
        if len(answered) < 3:
            answered.append(rig.clock.now + HANGS_SECONDS / 2)
            rig.health.answered_at = answered[-1]
        return waits(queue, command, deadline, at_least)

    monkeypatch.setattr(PathQueue, "wait", wait)
    cause, took = change(rig)
    assert cause is MissCause.LATE
    assert took > HANGS_SECONDS
    assert took < WRITE_DEADLINE


def test_a_drive_that_hangs_holds_up_two_changes_of_files(rig: Rig) -> None:
    rig.health.patience, rig.paths[0].answers = 0.003, False
    for _ in range(PATIENT_LATE_BEFORE_PAUSE):
        assert change(rig) == (MissCause.LATE, pytest.approx(HANGS_SECONDS))
    for _ in range(LATE_BEFORE_PAUSE - PATIENT_LATE_BEFORE_PAUSE):
        assert change(rig) == (MissCause.LATE, pytest.approx(0.003))
    assert change(rig) == (MissCause.ENCLOSURE_DOWN, 0.0)


def test_no_reader_of_a_file_is_refused_because_changes_waited_in_vain(rig: Rig) -> None:
    """They waited for a second each: a drive that pauses for that long may answer the reader yet."""
    rig.paths[0].answers = False
    for _ in range(PATIENT_LATE_BEFORE_PAUSE):
        assert change(rig) == (MissCause.LATE, pytest.approx(HANGS_SECONDS))
    rig.paths[0].answers = True
    rig.channel.run(read_of_a_file(rig))
    rig.paths[0].answers = False
    assert change(rig) == (MissCause.LATE, pytest.approx(HANGS_SECONDS)), "an answer ended that"


def test_an_answer_gives_the_place_back(rig: Rig) -> None:
    rig.health.breaker.late_in_a_row = 1  # so that a place is wanted from the beginning
    cause, _, _ = rig.put()
    assert cause is None
    assert rig.waits.take(rig.health)


def test_a_lock_whose_holder_waits_is_given_up_too(rig: Rig) -> None:
    lock, closed = threading.Lock(), threading.Lock()
    lock.acquire()
    closed.acquire()
    assert rig.waits.take(rig.health)

    def steps(channel: WorkerChannel, wanted: Acquire) -> Steps[bool]:
        channel.gives_way()
        rig.clock.now += 2 * PATIENCE_LEAST  # the lock's own wait is by the machine's clock
        return (yield wanted)

    later = rig.clock.now + WRITE_DEADLINE
    assert not rig.channel.run(steps(rig.channel, Acquire(lock, later, gives_way=True)))
    lock.release()
    later = rig.clock.now + WRITE_DEADLINE
    assert rig.channel.run(steps(rig.channel, Acquire(lock, later, gives_way=True)))
    # One that nobody gives away is time to wait.
    soon = rig.clock.now + 2 * PATIENCE_LEAST
    assert not rig.channel.run(steps(rig.channel, Acquire(closed, soon)))


def test_a_call_of_many_values_gives_way_with_all_that_wait(rig: Rig) -> None:
    rig.paths[0].answers = False
    assert rig.waits.take(rig.health)
    channel, began = rig.channel, rig.clock.now
    causes: list[object] = []

    def part(number: int) -> Part:
        pending = channel.write(0, number * BLOCK, DATA)
        causes.append((yield from wait_for(channel, pending, began + WRITE_DEADLINE)))

    def whole() -> Steps[None]:
        channel.gives_way()
        parts = Parts(channel)
        for number in range(4):
            parts.start(0, part(number))
        while len(parts):
            yield from parts.go_on(may_grow=False)

    channel.run(whole())
    assert causes == [MissCause.LATE] * 4
    assert rig.clock.now - began == pytest.approx(PATIENCE_LEAST, abs=0.06)


class FileIsNotRead(Exception):
    """What becomes of a read whose block is late: in /fs that is EIO."""


def read_of_a_file(rig: Rig, *, comes_again: bool = True) -> Steps[None]:
    rig.channel.has_patience()
    if comes_again:
        rig.channel.comes_again()
    pending = rig.channel.read(0, 0, memoryview(bytearray(BLOCK)))
    if (yield from wait_for(rig.channel, pending, rig.clock.now + WRITE_DEADLINE)) is not None:
        raise FileIsNotRead


def test_a_read_that_may_come_again_gives_way_beside_others_that_wait(rig: Rig) -> None:
    rig.channel.share_waits(rig.waits, may_park=True)
    rig.paths[0].answers = False
    assert rig.waits.take(rig.health)  # another worker waits there
    began = rig.clock.now
    with pytest.raises(GaveWay):
        rig.channel.run(read_of_a_file(rig))
    assert rig.clock.now - began == pytest.approx(PATIENCE_LEAST)
    began, sent = rig.clock.now, rig.paths[0].queues[0].sent
    with pytest.raises(GaveWay):
        rig.channel.run(read_of_a_file(rig))
    assert (rig.clock.now, rig.paths[0].queues[0].sent) == (began, sent), "it is not sent there again"
    assert rig.health.may_ask(rig.clock.now, patient=True), (
        "nobody has waited as long as files are waited for"
    )
    rig.waits.give_back(rig.health)
    rig.paths[0].answers = True
    rig.channel.run(read_of_a_file(rig))


def test_a_read_with_a_place_waits_to_its_deadline_and_fails(rig: Rig) -> None:
    rig.channel.share_waits(rig.waits, may_park=True)
    rig.paths[0].answers = False
    began = rig.clock.now
    with pytest.raises(FileIsNotRead):
        rig.channel.run(read_of_a_file(rig))
    assert rig.clock.now - began == pytest.approx(WRITE_DEADLINE)
    assert rig.waits.has_room()


@pytest.mark.parametrize(("may_park", "comes_again"), [(False, True), (True, False)])
def test_a_read_that_cannot_come_again_waits_as_it_always_did(
    rig: Rig, may_park: bool, comes_again: bool
) -> None:
    """Of a door that puts nothing aside, or of a writer, which reads a block before it changes it."""
    rig.channel.share_waits(rig.waits, may_park=may_park)
    rig.paths[0].answers = False
    assert rig.waits.take(rig.health)
    began = rig.clock.now
    with pytest.raises(FileIsNotRead):
        rig.channel.run(read_of_a_file(rig, comes_again=comes_again))
    assert rig.clock.now - began == pytest.approx(WRITE_DEADLINE)


def test_what_gave_way_and_came_by_another_way_is_there(rig: Rig) -> None:
    rig.channel.share_waits(rig.waits, may_park=True)
    rig.paths[0].answers = False
    assert rig.waits.take(rig.health)

    def steps() -> Steps[str]:
        try:
            yield from read_of_a_file(rig)
        except FileIsNotRead:
            return "the other copy"
        return "the first copy"

    assert rig.channel.run(steps()) == "the other copy"


def test_nobody_is_put_aside_where_the_circuit_breaker_refuses(rig: Rig) -> None:
    """Another reader's probe is under way, and has the place."""
    rig.channel.share_waits(rig.waits, may_park=True)
    rig.paths[0].answers = False
    assert rig.waits.take(rig.health)
    for _ in range(PATIENT_LATE_BEFORE_PAUSE):
        rig.health.late(rig.clock.now, patient=True)
    began = rig.clock.now
    with pytest.raises(FileIsNotRead):
        rig.channel.run(read_of_a_file(rig))
    assert rig.clock.now == began
