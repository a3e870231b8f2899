"""The nets under the tests hold: log lines fail a test, processes do not outlive it."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from tests.support import processes as process_support
from tests.support.leaks import Holdings
from tests.support.rungs.log_watch import LogWatch
from tests.support.waiting import wait_until


def _lines_of(watch: LogWatch, *messages: str) -> list[str]:
    logger = logging.getLogger("guards")
    logger.propagate = False
    logger.addHandler(watch)
    try:
        for message in messages:
            logger.warning(message)
        logger.info("an info line is nobody's business")
    finally:
        logger.removeHandler(watch)
        logger.propagate = True
    return watch.unexpected()


def test_a_warning_that_nobody_announced_is_unexpected() -> None:
    assert _lines_of(LogWatch(), "the disk is full") == ["WARNING guards: the disk is full"]


def test_an_announced_warning_is_expected() -> None:
    watch = LogWatch()
    watch.announce(r"disk .* full")
    assert _lines_of(watch, "the disk is full") == []


@pytest.mark.expects_log("announced by a mark")
def test_the_mark_reaches_the_watch() -> None:
    logging.getLogger("guards").warning("announced by a mark")


def test_the_seed_is_the_one_that_was_printed(seed: int) -> None:
    import hypothesis.core

    assert hypothesis.core.global_force_seed == seed


def test_a_condition_that_never_comes_is_named() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.02 s: a miracle"):
        wait_until(lambda: False, 0.02, "a miracle")


def test_processes_are_found_by_their_mark_and_killed(tmp_path: Path) -> None:
    mark = os.environ[process_support.MARK]
    guard = process_support.Processes(tmp_path)
    started = guard.start([sys.executable, "-c", "print('here', flush=True); import time; time.sleep(600)"])
    try:
        started.wait_for_line("here")
        assert started.pid in process_support.strays(mark)
    finally:
        guard.end_all()
    assert not started.running
    assert started.pid not in process_support.strays(mark)


def test_a_process_that_ends_before_its_line_is_reported_with_its_output(tmp_path: Path) -> None:
    guard = process_support.Processes(tmp_path)
    started = guard.start([sys.executable, "-c", "print('something else')"])
    try:
        with pytest.raises(AssertionError, match="something else"):
            started.wait_for_line("ready")
    finally:
        guard.end_all()


def test_a_socket_left_open_is_seen() -> None:
    import socket

    before = Holdings.now()
    left, right = socket.socketpair()
    assert len(Holdings.now().left_over(before)) == 2
    left.close()
    right.close()
    assert Holdings.now().left_over(before) == []
