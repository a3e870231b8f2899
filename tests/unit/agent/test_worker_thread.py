"""Threads beside the doors: they end when they are told to, and one that hangs holds nobody up."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from agent.host_os.worker_thread import OwnThread
from tests.support.waiting import wait_until


class Worker(OwnThread):
    def __init__(self, stop_seconds: float, work: Callable[[], None] = lambda: None) -> None:
        super().__init__("worker", stop_seconds, "its work")
        self.work = work

    def _work(self) -> None:
        self.work()


def running(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_it_works_until_it_is_told_to_stop() -> None:
    thread, turns = Worker(10.0), list[int]()

    def work() -> None:
        while not thread.stopping.wait(0.001):
            turns.append(1)

    thread.work = work
    thread.start()
    wait_until(lambda: len(turns) > 2)
    thread.stop()
    assert not running("worker")


def test_one_that_never_began_is_stopped_all_the_same() -> None:
    thread = Worker(10.0)
    thread.stop()
    assert thread.stopping.is_set()


@pytest.mark.expects_log("its work is left behind")
def test_one_that_hangs_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    lets_go = threading.Event()
    thread = Worker(0.01, lambda: assert_waited(lets_go))
    thread.start()
    thread.stop()
    assert caplog.messages == ["its work is left behind"]
    lets_go.set()
    wait_until(lambda: not running("worker"))


def assert_waited(event: threading.Event) -> None:
    assert event.wait(60)
