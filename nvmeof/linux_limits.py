"""What Linux refuses a process (setrlimit(2)), in words for a person. For the programs of both roles.

A refusal is no bug: the log tells it in a line, with what to do, wherever it is met (`tell_refusals`). A
program whose limits are too low does not start, and says what it needs (`check_limits`).
"""

import ctypes
import errno
import logging
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

log = logging.getLogger(__name__)

ARENAS: Final = 4
"""Of malloc, in a process whose address space is limited. Without that each thread would have one of 64 MiB,
up to eight for each core."""
ARENA_BYTES: Final = 64 << 20
_M_ARENA_MAX: Final = -8
_STACK_BYTES: Final = 8 << 20
_ROUND_BYTES: Final = 64 << 20
START_BYTES: Final = 32 << 20
START_SECONDS: Final = 1.0
"""Address space without which no thread is started beside those that serve, and how long a start may take."""
RESERVE_BYTES: Final = 256 << 20
"""Address space of an agent beside its configured bounds: buffers of a request, threads that connect."""
_THREAD_REFUSED: Final = "can't start new thread"
_NOT_MAPPED: Final = "failed to map segment"
MORE_ADDRESSES: Final = "raise the limit (ulimit -v, LimitAS= of a unit)"
MORE_FILES: Final = "raise the limit (ulimit -n 4096, LimitNOFILE= of a unit)"
MORE_THREADS: Final = (
    "raise what limits it: processes (ulimit -u, TasksMax= of a unit) or address space (ulimit -v)"
)


@dataclass(frozen=True, slots=True)
class Need:
    """What a program takes at the most, beside its threads' stacks and arenas of malloc."""

    program: str
    memory_bytes: int
    threads: int
    files: int
    lower: str = ""
    """What of its configuration makes it less."""

    @property
    def address_bytes(self) -> int:
        """All of its address space, in whole 64 MiB: the same figure in every run."""
        stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
        stacks = self.threads * (_STACK_BYTES if stack == resource.RLIM_INFINITY else stack)
        arenas = min(self.threads, ARENAS) * ARENA_BYTES
        return -(-(self.memory_bytes + stacks + arenas) // _ROUND_BYTES) * _ROUND_BYTES


class LimitTooLow(Exception):
    """A limit has no room for what a program needs; `advice` says what to do."""

    def __init__(self, words: str, advice: str) -> None:
        super().__init__(words)
        self.advice = advice


def check_limits(need: Need) -> None:
    """Raises LimitTooLow. For the start of a program, before it has threads."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        least = need.address_bytes
        if limit < least:
            raise LimitTooLow(
                f"the address space of this process is limited to {limit >> 20} MiB (RLIMIT_AS), and "
                f"{need.program} needs {least >> 20} MiB",
                f"raise the limit (ulimit -v {least >> 10}, LimitAS= of a unit){need.lower}",
            )
        _use_few_arenas()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < need.files:
        raise LimitTooLow(
            f"this process may open {files} files (RLIMIT_NOFILE), and {need.program} needs {need.files}",
            f"raise the limit (ulimit -n {max(4096, need.files)}, LimitNOFILE= of a unit)",
        )


def _use_few_arenas() -> None:
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, ARENAS)


def address_room() -> int | None:
    """Bytes of address space that this process may still take; None where that is not limited."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    with open("/proc/self/statm") as counts:
        return max(0, limit - int(counts.read().split()[0]) * resource.getpagesize())


def has_room_for(size: int) -> bool:
    """Whether a mapping of `size` bytes leaves RESERVE_BYTES of address space."""
    room = address_room()
    return room is None or room - size >= RESERVE_BYTES


def refusal(error: BaseException | None) -> tuple[str, str] | None:
    """What Linux has refused and what to do about it, where an exception says so; None for any other."""
    if isinstance(error, LimitTooLow):
        return str(error), error.advice
    if isinstance(error, BaseExceptionGroup):
        return next((found for each in error.exceptions if (found := refusal(each)) is not None), None)
    number = error.errno if isinstance(error, OSError) else None
    unmapped = isinstance(error, ImportError) and _NOT_MAPPED in str(error)
    if unmapped or isinstance(error, MemoryError) or number == errno.ENOMEM:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            advice = "free some, or raise the memory limit of the control group"
            return "there is not enough memory", advice
        return (
            f"there is not enough memory: the address space of this process is limited to {limit >> 20} MiB",
            MORE_ADDRESSES,
        )
    if number in (errno.EMFILE, errno.ENFILE):
        return "no more files can be opened", MORE_FILES
    if isinstance(error, RuntimeError) and _THREAD_REFUSED in str(error):
        return "Linux refuses another thread", MORE_THREADS
    return None


class _Begun(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(START_SECONDS):
            raise RuntimeError(_THREAD_REFUSED)
        return True


class SureThread(threading.Thread):
    """A thread whose `start` comes to an end: RuntimeError, also where it did not get to its first step.

    One that has no memory for that dies unseen, and `threading.Thread` waits for it for ever
    (python/cpython#140746). After the error it may still run, on a machine that is slow.
    """

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._started = _Begun()

    def start(self) -> None:
        room = address_room()
        if room is not None and room < START_BYTES:
            raise RuntimeError(_THREAD_REFUSED)
        super().start()


def tell_refusals() -> None:
    """From now on the log tells a refusal in a line, without a traceback; also one that ends a thread."""
    logging.raiseExceptions = False  # A line for which there is no memory is left out.
    make = logging.getLogRecordFactory()

    def record(*arguments: Any, **named: Any) -> logging.LogRecord:
        made = make(*arguments, **named)
        found = refusal(made.exc_info[1]) if isinstance(made.exc_info, tuple) else None
        if found is not None:
            made.msg, made.args, made.exc_info = f"{made.getMessage()}: {'; '.join(found)}", (), None
        return made

    def ended(of: threading.ExceptHookArgs) -> None:
        if of.exc_value is not None and not isinstance(of.exc_value, SystemExit):
            name = of.thread.name if of.thread is not None else ""
            log.error("thread %s ended", name, exc_info=(of.exc_type, of.exc_value, of.exc_traceback))

    logging.setLogRecordFactory(record)
    threading.excepthook = ended
