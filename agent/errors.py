"""What may go wrong, said so that the reader knows whose turn it is.

Every error that g35 raises on purpose is a `G35Error`. It carries one sentence that says what
happened, one that says what to do about it, and whose fault it is. The command line prints the first
as `error:` and the second as `hint:`; nobody who mistyped a file name gets to see a traceback. An
exception that is no `G35Error` is a bug by definition.

errno appears only at the edge (agent/fs), NVMe status only in nvmeof/.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` where a known word is near to what was typed, whatever its case, for the end of a
    sentence."""
    words = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(word.casefold(), words, 1)
    return f" (did you mean {words[near[0]]}?)" if near else ""


def printable(text: str) -> str:
    """The words of a peer for a terminal: control characters and halves of characters as numbers."""
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text)


class Fault(enum.Enum):
    """Whose fault an error is, and so who can do something about it."""

    OURS = "ours"
    """What was asked of g35 cannot be: arguments, configuration, a key that does not fit."""
    PEER = "the peer's"
    """The other end of a connection broke the rules of the protocol."""
    WORLD = "the world's"
    """Nobody broke a rule: a disk is full, a cable is out, a process was killed."""
    BUG = "a bug"
    """g35 contradicts itself; please report it."""


class G35Error(Exception):
    """Base of all errors raised on purpose. `advice` may be empty; `message` never is."""

    fault = Fault.WORLD

    def __init__(self, message: str, advice: str = "", *, fault: Fault | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        if fault is not None:
            self.fault = fault


class UserError(G35Error):
    """What was asked for cannot be done as it was asked for."""

    fault = Fault.OURS


class ConfigError(UserError):
    """The configuration, or a file that it names, is not usable."""


class PeerError(G35Error):
    """The other end answered with something that its specification does not allow."""

    fault = Fault.PEER


class BugError(G35Error):
    """An invariant of ours does not hold."""

    fault = Fault.BUG
