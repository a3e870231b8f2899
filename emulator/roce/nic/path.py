"""Paths to peers: addresses in the form that the ICRC covers, prepared once."""

from collections.abc import Callable

from emulator.roce.nic.verbs import ROCE_PORT, Address
from emulator.roce.wire.flow import flow_of


class Path:
    """The way to one address. `numbered` says that segment i of a burst travels with IP identification i.

    `budget` bounds the bytes that all connections to that address have under way: they share one socket
    buffer. A connection that finds the budget used up waits in `_blocked` (once) until a peer answers.
    """

    __slots__ = ("_blocked", "budget", "destination", "flow", "in_flight", "ip", "numbered")

    def __init__(self, own: str, ip: str, numbered: bool, budget: int) -> None:
        self.ip = ip
        self.destination = Address(ip, ROCE_PORT)
        self.flow = flow_of(own, ip, ROCE_PORT)
        self.numbered = numbered
        self.budget = budget
        self.in_flight = 0
        self._blocked: dict[Callable[[], None], None] = {}

    def wait(self, wake: Callable[[], None]) -> None:
        """Call `wake` at the next answer."""
        self._blocked[wake] = None

    def wake(self) -> None:
        """An answer has come: connections that wait may look again."""
        blocked, self._blocked = self._blocked, {}
        for wake in blocked:
            wake()


class Share:
    """Bytes that one connection has under way, a part of its path's `in_flight`."""

    __slots__ = ("_path", "_size")

    def __init__(self) -> None:
        self._path: Path | None = None
        self._size = 0

    def hold(self, path: Path | None, size: int) -> None:
        """It is `size` bytes now, on `path`."""
        before, previous = self._path, self._size
        self._path, self._size = path, size
        if before is path and size >= previous:
            if path is not None:
                path.in_flight += size - previous
            return
        if before is not None:
            before.in_flight -= previous
        if path is not None:
            path.in_flight += size
        if before is not None:
            before.wake()
