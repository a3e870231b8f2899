"""Who reads of a door's workers, and who rests."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from agent.host_os.workers_on_duty import LONG_BYTES, LONG_EACH, Roster, WorkerOnDuty, Worth, reads_always
from tests.support.waiting import wait_until

SAMPLES = 32
IN_VAIN = 8


@pytest.fixture
def roster() -> Iterator[Roster]:
    made = Roster(3)
    yield made
    made.close()


class Resting:
    """A thread that waits at `ready`, and what it came to."""

    def __init__(self, worker: WorkerOnDuty) -> None:
        self.answers: list[bool] = []
        self._thread = threading.Thread(target=lambda: self.answers.append(worker.ready()), daemon=True)
        self._thread.start()

    def ended(self) -> bool:
        self._thread.join(30)
        assert not self._thread.is_alive(), "nobody called it"
        return self.answers[0]


def rests(roster: Roster, worker: WorkerOnDuty) -> Resting:
    """The worker has nobody to help, and rests. Somebody else reads or began a request meanwhile."""
    resting = Resting(worker)
    wait_until(lambda: worker in roster.resting, what="rest")
    return resting


def test_one_worker_reads_and_the_others_rest(roster: Roster) -> None:
    first, second, third = roster.workers
    assert first.ready()
    others = [rests(roster, second), rests(roster, third)]
    assert roster.reading == 1
    first.began(is_long=False)
    assert first.ready(), "with its request at an end it reads on, and nobody was woken for it"
    assert roster.resting == [second, third]
    roster.close()
    assert [each.ended() for each in others] == [False, False]


def test_a_request_that_moves_much_lets_another_read_where_one_waits(roster: Roster) -> None:
    first, second, _ = roster.workers
    assert first.ready()
    other = rests(roster, second)
    first.began(is_long=False)
    first.moves(LONG_BYTES, 1)
    first.requests_wait = lambda: False
    first.waits()
    assert second in roster.resting, "no request waits"
    first.requests_wait = lambda: True
    first.waits()
    assert other.ended()
    assert first.ready(), "both read on: more requests wait"
    assert roster.reading == 2
    first.requests_wait = lambda: False
    for _ in range(IN_VAIN - 1):
        first.began(is_long=True)
        assert first.ready(), "clients that were answered may ask again in a moment"
    first.began(is_long=True)
    again = rests(roster, first)
    second.leave()
    assert again.ended(), "the one that read is gone"


def test_many_short_commands_do_not_move_much(roster: Roster) -> None:
    first, second, _ = roster.workers
    assert first.ready()
    other = rests(roster, second)
    first.began(is_long=False)
    first.moves(LONG_BYTES, LONG_BYTES // LONG_EACH + 1)
    first.waits()
    assert second in roster.resting
    first.moves(LONG_EACH, 1)
    first.moves(LONG_EACH, 0)
    first.waits()
    assert other.ended(), "all commands of the request together"
    assert first.ready()
    first.began(is_long=False)
    first.moves(LONG_BYTES - 1, 1)
    assert roster.small == 1, "a request begins at nothing"


def test_a_worker_that_is_stuck_calls_another(roster: Roster) -> None:
    first, second, third = roster.workers
    assert first.ready()
    second_rests, third_rests = rests(roster, second), rests(roster, third)
    first.began(is_long=False)
    first.is_stuck()
    assert third_rests.ended(), "the last to rest is called first"
    first.is_stuck()
    assert second in roster.resting, "one reads already"
    third.began(is_long=False)
    third.is_stuck()
    assert second_rests.ended()
    assert roster.small == 0


def test_nobody_comes_to_rest_for_a_worker_that_began_to_wait_while_another_read(roster: Roster) -> None:
    first, second, _ = roster.workers
    assert first.ready()
    other = rests(roster, second)
    first.began(is_long=False)
    first.is_stuck()
    assert other.ended()
    resting = rests(roster, first)
    second.began(is_long=False)
    second.is_stuck()
    assert resting.ended()
    # `second` has come back, and reads: `first` has nobody to call, and waits.
    first.began(is_long=False)
    assert first.may_hold_up(), "whoever comes back would rest, for this request alone"
    first.is_stuck()
    assert second.ready()


def test_a_worker_that_ends_calls_another(roster: Roster) -> None:
    first, second, _ = roster.workers
    assert first.ready()
    other = rests(roster, second)
    first.leave()
    assert other.ended()
    assert (roster.reading, roster.small) == (1, 0)


def test_a_worker_that_blocks_and_tells_nobody_is_found(roster: Roster) -> None:
    first, second, third = roster.workers
    assert first.ready()
    rests(roster, second)
    other = rests(roster, third)
    first.began(is_long=False)
    assert other.ended(), "the one that rested last looks from time to time"
    assert roster.resting == [second]


def test_nobody_rests_once_the_door_ends(roster: Roster) -> None:
    roster.close()
    assert [worker.ready() for worker in roster.workers] == [False] * 3


def test_without_a_roster_a_worker_always_reads() -> None:
    alone = reads_always()
    for _ in range(100):
        assert alone.ready()
        alone.began(is_long=False)
        assert not alone.may_hold_up()


def add(worth: Worth, processor: float, took: float, vote: int = 1) -> int:
    for _ in range(SAMPLES):
        worth.add(processor, took, vote)
    return worth.workers


def test_small_requests_are_worth_as_many_workers_as_keep_the_interpreter_busy() -> None:
    worth = Worth(8)
    assert add(worth, 40e-6, 60e-6) == 1, "with two, one would wait for the other"
    assert add(worth, 40e-6, 240e-6, -1) == 1, "nobody waits to be read"
    assert add(worth, 40e-6, 240e-6, 0) == 1, "nobody knows whether somebody waits"
    assert [add(worth, 40e-6, 240e-6) for _ in range(4)] == [2, 4, 4, 4]
    assert [add(worth, 40e-6, 100e-6) for _ in range(4)] == [3, 2, 2, 2]
    assert add(worth, 60e-6, 60e-6) == 1
    assert add(worth, 60e-6, 60e-6) == 1


def test_small_requests_are_worth_no_more_workers_than_there_are() -> None:
    worth = Worth(2)
    assert [add(worth, 10e-6, 1e-3) for _ in range(3)] == [2, 2, 2]


def test_a_drive_that_answers_late_brings_more_workers(roster: Roster) -> None:
    first, second, _ = roster.workers
    worth = roster.worth
    assert add(worth, 10e-6, 300e-6) == 2
    assert first.ready()
    other = rests(roster, second)
    first.began(is_long=False)
    first.waits()
    assert other.ended()


def test_requests_at_which_workers_are_stuck_are_timed_too(
    monkeypatch: pytest.MonkeyPatch, roster: Roster
) -> None:
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)  # a worker that waits has no processor
    first, second, _ = roster.workers
    assert first.ready()
    for _ in range(SAMPLES * 8):
        # A program writes a request, and then reads its answer, for which nobody waits.
        for waits in (True, False):
            first.began(is_long=False)
            if waits:
                roster.resting.append(second)
                first.waits()
                first.is_stuck()
                second.called.acquire()
                roster.reading -= 1
            first.ready()
    assert roster.worth.workers == 3


class Model:
    """A door whose kernel has `count` requests. Some of them end only after the next one: so somebody has to
    read it meanwhile."""

    def __init__(self, seed: int, workers: int, count: int) -> None:
        self.roster = Roster(workers)
        self.failures: list[BaseException] = []
        self._count, self._chain = count, workers - 1
        self._changed = threading.Condition()
        self._next, self._ended = 0, set[int]()
        self._threads = [
            threading.Thread(target=self._work, args=(each, seed * 100 + number), daemon=True)
            for number, each in enumerate(self.roster.workers)
        ]

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "a request is served by nobody"
        assert not self.failures, self.failures
        assert len(self._ended) == self._count
        roster = self.roster
        assert (roster.reading, roster.small, roster.resting) == (0, 0, [])

    def _work(self, worker: WorkerOnDuty, seed: int) -> None:
        rng = random.Random(seed)
        worker.requests_wait = lambda: self._next < self._count
        try:
            while worker.ready():
                number = self._read()
                if number is None:
                    self.roster.close()
                    break
                worker.began(is_long=rng.random() < 0.2)
                self._serve(worker, number, rng)
                with self._changed:
                    self._ended.add(number)
                    self._changed.notify_all()
                with self.roster.lock:
                    assert 0 <= self.roster.reading <= len(self.roster.workers)
                    assert self.roster.small == sum(each.is_small for each in self.roster.workers)
        except BaseException as failure:
            self.failures.append(failure)
            self.roster.close()
        finally:
            worker.leave()

    def _read(self) -> int | None:
        """The next request; None: the mount has gone, which its reader hears once all were served."""
        with self._changed:
            if self._next < self._count:
                self._next += 1
                return self._next - 1
            self._changed.wait_for(lambda: len(self._ended) == self._count, 60)
            return None

    def _serve(self, worker: WorkerOnDuty, number: int, rng: random.Random) -> None:
        for _ in range(rng.randrange(4)):
            if rng.random() < 0.3:
                worker.moves(rng.choice([4 << 10, LONG_BYTES, 4 * LONG_BYTES]), rng.choice([1, 16]))
            if worker.may_hold_up():
                worker.waits()
        # As many in a row as workers wait at the most, so that one is left for the next.
        waits_for_next = number % (self._chain + 1) and number + 1 < self._count and rng.random() < 0.3
        if waits_for_next:
            tells = rng.random() < 0.9
            if tells and worker.may_hold_up():
                worker.is_stuck()
            with self._changed:
                assert self._changed.wait_for(lambda: number + 1 in self._ended, 30), "nobody read the next"
        elif rng.random() < 0.1:
            worker.is_stuck()


@pytest.mark.parametrize("seed", range(8))
def test_every_request_is_read_whatever_others_wait_for(seed: int) -> None:
    Model(seed, workers=2 + seed % 4, count=300).run()
