"""Operations that need the fabric are *steps*: generators that submit I/O and yield what they wait for.

Read this before anything else in agent/. An operation such as `Volume.get` never blocks and owns no
socket. It is handed a *channel* (below), submits reads and writes to it, and yields a `Wait` or an
`Acquire` whenever it cannot go on; its driver resumes it with the answer. So the same code runs

* in a worker thread, which drives it by waiting on its own queue (agent/remote/channel.py), and
* in the simulator, which drives thousands of them in virtual time (tests/sim).

What this replaced: `async def` throughout. Measured, an event loop with hand-over to threads served a
third of what a thread does that runs one request to completion, and the hot path has no use for more
than one request in flight per thread. The kernel hands requests to as many threads as there are.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Final, Protocol, TypeAlias, TypeVar, cast

from agent.errors import G35Error
from agent.inline.scatter import Buffer
from agent.pool.counters import Tally

T = TypeVar("T")
U = TypeVar("U")


class Pending(Protocol):
    """One read or write under way at an enclosure."""

    @property
    def done(self) -> bool:
        """The last of it has arrived, or it has failed; see `fault`."""

    @property
    def received(self) -> int:
        """Bytes of a read that have arrived so far, from its start and without a hole."""

    @property
    def fault(self) -> str | None:
        """Why it failed, in a few words for a log line; None while under way and after success."""

    @property
    def unreachable(self) -> bool:
        """It failed because there is no way to the enclosure, rather than by a status of its own."""


class IoChannel(Protocol):
    """A worker's ways to the namespaces of the pool: its own queues, shared with nobody.

    `namespace` is an index into the pool map. `offset` and all lengths are bytes and multiples of the
    namespace's LBA size. Submitting never blocks and never raises for the peer's sake: what cannot be
    sent is a `Pending` that is done with a fault.
    """

    def read(self, namespace: int, offset: int, into: memoryview, *, more: bool = False) -> Pending:
        """`more`: another read or write to the namespace follows at once, and may take this one along."""

    def read_many(self, reads: Sequence["Read"]) -> Sequence[Pending]:
        """As `read` of each, in their order; those of one namespace by one send."""

    def arrived(self, pendings: Sequence[Pending], first: int) -> int:
        """The number of the first of them, from `first` on, that has not arrived, or not well. The answers
        before it are counted as a `Wait` would."""

    def write(self, namespace: int, offset: int, parts: Sequence[Buffer], *, more: bool = False) -> Pending:
        """`more`: as of `read`."""

    def write_many(self, writes: Sequence["Write"]) -> Sequence[Pending]:
        """As `write` of each, in their order; those of one namespace by one send."""

    def flush(self, namespace: int) -> Pending: ...

    def unflushed(self, namespace: int) -> int | None:
        """None where no write is to be flushed; else a mark, to be asked for before the flush is sent."""

    def flushed(self, namespace: int, mark: int, flush: Pending) -> None:
        """The flush was answered well (agent/pool/write/flush_tracking.py)."""

    def written(self) -> int:
        """The number of the last write of this agent, to whichever namespace; they are numbered through."""

    def is_unflushed(self, namespace: int, first: int, last: int) -> bool:
        """Whether a flush is still to follow one of the writes there from number `first` to `last`."""

    def doubtful(self, namespace: int) -> int:
        """The number of the last write there that may be lost, though a flush was answered well after it."""

    def abandon(self, pending: Pending) -> None:
        """Give up on it: from now on nothing is written into its buffer, whenever the answer comes."""

    def took(self, pending: Pending) -> None:
        """It is done, and nobody has waited for it: count the answer as a `Wait` would."""

    def receive_buffer(self, size: int) -> memoryview:
        """`size` bytes to receive into, this worker's own and good until the operation ends."""

    def send_buffer(self, size: int) -> memoryview:
        """`size` bytes to seal into, this worker's own and good until the operation ends."""

    def queue_depth(self) -> int:
        """Commands that each of its queues takes now. Those that were given up have their places until they
        are answered; half of a queue is counted as free all the same, for others of its enclosure."""

    def trusts(self, namespace: int) -> bool:
        """Whether new values should go there: it has not lately been slower or less true than its peers."""

    def is_local(self, namespace: int) -> bool:
        """Whether it is a device of this machine: no fabric lies between."""

    def tally(self, volume: str) -> Tally:
        """This worker's counters for a volume; for the fabric as a whole under the empty name."""

    def gives_way(self) -> None:
        """The steps under way need not wait to their deadlines where too many workers of their door wait:
        they are resumed with False, as at the deadline. What they ask for may fail at once."""

    def has_patience(self) -> None:
        """The steps under way wait to their deadlines for a namespace that is slow: nobody else has what they
        read. What gets of a cache have found late is not held against them."""

    def waits_for_slow(self) -> None:
        """The same for steps that change a file, where no other place will do: as long as the namespace
        answers somebody once in a second, or has not let two of them wait in vain."""

    def comes_again(self) -> None:
        """The steps under way change nothing, so they may be run once more. They give way where their door
        can put a request aside (agent/fs/doors/parked_requests.py): who runs them gets `GaveWay` then."""

    def now(self) -> float:
        """Seconds on the clock that deadlines are given in; it never goes back."""

    def wall(self) -> float:
        """Seconds since the epoch, for times that are stored."""


Read: TypeAlias = tuple[int, int, memoryview]
"""Namespace, offset, and the buffer that is to be filled."""
Write: TypeAlias = tuple[int, int, Sequence[Buffer]]
"""Namespace, offset, and what is to be there."""


def read_each(channel: IoChannel, reads: Sequence[Read]) -> list[Pending]:
    """`IoChannel.read_many` of a channel that sends each by itself."""
    return _move_each([read[0] for read in reads], lambda at, more: channel.read(*reads[at], more=more))


def write_each(channel: IoChannel, writes: Sequence[Write]) -> list[Pending]:
    """`IoChannel.write_many` of such a channel."""
    return _move_each([write[0] for write in writes], lambda at, more: channel.write(*writes[at], more=more))


def _move_each(namespaces: Sequence[int], send: Callable[[int, bool], Pending]) -> list[Pending]:
    """What `send` makes of each, by its number and `more`; those of one namespace one behind the other."""
    pendings: dict[int, Pending] = {}
    for number, more in in_volleys(list(zip(namespaces, range(len(namespaces)), strict=True))):
        pendings[number] = send(number, more)
    return [pendings[number] for number in range(len(namespaces))]


def take_each(channel: IoChannel, pendings: Sequence[Pending], first: int) -> int:
    """`IoChannel.arrived` of such a channel."""
    while first < len(pendings) and pendings[first].done and pendings[first].fault is None:
        channel.took(pendings[first])
        first += 1
    return first


def in_volleys(places: Sequence[tuple[int, int]]) -> list[tuple[int, bool]]:
    """In which order reads or writes of these places (namespace, offset) leave, by their numbers. With each
    goes whether the next one is of the same namespace (`more`): what goes to one namespace is one send."""
    if len(places) < 2:
        return [(0, False)] * len(places)
    order = sorted(range(len(places)), key=places.__getitem__)
    following = [places[number][0] for number in order[1:]]
    return [
        (number, at < len(following) and following[at] == places[number][0])
        for at, number in enumerate(order)
    ]


class Wait:
    """Resume me with True when `pending` is done or has received `at_least`, with False at `deadline`."""

    __slots__ = ("at_least", "deadline", "pending", "whole")

    def __init__(
        self, pending: Pending, deadline: float, at_least: int | None = None, whole: float | None = None
    ) -> None:
        self.pending: Final = pending
        self.deadline: Final = deadline
        self.at_least: Final = at_least
        self.whole: Final = whole
        """Where this is a slice of a longer wait, which the asker goes on with: that one's deadline. By it
        goes when another path is tried."""


class Acquire:
    """Resume me with True when I hold `lock`, with False at `deadline`."""

    __slots__ = ("deadline", "gives_way", "is_pause", "lock")

    def __init__(
        self, lock: threading.Lock, deadline: float, *, gives_way: bool = False, is_pause: bool = False
    ) -> None:
        self.lock: Final = lock
        self.deadline: Final = deadline
        self.gives_way: Final = gives_way
        """Somebody holds it who may wait for an enclosure: see `IoChannel.gives_way`."""
        self.is_pause: Final = is_pause
        """Nobody lets go of it: its deadline is what is waited for."""


class Held:
    """A lock that was acquired, and that the end of a `with` block releases."""

    __slots__ = ("lock",)

    def __init__(self, lock: threading.Lock) -> None:
        self.lock: Final = lock

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self.lock.release()


Steps: TypeAlias = Generator[Wait | Acquire, bool, T]
Outcome: TypeAlias = T | Steps[T]
"""What an operation may return: its value at once, or the steps that lead to it."""


class Runner(Protocol):
    """Drives steps to their end: the loop that a worker, a test or the simulator brings along."""

    def run(self, steps: Steps[T]) -> T: ...


class GaveWay(Exception):
    """The steps would have held one worker too many of their door, and nothing came of them. Ask for them
    again once another worker has ended its wait."""


class NoRunner:
    """In place of a channel, where nothing has to wait, or none could be had: the caller hears of it."""

    def run(self, steps: Steps[T]) -> T:
        steps.close()
        raise G35Error("this thread has no channel", "see the log, and start the agent again")


_KNOWN: Final[dict[type, bool]] = {}
"""What is known of the types of outcomes, of which a program has as many as it has operations."""


def settle(outcome: Outcome[T], runner: Runner) -> T:
    """The value of an outcome, running its steps where it has any."""
    if is_steps(outcome):
        return runner.run(cast("Steps[T]", outcome))
    return cast(T, outcome)


def is_steps(outcome: object) -> bool:
    """Whether an outcome is the steps that lead to a value. Asked for every request, and an abstract class's
    own answer is dear."""
    kind = type(outcome)
    known = _KNOWN.get(kind)
    if known is None:
        known = _KNOWN[kind] = isinstance(outcome, Generator)
    return known


def beside(first: Steps[T], second: Steps[U]) -> Steps[tuple[T, U]]:
    """Both, in one round trip where each needs one: what `second` asks for is under way while `first` runs.

    They may not use the same buffer of the channel, nor wait for each other. `second` comes to its end also
    where `first` raises.
    """
    found: list[U] = []
    wanted = _advance(second, None, found)
    try:
        one = yield from first
    except GeneratorExit:
        second.close()
        raise
    except BaseException:
        yield from _rest(second, wanted, found)
        raise
    yield from _rest(second, wanted, found)
    return one, found[0]


def _advance(steps: Steps[U], answer: bool | None, found: list[U]) -> Wait | Acquire | None:
    """What they wait for next; None where they have ended, with `found`."""
    try:
        return steps.send(answer)  # type: ignore[arg-type]  # a generator begins with None
    except StopIteration as end:
        found.append(end.value)
        return None


def _rest(steps: Steps[U], wanted: Wait | Acquire | None, found: list[U]) -> Steps[None]:
    while wanted is not None:
        wanted = _advance(steps, (yield wanted), found)
