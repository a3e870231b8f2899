"""Opening a file of the user's that may be a FIFO: open(2) waits for a writer, who may never come."""

import errno
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

WRITER_SECONDS: Final = 10.0
"""For which a writer is waited for. One that is there may take as long as it likes."""
_KNOCK_SECONDS: Final = 0.05
_KNOCKS: Final = 20


def open_to_read(path: Path) -> BinaryIO:
    """The file, opened. Raises OSError, ETIMEDOUT for a FIFO that nobody opens for writing.

    A pipe without a name (`<(xz -dc trace.xz)`) has its writer already.
    """
    if not stat.S_ISFIFO(path.stat().st_mode):
        return path.open("rb")
    return os.fdopen(_await_writer(path, WRITER_SECONDS), "rb")


def _await_writer(path: Path, seconds: float) -> int:
    opened: list[int | OSError] = []

    def wait() -> None:
        try:
            opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            opened.append(error)

    # Without a writer only open(2) itself tells one that comes from one that was there: it gets a thread.
    waiting = threading.Thread(target=wait, name="fifo-open", daemon=True)
    waiting.start()
    waiting.join(seconds)
    if waiting.is_alive():
        _end(waiting, path)
        for found in opened:
            if isinstance(found, int):
                os.close(found)
        raise OSError(errno.ETIMEDOUT, f"it is a FIFO, and nobody has written to it for {seconds:g} s")
    (outcome,) = opened
    if isinstance(outcome, OSError):
        raise outcome
    return outcome


def _end(waiting: threading.Thread, path: Path) -> None:
    """Be the writer for a moment. A thread that does not see it ends with the process."""
    for _ in range(_KNOCKS):
        with suppress(OSError):  # ENXIO: it does not wait yet
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        waiting.join(_KNOCK_SECONDS)
        if not waiting.is_alive():
            return
