"""What Linux refuses is told in a line with advice, and a limit that is too low before anything starts."""

from __future__ import annotations

import errno
import logging
import resource
import threading
from collections.abc import Iterator

import pytest

from nvmeof import linux_limits
from nvmeof.linux_limits import LimitTooLow, Need, SureThread, check_limits, refusal, tell_refusals

MIB = 1 << 20
NEED = Need("this program", memory_bytes=300 * MIB, threads=10, files=100, lower=", or ask less")


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Limits that only the code under test believes."""
    believed = {
        resource.RLIMIT_AS: resource.RLIM_INFINITY,
        resource.RLIMIT_NOFILE: 1 << 20,
        resource.RLIMIT_STACK: 8 * MIB,
    }
    monkeypatch.setattr(resource, "getrlimit", lambda which: (believed[which], believed[which]))
    return believed


def test_the_figure_is_of_stacks_arenas_and_memory_in_whole_64_mib(limits: dict[int, int]) -> None:
    assert NEED.address_bytes == 640 * MIB  # 300, ten stacks of 8, four arenas of 64
    limits[resource.RLIMIT_STACK] = resource.RLIM_INFINITY
    assert NEED.address_bytes == 640 * MIB
    assert Need("small", 1, 1, 1).address_bytes == 128 * MIB


def test_no_limit_is_no_question(limits: dict[int, int]) -> None:
    check_limits(Need("all", 1 << 50, 1, 100))


def test_an_address_space_that_is_too_small_is_refused_with_the_figure(
    limits: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linux_limits, "_use_few_arenas", lambda: None)
    limits[resource.RLIMIT_AS] = 640 * MIB
    check_limits(NEED)
    limits[resource.RLIMIT_AS] -= 1
    with pytest.raises(LimitTooLow, match=r"limited to 639 MiB \(RLIMIT_AS\), and this program needs 640"):
        check_limits(NEED)
    advice = refusal(_raised(NEED))
    assert advice is not None
    assert "ulimit -v 655360," in advice[1]
    assert advice[1].endswith(", or ask less")


def test_too_few_files_are_refused_with_the_figure(limits: dict[int, int]) -> None:
    limits[resource.RLIMIT_NOFILE] = 99
    with pytest.raises(LimitTooLow, match=r"open 99 files \(RLIMIT_NOFILE\), and this program needs 100"):
        check_limits(NEED)
    assert "ulimit -n 4096" in _raised(NEED).advice


def _raised(need: Need) -> LimitTooLow:
    with pytest.raises(LimitTooLow) as refused:
        check_limits(need)
    return refused.value


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (MemoryError(), "ulimit -v"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "ulimit -v"),
        (ImportError("x.so: failed to map segment from shared object"), "ulimit -v"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (ExceptionGroup("of a nursery", [ValueError("x"), MemoryError()]), "ulimit -v"),
    ],
)
def test_what_linux_refuses_comes_with_advice(limits: dict[int, int], error: Exception, advice: str) -> None:
    limits[resource.RLIMIT_AS] = 1 << 30
    known = refusal(error)
    assert known is not None
    assert advice in known[1]


def test_other_exceptions_are_no_refusals() -> None:
    assert refusal(RuntimeError("another")) is refusal(OSError(errno.EIO, "x")) is refusal(None) is None
    assert refusal(ExceptionGroup("of a nursery", [ValueError("x")])) is None


def test_a_thread_without_memory_for_its_first_step_is_a_refusal_and_no_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linux_limits, "START_SECONDS", 0.05)
    done = threading.Event()
    SureThread(done.set, "begins").start()
    assert done.wait(10)
    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "_bootstrap", lambda self: None)
        with pytest.raises(RuntimeError) as refused:
            SureThread(done.set, "dies unseen").start()
    assert refusal(refused.value) is not None
    monkeypatch.setattr(linux_limits, "address_room", lambda: linux_limits.START_BYTES - 1)
    with pytest.raises(RuntimeError):
        SureThread(lambda: pytest.fail("there is no room for it"), "not begun").start()


@pytest.fixture
def told() -> Iterator[None]:
    """`tell_refusals`, taken back."""
    before = logging.getLogRecordFactory(), threading.excepthook, logging.raiseExceptions
    tell_refusals()
    yield
    logging.setLogRecordFactory(before[0])
    threading.excepthook, logging.raiseExceptions = before[1:]


@pytest.mark.usefixtures("told")
@pytest.mark.expects_log("thread worker ended")
def test_the_log_tells_a_refusal_in_a_line_and_a_bug_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refused() -> None:
        raise MemoryError

    def wrong() -> None:
        raise KeyError("a bug")

    for work in (refused, wrong):
        thread = threading.Thread(target=work, name="worker")
        thread.start()
        thread.join()
    line, bug = caplog.records
    assert line.getMessage().startswith("thread worker ended: there is not enough memory")
    assert line.exc_info is None
    assert bug.exc_info is not None
