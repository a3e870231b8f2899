"""Names of threads as the kernel has them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvmeof.thread_names import show_thread_names


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = threading.getprofile()
    threading.setprofile(None)  # type: ignore[arg-type]
    yield
    threading.setprofile(before)  # type: ignore[arg-type]


def seen_by_the_kernel(name: str) -> tuple[str, object]:
    """The name of a thread that has this one in Python, and the profiler that it runs under."""
    found: list[tuple[str, object]] = []

    def look() -> None:
        found.append((Path("/proc/thread-self/comm").read_text().rstrip("\n"), sys.getprofile()))

    thread = threading.Thread(target=look, name=name)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("name", ["fuse-0", "a name that is longer than the kernel's", "Ärger"])
def test_a_thread_has_its_name_and_no_profiler(name: str) -> None:
    show_thread_names()
    known, profiler = seen_by_the_kernel(name)
    assert known.encode() == name.encode()[:15]
    assert profiler is None


def test_a_profiler_that_was_set_stays() -> None:
    seen: list[str] = []

    def profiler(_frame: object, event: str, _argument: object) -> None:
        seen.append(event)

    threading.setprofile(profiler)
    show_thread_names()
    assert threading.getprofile() is profiler
    assert seen_by_the_kernel("fuse-0")[1] is profiler
    assert seen
