"""System tests touch the machine, so each must leave it as it found it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import leaks
from tests.support import processes as process_support
from tests.support.waiting import wait_until

SECONDS = 20.0
"""For the last of it to go: a busy machine takes its time with processes that were killed."""


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path: Path) -> Iterator[None]:
    """Processes, mounts, sockets and threads of the test are gone at its end, else it fails.

    It comes before the other fixtures of a test, so it looks when those have cleaned up. What is
    found is removed all the same: the next test shall not suffer.
    """
    mark = os.environ[process_support.MARK]
    before = leaks.Holdings.now()
    processes_before = process_support.strays(mark).keys()
    yield
    gc.collect()
    found: list[str] = []
    try:
        wait_until(lambda: not leaks.Holdings.now().left_over(before), SECONDS)
    except AssertionError:
        found += leaks.Holdings.now().left_over(before)
    try:
        wait_until(lambda: not process_support.new_strays(mark, processes_before), SECONDS)
    except AssertionError:
        left = process_support.new_strays(mark, processes_before)
        process_support.end(left)
        found += [f"process {pid}: {command}" for pid, command in left.items()]
    found += [f"mount {place}" for place in leaks.unmount_below(tmp_path)]
    if found:
        pytest.fail("left behind:\n" + "\n".join(found), pytrace=False)
