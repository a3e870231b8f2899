"""The send queue of a queue pair as its user sees it: room, order, and completions for as few as possible.

Work goes in as chains (a bind and the SEND behind it; a WRITE and the SEND behind it) and comes out in order.
A device frees the places of unsignaled work only with a later signaled completion, so at least one of every
`SIGNAL_EVERY` chains is signaled, and what does not fit into `room` waits here. Since completions of one
send queue come in order, a deque of what is out tells which chain each of them ends.

A chain may bring a receive with it, which is posted just before the chain is: the peer learns by the chain
that it may send once more, and until then it cannot. So what waits is bounded by the receives of the queue.

Bound: `room` work requests are posted, and as many chains wait as the owner has commands.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from nvmeof.rdma.work import Receive, Work

SIGNAL_EVERY: Final = 8


class SendQueue:
    """`put` chains; the transport posts what `take` gives and says `completed` for each completion."""

    def __init__(self, room: int) -> None:
        if room < 4 * SIGNAL_EVERY:
            raise ValueError(f"a send queue of {room} could fill up with nothing signaled")
        self._room = room
        self._ready: list[Work] = []
        self._receives: list[Receive] = []
        self._waiting: deque[tuple[tuple[Work, ...], Receive | None, Callable[[], None] | None]] = deque()
        # (work requests, signaled, what to do when it is through) of each chain that is posted.
        self._out: deque[tuple[int, bool, Callable[[], None] | None]] = deque()
        self._posted = 0
        self._unsignaled = 0

    @property
    def signal_due(self) -> bool:
        """The next chain's last work request is to be signaled."""
        return self._unsignaled + 1 >= SIGNAL_EVERY

    def put(
        self, *chain: Work, receive: Receive | None = None, then: Callable[[], None] | None = None
    ) -> None:
        """Post a chain when there is room, and `receive` before it. `then` is called when it is through."""
        self._unsignaled = 0 if chain[-1].signaled else self._unsignaled + 1
        if self._waiting or self._posted + len(chain) > self._room:
            self._waiting.append((chain, receive, then))
        else:
            self._post(chain, receive, then)

    def _post(
        self, chain: tuple[Work, ...], receive: Receive | None, then: Callable[[], None] | None
    ) -> None:
        self._posted += len(chain)
        if receive is not None:
            self._receives.append(receive)
        self._out.append((len(chain), chain[-1].signaled, then))
        self._ready.extend(chain)

    def take(self) -> list[Work]:
        """What to post now, in order."""
        ready, self._ready = self._ready, []
        return ready

    def take_receives(self) -> list[Receive]:
        """Receives to post before what `take` gives."""
        receives, self._receives = self._receives, []
        return receives

    @property
    def pending(self) -> bool:
        return bool(self._ready)

    @property
    def idle(self) -> bool:
        """Everything that was put is known to be through."""
        return not self._out and not self._waiting

    def completed(self) -> None:
        """A signaled work request has completed, and with it everything before it."""
        while self._out:
            count, signaled, then = self._out.popleft()
            self._posted -= count
            if then is not None:
                then()
            if signaled:
                break
        while self._waiting and self._posted + len(self._waiting[0][0]) <= self._room:
            self._post(*self._waiting.popleft())

    def abandon(self) -> None:
        """The queue pair is gone: everything is through, one way or the other."""
        for _, _, then in self._out:
            if then is not None:
                then()
        for _, _, then in self._waiting:
            if then is not None:
                then()
        self._out.clear()
        self._waiting.clear()
        self._ready.clear()
        self._receives.clear()
        self._posted = 0
