"""The signals that ask a program to end. `g35 up` notes them, and looks for them where it waits."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def _handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def ended_by_signals() -> contextlib.AbstractContextManager[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that it takes down what it has made."""
    return _handled((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler)


class Interrupts:
    """Whether somebody has asked for the end, and by which signal first."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._first = 0

    @property
    def exit_code(self) -> int:
        """Of a start that the signal has cut short."""
        return EXIT_INTERRUPTED if self._first == signal.SIGINT else EXIT_FAILED

    def noted(self) -> contextlib.AbstractContextManager[None]:
        """Note the signals while the block runs.

        A KeyboardInterrupt would be raised wherever Python happens to be: a destructor or a callback of a
        library swallows it, and the start would go on as if nobody had pressed anything.
        """
        return _handled(_ENDING, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._first = self._first or number
        self.stop.set()
