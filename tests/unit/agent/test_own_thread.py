"""Threads beside the doors: they end when they are told to, and one that hangs holds nobody up."""

from __future__ import annotations

import threading

import pytest

from agent.host_os.worker_thread import OwnThread
from tests.support.waiting import wait_until


def running(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_it_works_until_it_is_told_to_stop() -> None:
    thread, turns = OwnThread("worker", 10.0, "its work"), list[int]()

    def work() -> None:
        while not thread.stopping.wait(0.001):
            turns.append(1)

    thread.start(work)
    wait_until(lambda: len(turns) > 2)
    thread.stop()
    assert not running("worker")


def test_one_that_never_began_is_stopped_all_the_same() -> None:
    thread = OwnThread("worker", 10.0, "its work")
    thread.stop()
    assert thread.stopping.is_set()


@pytest.mark.expects_log("its work is left behind")
def test_one_that_hangs_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    thread, lets_go = OwnThread("worker", 0.01, "its work"), threading.Event()
    thread.start(lambda: assert_waited(lets_go))
    thread.stop()
    assert caplog.messages == ["its work is left behind"]
    lets_go.set()
    wait_until(lambda: not running("worker"))


def assert_waited(event: threading.Event) -> None:
    assert event.wait(60)
