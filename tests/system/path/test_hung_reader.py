"""A process of an agent that hangs: a client's other threads go on by the others, and it comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from host_shim.block_key import key_of
from host_shim.pool import Pool
from tests.support.halting import halt
from tests.support.pool.reader_pool import SHORT, rows, value, wait_serving
from tests.support.pool_up import PoolUp
from tests.support.waiting import wait_until

GETTERS, PUTTERS, ATTEMPTS = 9, 6, 3
ROUNDS = 3
"""Calls that did what they should: a thread that has made them goes on."""


class Load:
    """A client whose threads get, and others that put batches, until they are told to stop."""

    def __init__(self, pool: PoolUp) -> None:
        self.own = Pool(pool.mount, sessions=32)
        self.volume = self.own.volume("kv")
        self.stop, self.wrong, self.done = threading.Event(), list[str](), [0] * (GETTERS + PUTTERS)
        self.keys = [key_of(f"got {number}") for number in range(GETTERS)]
        assert all(self.volume.put_many(self.keys, [value(number) for number in range(GETTERS)]))
        getters = [threading.Thread(target=self._get, args=(number,)) for number in range(GETTERS)]
        putters = [threading.Thread(target=self._put, args=(GETTERS + each,)) for each in range(PUTTERS)]
        self.threads = [*getters, *putters]
        for each in self.threads:
            each.start()

    def _get(self, number: int) -> None:
        buffer = self.own.memory(SHORT)
        while not self.stop.wait(0.001):
            if self.volume.get_into(self.keys[number], buffer) == SHORT:
                self.done[number] += 1
                if buffer != value(number):
                    self.wrong.append(f"get {number}")

    def _put(self, number: int) -> None:
        keys, values = [key_of(f"{number} {at}") for at in range(4)], [value(number + at) for at in range(4)]
        while not self.stop.wait(0.001):
            if all(self.volume.put_many(keys, values)):
                self.done[number] += 1

    def going_on(self, before: list[int]) -> tuple[int, int]:
        """How many getters and putters have made ROUNDS calls since."""
        gone = [now >= was + ROUNDS for now, was in zip(self.done, before, strict=True)]
        return sum(gone[:GETTERS]), sum(gone[GETTERS:])

    def wait_going_on(self, getters: int, putters: int) -> None:
        before = list(self.done)

        def is_so() -> bool:
            gone = self.going_on(before)
            return gone[0] >= getters and gone[1] >= putters

        wait_until(is_so, 60, f"{getters} getters and {putters} putters to go on")

    def end(self) -> None:
        self.stop.set()
        for each in self.threads:
            each.join()
        self.own.close()


@pytest.fixture
def pool(make_pool: Callable[..., PoolUp]) -> PoolUp:
    made = make_pool("--drives", "1", "--processes", "3", "--value-size", "64K")
    wait_serving(made)
    return made


@pytest.fixture
def load(pool: PoolUp) -> Iterator[Load]:
    made = Load(pool)
    try:
        made.wait_going_on(GETTERS, PUTTERS)
        yield made
    finally:
        made.end()


def wait_all_asked(pool: PoolUp) -> None:
    before = [row["gets"] for row in rows(pool)]
    wait_until(
        lambda: all(row["gets"] >= was + 20 for row, was in zip(rows(pool), before, strict=True)),
        60,
        "every process to serve gets",
    )


def test_the_others_go_on_until_one_that_hangs_is_replaced(pool: PoolUp, load: Load) -> None:
    seen: set[str] = set()

    def go_on_until_it_is_replaced() -> tuple[int, int]:
        """How many getters and putters went on while a process was stopped."""
        hung = rows(pool)[0]
        halt(hung["pid"])
        before, most = list(load.done), (0, 0)

        def is_replaced() -> bool:
            nonlocal most
            gone, row = load.going_on(before), rows(pool)[0]  # in this order: it is still that process
            if row["starts"] > hung["starts"]:
                return bool(row["state"] == "serving")
            seen.add(row["state"])
            if row["state"] in ("serving", "late"):
                most = gone
            return False

        wait_until(is_replaced, 90, "the process to be replaced")
        load.wait_going_on(GETTERS, PUTTERS)
        return most

    # A third of the getters may have asked it, and half of the putters; a few more come.
    for attempt in range(ATTEMPTS):  # a machine may leave the client no processor meanwhile
        getters, putters = go_on_until_it_is_replaced()
        if getters >= 2 and putters >= 1:
            break
        assert attempt < ATTEMPTS - 1, f"{getters} getters and {putters} putters went on"
    assert "late" in seen
    wait_all_asked(pool)
    assert not load.wrong


def test_one_that_goes_on_is_asked_again(pool: PoolUp, load: Load) -> None:
    hung = rows(pool)[1]
    halt(hung["pid"])
    try:
        wait_until(lambda: rows(pool)[1]["state"] != "serving", 60, "the process to be late")
    finally:
        # On a machine that left us no processor for so long, it was killed.
        if rows(pool)[1]["pid"] == hung["pid"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(hung["pid"], signal.SIGCONT)
    load.wait_going_on(GETTERS, PUTTERS)
    wait_serving(pool)
    wait_all_asked(pool)
    assert not load.wrong
