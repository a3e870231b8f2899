"""Verdicts for a scheduler: what it is told at once, what after a step, and that it is never held."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from host_shim.tier_lookups import BATCHES_MAX, TierLookups
from tests.support.engines.drained import drained


class Asked:
    """A pool that has some keys, answers when it is let, and counts its batches."""

    def __init__(self) -> None:
        self.there: set[bytes] = set()
        self.batches: list[list[bytes]] = []
        self.let = threading.Event()
        self.let.set()
        self.broken = False

    def __call__(self, keys: Sequence[bytes]) -> list[bool]:
        self.batches.append(list(keys))
        assert self.let.wait(20)
        if self.broken:
            raise OSError("no such thing")
        return [key in self.there for key in keys]


@pytest.fixture
def asked() -> Asked:
    return Asked()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lookups(asked: Asked, clock: Clock) -> Iterator[TierLookups]:
    made = TierLookups("test-lookups", asked, 0.5, clock=clock)
    yield made
    asked.let.set()
    made.close(10)


def test_a_step_is_one_batch(asked: Asked, lookups: TierLookups) -> None:
    asked.there = {b"a", b"c"}
    assert [lookups.verdict(key, "r") for key in (b"a", b"b", b"c", b"a")] == [None] * 4
    lookups.flush()
    assert drained(lookups._runner, 10)
    assert asked.batches == [[b"a", b"b", b"c"]]
    assert [lookups.verdict(key, "r") for key in (b"a", b"b", b"c")] == [True, False, True]
    lookups.flush()
    assert len(asked.batches) == 1


def test_a_request_that_is_over_takes_its_verdicts_along(asked: Asked, lookups: TierLookups) -> None:
    lookups.verdict(b"a", "one")
    lookups.verdict(b"a", "two")
    lookups.flush()
    assert drained(lookups._runner, 10)
    lookups.forget_request("one")
    assert lookups.verdict(b"a", "two") is False
    lookups.forget_request("two")
    asked.there = {b"a"}
    assert lookups.verdict(b"a", "three") is None
    lookups.forget_request("three")
    lookups.flush()
    assert drained(lookups._runner, 10)
    assert len(asked.batches) == 1, "nobody waits for that answer"


def test_no_answer_in_time_is_a_miss_and_nobody_else_waits(
    asked: Asked, clock: Clock, lookups: TierLookups
) -> None:
    asked.there = {b"a", b"b"}
    asked.let.clear()
    assert lookups.verdict(b"a", "r") is None
    lookups.flush()
    clock.now += 0.4
    assert lookups.verdict(b"a", "r") is None
    clock.now += 0.2
    assert lookups.verdict(b"a", "r") is False
    assert lookups.verdict(b"b", "r") is False, "while an answer is overdue there are no questions"
    asked.let.set()
    assert drained(lookups._runner, 10)
    assert lookups.verdict(b"a", "r") is False, "a request is told one thing"
    assert lookups.verdict(b"b", "s") is None
    lookups.flush()
    assert drained(lookups._runner, 10)
    assert lookups.verdict(b"b", "s") is True


def test_a_load_that_failed_is_not_tried_again_by_the_same_request(
    asked: Asked, lookups: TierLookups
) -> None:
    asked.there = {b"a"}
    lookups.verdict(b"a", "r")
    lookups.flush()
    assert drained(lookups._runner, 10)
    assert lookups.verdict(b"a", "r") is True
    lookups.mark_missing([b"a", b"unknown"])
    assert lookups.verdict(b"a", "r") is False


@pytest.mark.expects_log("no such thing")
def test_an_error_of_the_pool_is_a_miss(asked: Asked, lookups: TierLookups) -> None:
    asked.broken = True
    lookups.verdict(b"a", "r")
    lookups.flush()
    assert drained(lookups._runner, 10)
    assert lookups.verdict(b"a", "r") is False


def test_more_questions_than_there_is_room_for_are_misses(asked: Asked, lookups: TierLookups) -> None:
    asked.let.clear()
    told = []
    for number in range(BATCHES_MAX + 3):
        key = number.to_bytes(4, "big")
        lookups.verdict(key, "r")
        lookups.flush()
        told.append(lookups.verdict(key, "r"))
    assert told[0] is None
    assert told[-1] is False


def test_a_miss_is_asked_again_for_the_next_request_however_they_overlap(
    asked: Asked, lookups: TierLookups
) -> None:
    """A prefix that a steady load asks for, and that was stored (or whose agent came back) meanwhile."""
    lookups.verdict(b"a", "0")
    lookups.flush()
    assert drained(lookups._runner, 10)
    assert lookups.verdict(b"a", "0") is False
    asked.there = {b"a"}
    assert [lookups.verdict(b"a", request) for request in ("1", "2")] == [None, None]
    lookups.forget_request("0")
    lookups.flush()
    assert drained(lookups._runner, 10)
    assert [lookups.verdict(b"a", request) for request in ("1", "2", "3")] == [True] * 3
    assert asked.batches == [[b"a"]] * 2
    lookups.mark_missing([b"a"])
    assert [lookups.verdict(b"a", request) for request in ("1", "2", "3")] == [False] * 3
    assert lookups.verdict(b"a", "4") is None
    for request in "1234":
        lookups.forget_request(request)
    assert not lookups._alive
    assert not lookups._latest
