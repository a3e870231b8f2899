"""A child that is forked begins with what its parent has loaded, and with nothing else of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.host_os.forked_process import ForkedProcess, fork, may_fork, show_words


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[Callable[[Callable[[], int]], ForkedProcess]]:
    """Forks a child, whose words go to `out` and `err` in the test's folder."""
    children: list[ForkedProcess] = []

    def start(run: Callable[[], int]) -> ForkedProcess:
        with (tmp_path / "out").open("wb") as output, (tmp_path / "err").open("wb") as errors:
            children.append(fork(run, output.fileno(), errors.fileno()))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait(10)


def test_the_child_says_what_its_function_says_and_ends_with_its_result(
    forked: Callable[[Callable[[], int]], ForkedProcess], tmp_path: Path
) -> None:
    def say() -> int:
        print("to the output")
        print("to the errors", file=sys.stderr)
        return 3

    child = forked(say)
    assert child.wait(10) == 3 == child.poll() == child.returncode
    assert (tmp_path / "out").read_text() == "to the output\n"
    assert (tmp_path / "err").read_text() == "to the errors\n"


@pytest.mark.parametrize(("code", "status"), [(None, 0), (0, 0), (2, 2), ("words", 1)])
def test_a_system_exit_is_the_status(
    forked: Callable[[Callable[[], int]], ForkedProcess], code: int | str | None, status: int
) -> None:
    assert forked(lambda: sys.exit(code)).wait(10) == status


def test_an_error_is_told_and_is_status_one(
    forked: Callable[[Callable[[], int]], ForkedProcess], tmp_path: Path
) -> None:
    def fail() -> int:
        raise ValueError("no such thing")

    assert forked(fail).wait(10) == 1
    assert (tmp_path / "err").read_text().endswith("ValueError: no such thing\n")


def test_the_child_has_no_descriptor_of_its_parent_and_a_session_of_its_own(
    forked: Callable[[Callable[[], int]], ForkedProcess], tmp_path: Path
) -> None:
    def look() -> int:
        print(sorted(int(each) for each in os.listdir("/proc/self/fd"))[:3], len(os.listdir("/proc/self/fd")))
        print(os.getsid(0) == os.getpid(), os.read(0, 1) == b"")
        return 0

    ends = os.pipe()
    try:
        assert forked(look).wait(10) == 0
    finally:
        for each in ends:
            os.close(each)
    # The fourth is the one by which the folder is listed.
    assert (tmp_path / "out").read_text() == "[0, 1, 2] 4\nTrue True\n"


def test_a_signal_that_the_parent_only_notes_ends_the_child(
    forked: Callable[[Callable[[], int]], ForkedProcess],
) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        child = forked(lambda: signal.pause() or 0)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.0)
        # Before the child has its own ways with signals it is asked as its parent would be.
        while child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert child.returncode == -signal.SIGTERM
    child.terminate()  # nobody is there any more


def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from agent.host_os.forked_process import fork\n"
        "child = fork(lambda: signal.pause() or 0, 1, 2)\n"
        "print(child.pid, flush=True)\n"
        "signal.pause()\n"
    )
    parent = subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    ended = os.pidfd_open(child)
    parent.kill()
    try:
        # The pipe ends with the last process that has it.
        assert parent.stdout.read() == ""
    finally:
        parent.stdout.close()
        os.close(ended)
        parent.wait(10)


def test_nobody_forks_beside_another_thread() -> None:
    program = (
        "import threading\n"
        "from agent.host_os.forked_process import may_fork\n"
        "print(may_fork())\n"
        "end = threading.Event()\n"
        "beside = threading.Thread(target=end.wait)\n"
        "beside.start()\n"
        "print(may_fork())\n"
        "end.set()\n"
        "beside.join()\n"
        "print(may_fork())\n"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "False", "True"]
    assert may_fork() is (threading.active_count() == 1)


@pytest.mark.parametrize("words", [["g35", "agent"], ["g35", "agent", "--config", "/" + 4000 * "x"]])
def test_ps_shows_the_words_of_the_child_as_far_as_there_is_room(
    forked: Callable[[Callable[[], int]], ForkedProcess], tmp_path: Path, words: list[str]
) -> None:
    was = Path("/proc/self/cmdline").read_bytes()

    def show() -> int:
        show_words(words)
        sys.stdout.buffer.write(Path("/proc/self/cmdline").read_bytes())
        return 0

    assert forked(show).wait(10) == 0
    told = (tmp_path / "out").read_bytes()
    assert len(told) == len(was)
    assert told.rstrip(b"\0").split(b"\0")[:2] == [b"g35", b"agent"]
    assert "\0".join(words).encode().startswith(told.rstrip(b"\0"))
    assert Path("/proc/self/cmdline").read_bytes() == was
