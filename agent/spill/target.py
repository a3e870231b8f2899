"""What a place in G4 can do: store an object once, give a range of it, delete it, list names.

Every call but `fetch` blocks; a spill thread makes it. To make a target asks nothing of the place, which may
hang or be missing. `fetch` answers by a future, and many may be under
way. Objects are sealed: a target is trusted with nothing but to be there."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple


class TargetError(Exception):
    """The target does not do it, now or at all: the text says why, for a log line and `g35 spill status`."""


class Gone(TargetError):
    """There is no such object."""


class Taken(TargetError):
    """There is an object of that name, and it stays."""


class Stored(NamedTuple):
    """An object as a listing shows it: name and bytes."""

    name: str
    size: int
    unfinished_since: float | None = None
    """Of a file that is being written, or was: its last write, in seconds since the epoch."""


class Target(ABC):
    """One folder or bucket."""

    @abstractmethod
    def check(self) -> None:
        """Whether it can be used at all, before anything else is asked. Raises TargetError."""

    @abstractmethod
    def put(self, name: str, data: memoryview) -> None:
        """Store an object whole, or not at all. Raises Taken and TargetError."""

    @abstractmethod
    def fetch(self, name: str, offset: int, size: int) -> "Future[bytes]":
        """A range of an object, shorter where the object ends. The future raises Gone and TargetError."""

    def give_up(self, asked: "Future[bytes]") -> None:
        """Nobody waits for a range any more; its future is done soon."""
        asked.cancel()

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object; it may be gone already. Raises TargetError."""

    @abstractmethod
    def names(self, prefix: str) -> Iterator[Stored]:
        """The objects whose names begin with a prefix that ends with a slash. Raises TargetError, also
        between two of them."""

    @abstractmethod
    def close(self) -> None:
        """End its threads; nobody calls it any more."""
