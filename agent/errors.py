"""What may go wrong, said so that the reader knows whose turn it is.

Every error that g35 raises on purpose is a `G35Error`. It carries one sentence that says what
happened, one that says what to do about it, and whose fault it is. The command line prints the first
as `error:` and the second as `hint:`; nobody who mistyped a file name gets to see a traceback. An
exception that is no `G35Error` is a bug by definition.

errno appears only at the edge (agent/fs), NVMe status only in nvmeof/.
"""

import difflib
import enum
from collections.abc import Iterable, Mapping
from typing import Any, Final

_NEAR: Final = 0.62
"""Of difflib's ratio: `tpc` is near to `tcp`, and `write` is not near to `suite`."""

NAME_SHOWN_MAX: Final = 80
"""Characters of a name that a message shows."""

_EXPECTED: Final[Mapping[str, str]] = {
    "missing": "is required",
    "string_type": "should be text, in quotes",
    "path_type": "should be a path, in quotes",
    "int_type": "should be a whole number",
    "int_parsing": "should be a whole number",
    "int_parsing_size": "has too many digits",
    "int_from_float": "should be a whole number",
    "float_type": "should be a number",
    "float_parsing": "should be a number",
    "bool_type": "should be true or false",
    "bool_parsing": "should be true or false",
    "tuple_type": "should be a list, in square brackets",
    "dict_type": "should be a table",
    "model_type": "should be a table",
    "model_attributes_type": "should be a table",
    "string_pattern_mismatch": "does not have the form that it should have",
}
"""What a value should be, by pydantic's type of the error: its own words are of Python, not of TOML."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` where a known word is near to what was typed, whatever its case, for the end of a
    sentence."""
    words = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(word.casefold(), words, 1, _NEAR)
    return f" (did you mean {words[near[0]]}?)" if near else ""


def expected_there(problem: Mapping[str, Any]) -> str:
    """A row of pydantic's `ValidationError.errors()` in words for the author of the document."""
    if words := _EXPECTED.get(problem["type"]):
        return words
    if problem["type"] == "too_long":
        return f"should have at most {problem['ctx']['max_length']} entries"
    text = str(problem["msg"])
    for start in ("Value error, ", "Input ", "String "):
        text = text.removeprefix(start)
    return text


def printable(text: str) -> str:
    """The words of a peer for a terminal: control characters and halves of characters as numbers."""
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text)


def shown_name(name: str) -> str:
    """A name out of a user's file for a message: for a terminal, and of a length that people read."""
    shown = printable(name[:NAME_SHOWN_MAX])
    return shown if len(name) <= NAME_SHOWN_MAX else f"{shown}... ({len(name):,} characters)"


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
