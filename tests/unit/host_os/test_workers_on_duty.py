"""Who reads of a door's workers, and who rests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from agent.host_os.workers_on_duty import LONG_BYTES, LONG_EACH, Roster, WorkerOnDuty, Worth, reads_always
from tests.support.waiting import wait_until

SAMPLES = 32
IN_VAIN = 8
KIB = 1 << 10


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
        assert not alone.others_rest()


def add(worth: Worth, processor: float, took: float, *, more_wait: bool = True) -> int:
    for _ in range(SAMPLES):
        worth.add(processor, took, more_wait=more_wait)
    return worth.workers


def test_small_requests_are_worth_as_many_workers_as_keep_the_interpreter_busy() -> None:
    worth = Worth(8)
    assert add(worth, 40e-6, 60e-6) == 1, "with two, one would wait for the other"
    assert add(worth, 40e-6, 240e-6, more_wait=False) == 1, "nobody waits to be read"
    assert [add(worth, 40e-6, 240e-6) for _ in range(6)] == [2, 3, 4, 4, 4, 4]
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
