"""A request that has several ways to go: which it takes, how long each gets, and when it may go again.

    read    lost, refused by the path (ANA), or not answered in its share of the time: sent again, by the next
    write   refused by the path: sent again. Lost or not answered: never, for it may still land (fence.py)

A path that left a request alone goes behind the others for a while. Without I/O; the channel
(remote/channel.py) send.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from agent.inline.scatter import Buffer
from agent.remote.enclosure import Enclosure, Route
from agent.remote.fence import GIVEN_UP_SECONDS, LOST_SECONDS, Fence, GivenUp, Owner
from nvmeof.host.command import Command
from nvmeof.transport import HostQueue
from nvmeof.wire.status import Status

PATH_STATUSES: Final = frozenset(
    {
        Status.COMMAND_SEQUENCE_ERROR,
        Status.ABORTED_SQ_DELETION,
        Status.TRANSIENT_TRANSPORT_ERROR,
        Status.INTERNAL_PATH_ERROR,
        Status.ANA_PERSISTENT_LOSS,
        Status.ANA_INACCESSIBLE,
        Status.ANA_TRANSITION,
        Status.CONTROLLER_PATHING_ERROR,
    }
)
"""A command that ends with one of these is over, and another path may serve it (NVMe Base 2.0, 4.2.3.4).

The first three are what a controller says that is being reset or shut down (3.6 and 3.7 there, and 4.2.3.1).
"""
SHARE: Final = 0.5
"""Of the time that is left, what a path gets to answer a read that has another."""
SHARE_LEAST_SECONDS: Final = 0.01
SHARE_MOST_SECONDS: Final = 0.5

Build: TypeAlias = Callable[[Route, HostQueue, int], Sequence[Command]]
"""The commands of a request for a way, without the bytes at its beginning that have come already."""


class Request:
    """A write, or a read that can go by another path: how to build it anew, and where it was sent."""

    __slots__ = (
        "at", "build", "epoch", "is_read", "lba_bytes", "namespace", "nguid", "parts", "size", "tried"
    )  # fmt: skip

    # `lba_bytes` 0: its bytes come all together, as those of a key.

    def __init__(
        self,
        namespace: int,
        nguid: bytes,
        at: int,
        size: int,
        lba_bytes: int,
        build: Build | None,
        *,
        is_read: bool,
        parts: Sequence[Buffer] = (),
    ) -> None:
        """`build` None: it is a write of `parts`, and is seldom built anew."""
        self.namespace = namespace
        self.nguid = nguid
        self.at = at
        self.size = size
        self.lba_bytes = lba_bytes
        self.build = build
        self.parts = parts
        self.is_read = is_read
        self.tried: list[Enclosure] = []
        self.epoch = -1
        """Of the session whose queue it was sent by last."""

    def has_another(self, ways: Sequence[Route]) -> bool:
        """Whether one of the ways has not been tried."""
        return any(way.enclosure not in self.tried for way in ways)

    def stops_here(self, now: float, deadline: float) -> float:
        """Until when the present path may take for a read, where there is another."""
        share = min(SHARE_MOST_SECONDS, max(SHARE_LEAST_SECONDS, (deadline - now) * SHARE))
        return min(deadline, now + share)

    def may_go_again(self, commands: Sequence[Command]) -> bool:
        """Whether the commands that were sent can do no harm any more."""
        if self.is_read:
            return True
        return all(command.done and not command.lost for command in commands)

    def resumes_at(self, received: int) -> int:
        """Bytes that need not come again: whole blocks, out of which the reader may have used some.

        The last block comes again in any case, so that there is an answer.
        """
        if not self.is_read or not self.lba_bytes or not self.size:
            return 0
        return min(received, self.size - 1) // self.lba_bytes * self.lba_bytes

    def over(self, commands: Sequence[Command], fence: Fence, now: float, owner: Owner | None = None) -> None:
        """It goes by no path any more: a write of unknown fate puts a fence around its place. `owner` has the
        queue that sent it."""
        if self.is_read:
            return
        if any(command.lost for command in commands):
            fence.put_up(self.nguid, self.at, self.size, now + LOST_SECONDS, now)
        elif given_up := [command for command in commands if command.cid >= 0 and not command.done]:
            at_its_queue = GivenUp(given_up, self.tried[-1], self.epoch, owner)
            fence.put_up(self.nguid, self.at, self.size, now + GIVEN_UP_SECONDS, now, at_its_queue)


def in_order(ways: Sequence[Route], now: float) -> Sequence[Route]:
    """The ways, with those that are avoided behind the others."""
    if all(way.enclosure.avoided_until <= now for way in ways):
        return ways
    return sorted(ways, key=lambda way: max(0.0, way.enclosure.avoided_until - now))


def left_by_its_path(commands: Sequence[Command]) -> bool:
    """Whether a command ended because of its path."""
    return any(command.done and path_failed(command) for command in commands)


def path_failed(command: Command) -> bool:
    """Whether a command ended because of its path, which says nothing of the namespace."""
    return command.lost or command.status in PATH_STATUSES
