"""The screen of `g35 top`: the health stands, and what is below it scrolls by the keys of less(1)."""

import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console, Group
from rich.segment import Segment, Segments
from rich.text import Text

KEYS_BYTES_MAX = 256
"""Of keys that are looked at together."""
REST_LINES_LEAST = 6
"""Below the health, where the screen has them: a table's title, its head and some rows."""

_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_LINES = {b"\x1b[A": -1, b"\x1bOA": -1, b"k": -1, b"\x1b[B": 1, b"\x1bOB": 1, b"j": 1, b"\n": 1, b"\r": 1}
_PAGES = {b"\x1b[5~": -1, b"b": -1, b"\x1b[6~": 1, b" ": 1, b"f": 1}
_TOP = frozenset({b"g", b"\x1b[H", b"\x1bOH", b"\x1b[1~"})
_BOTTOM = frozenset({b"G", b"\x1b[F", b"\x1bOF", b"\x1b[4~"})
_END = frozenset({b"q", b"Q"})


@dataclass
class Scroll:
    """Which lines of the part that scrolls are on the screen: `room` of them, from `first` on."""

    first: int = 0
    room: int = 1

    def typed(self, keys: bytes) -> bool:
        """Follow some keys; whether one of them ends the program. `fitted` keeps `first` within the lines."""
        for key in _KEY.findall(keys):
            if key in _END:
                return True
            if key in _TOP:
                self.first = 0
            elif key in _BOTTOM:
                self.first = sys.maxsize
            else:
                self.first = max(0, self.first + _LINES.get(key, 0) + self.room * _PAGES.get(key, 0))
        return False


def fitted(health: Group, rest: Group, console: Console, scroll: Scroll, *, has_keys: bool = False) -> Group:
    """As many lines as the screen has: the health, then those of the rest where it is scrolled to.

    Where lines are left out, the last line says how many, and which keys show them.
    """
    top, lines = _lines(health, console), _lines(rest, console)
    if len(top) + len(lines) <= console.height:
        scroll.first = 0
        return Group(health, rest)
    # A health that is higher than the screen is cut at its end, where it is least urgent.
    top = top[: console.height - 1]
    room = scroll.room = console.height - 1 - len(top)
    scroll.first = max(0, min(scroll.first, len(lines) - room))
    shown = lines[scroll.first : scroll.first + room]
    above, below = scroll.first, len(lines) - scroll.first - len(shown)
    said = f"… {above} lines above, {below} below"
    said += ": arrows, space and b scroll, q ends" if has_keys and room else ": g35 status shows all"
    segments = [segment for line in (*top, *shown) for segment in (*line, Segment.line())]
    return Group(Segments(segments), Text(said, no_wrap=True, overflow="crop"))


def _lines(shown: Group, console: Console) -> list[list[Segment]]:
    return console.render_lines(shown, console.options, pad=False)


@contextlib.contextmanager
def typed_keys(descriptor: int = 0) -> Iterator[Callable[[float], bytes] | None]:
    """A function that waits for keys of a terminal for some seconds; b"" where none came. The keys are not
    echoed meanwhile. None where the descriptor, standard input, is of no terminal."""
    try:
        before = termios.tcgetattr(descriptor)
    except (termios.error, OSError):
        yield None
        return

    def wait(seconds: float) -> bytes:
        if not select.select([descriptor], [], [], seconds)[0]:
            return b""
        return os.read(descriptor, KEYS_BYTES_MAX) or b"q"  # the terminal is gone

    tty.setcbreak(descriptor)
    try:
        yield wait
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def follow_keys(
    keys: Callable[[float], bytes], scroll: Scroll, redraw: Callable[[], None], seconds: float
) -> bool:
    """Scroll by the keys that come within so many seconds; whether one of them ends the program."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if typed := keys(left):
            if scroll.typed(typed):
                return True
            redraw()
    return False
