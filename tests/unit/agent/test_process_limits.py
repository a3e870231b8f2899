"""What Linux lets the process have: a limit that is too small is an error with advice at the start."""

from __future__ import annotations

import errno
import resource

import pytest

from agent import process_limits
from agent.errors import UserError
from agent.process_limits import RESERVE_BYTES, check_limits, explained, has_room_for

MIB = 1 << 20


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Limits that only `process_limits` believes."""
    believed = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_NOFILE: 1 << 20}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (believed[which], believed[which]))
    return believed


def in_use() -> int:
    with open("/proc/self/statm") as counts:
        return int(counts.read().split()[0]) * resource.getpagesize()


def test_no_limit_is_no_question(limits: dict[int, int]) -> None:
    check_limits(1 << 50)
    assert has_room_for(1 << 50)


def test_an_address_space_that_cannot_hold_what_is_promised_is_refused(limits: dict[int, int]) -> None:
    limits[resource.RLIMIT_AS] = in_use() + RESERVE_BYTES + 400 * MIB
    check_limits(300 * MIB)
    assert has_room_for(300 * MIB)
    assert not has_room_for(500 * MIB)
    with pytest.raises(
        UserError, match=r"limited to \d+ MiB \(RLIMIT_AS\), and its configuration"
    ) as refused:
        check_limits(500 * MIB)
    assert "ulimit -v" in refused.value.advice


def test_too_few_files_are_refused(limits: dict[int, int]) -> None:
    limits[resource.RLIMIT_NOFILE] = 20
    with pytest.raises(UserError, match="RLIMIT_NOFILE") as refused:
        check_limits(0)
    assert "ulimit -n" in refused.value.advice


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (MemoryError(), "ulimit -v"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "ulimit -v"),
        (ImportError("x.so: failed to map segment from shared object"), "ulimit -v"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
    ],
)
def test_what_linux_refuses_comes_with_advice(limits: dict[int, int], error: Exception, advice: str) -> None:
    limits[resource.RLIMIT_AS] = 1 << 30
    known = explained(error)
    assert known is not None
    assert advice in known.advice


def test_other_exceptions_are_not_explained() -> None:
    assert explained(RuntimeError("another")) is explained(OSError(errno.EIO, "x")) is None
    assert process_limits.explained(ValueError("x")) is None
