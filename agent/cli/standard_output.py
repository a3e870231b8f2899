"""Standard output that outlives its reader: what a verb does, and its exit code, are not the reader's matter.

`g35 doctor | head -1` ends as doctor does, whether `head` left before all was written or after it. Verbs
whose output is all their work ask `reader_has_left` between two pieces, and end there.
"""

import contextlib
import io
import os
import stat
import sys
from typing import Any

from agent.errors import UserError


class _Pipe(io.FileIO):
    """The descriptor of standard output. From the moment that nobody reads it, it is /dev/null."""

    reader_left = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)  # None of a pipe that does not block and is full, which io knows
        except BrokenPipeError:
            self.reader_left = True
            discard_output(self.fileno())
            return memoryview(data).nbytes


def discard_output(descriptor: int) -> None:
    """Make /dev/null of a descriptor: nothing that is written to it fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(nowhere, descriptor)
    finally:
        os.close(nowhere)


def outlive_readers() -> None:
    """For the console script. Raises UserError where standard output is closed: the next file that is opened
    would have its number, and be written to."""
    out = sys.stdout
    if out is None:
        raise UserError("standard output is closed", "write >/dev/null where nobody is to read it")
    kind = os.fstat(out.fileno()).st_mode
    if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):
        pipe = io.BufferedWriter(_Pipe(out.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(
            pipe, encoding=out.encoding, errors=out.errors, line_buffering=bool(out.line_buffering)
        )


def flush_output() -> None:
    """Write what is left, while an error can still be told. Raises OSError once: Python tries again at its
    end, and would tell the error in its own words."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            discard_output(sys.stdout.fileno())
        raise


def reader_has_left() -> bool:
    """Whether what was written last found nobody who reads it."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, _Pipe) and raw.reader_left
