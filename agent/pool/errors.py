"""Why a put ended without its value being stored: by whose fault, and whether it may pass."""

from typing import Final

from agent.pool.counters import MissCause

IN_DOUBT: Final = "the directory of its set comes damaged from the enclosure"


class PutRefused(Exception):
    """The value was not stored. `cause` says whether the enclosures are to blame; None: no room.

    `passes`: there may be room again once an enclosure that is away is back.
    """

    def __init__(self, why: str, cause: MissCause | None = None, passes: bool = False) -> None:
        super().__init__(why)
        self.cause = cause
        self.passes = passes


class ReplacedMeanwhile(PutRefused):
    """The key has another value than those that this one may take the place of."""


class BadPut(Exception):
    """The caller's fault: a length that does not fit, or units out of shape."""


class TooLong(BadPut):
    """The value does not fit the volume's slots, or the length that was announced."""


class PutElsewhere(Exception):
    """This process of the agent does not store the value now; another does."""
