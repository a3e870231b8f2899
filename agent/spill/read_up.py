"""Up: a range out of G4 for a get that found a mark (agent/pool/read/get.py).

A get asks for one range of one object and waits for it at its own worker, until the deadline of the place.
What is asked for at once is bounded in number and in bytes; a get beyond that is `g4_late` at once. A place
that has not answered in time twice in a row is left alone for a while, so that a dead one costs one wait in
that time."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass
from typing import Final, NamedTuple

from agent.inline.cipher_suites import Place
from agent.pool.counters import MissCause
from agent.pool.format.occupancy import SetPlace
from agent.pool.format.spill_mark import SpillMark, bytes_to_ask, step_bytes
from agent.pool.read.recompute_gate import RecomputeGate
from agent.pool.volume.spill_copies import FoundMark
from agent.pool.volume.volume import Volume
from agent.spill.names import bundle_name
from agent.spill.target import Gone, Target, TargetError

ALONE_SECONDS: Final = 0.5
"""So long a place is left alone after its second late answer in a row, doubled with each further one."""
ALONE_SECONDS_MAX: Final = 8.0
SEEN_MAX: Final = 1 << 15
"""Keys of a volume of which it is remembered that they came up once."""
RETURNS_MAX: Final = 16
"""Values of a volume that wait to be put back to flash, each of a slot at the most."""


@dataclass(slots=True)
class UpCounts:
    """Of one place since the agent's start."""

    asked: int = 0
    late: int = 0
    lost: int = 0
    failed: int = 0
    not_asked: int = 0
    """Too much was under way, the place was left alone, or computing was quicker."""


class Returning(NamedTuple):
    """A value on its way back to flash, sealed as it came. `mark` named it: the ghost of a slot of a set."""

    key: bytes
    place: Place
    sealed: bytes
    set_place: SetPlace
    slot: int
    mark: bytes


class PlaceHealth:
    """What is under way at one place, and whether it is left alone. Safe from any thread."""

    def __init__(self, in_flight: int, memory: int, deadline: float) -> None:
        self.deadline = deadline
        self.counts = UpCounts()
        self._in_flight = in_flight
        self._memory = memory
        self._late_in_a_row = 0
        self._alone_until = 0.0
        self._lock = threading.Lock()

    def is_alone(self, now: float) -> bool:
        """Whether nothing is asked for now."""
        return now < self._alone_until

    def begin(self, size: int, now: float) -> bool:
        """Set a range's memory aside. False: it is not to be asked for."""
        with self._lock:
            if self.is_alone(now) or self._in_flight <= 0 or self._memory < size:
                self.counts.not_asked += 1
                return False
            if self._late_in_a_row > 1:
                self._alone_until = now + self.deadline  # This one is the probe.
            self._in_flight -= 1
            self._memory -= size
            self.counts.asked += 1
            return True

    def set_aside(self, size: int) -> bool:
        """Take memory for a value that waits to go back to flash. False: there is none."""
        with self._lock:
            if self._memory < size:
                return False
            self._memory -= size
            return True

    def answered(self, cause: MissCause | None) -> None:
        """A range came, or its place said in time that it has none."""
        with self._lock:
            self._in_flight += 1
            self._late_in_a_row = 0
            self._alone_until = 0.0
            self.counts.lost += cause is MissCause.G4_LOST

    def did_not_answer(self, now: float, *, failed: bool) -> None:
        """Late, or an error; `ended` follows where the request is still under way."""
        with self._lock:
            self.counts.late += not failed
            self.counts.failed += failed
            self._in_flight += failed
            self._late_in_a_row += 1
            if self._late_in_a_row > 1:
                wait = ALONE_SECONDS * 2.0 ** min(self._late_in_a_row - 2, 8)
                self._alone_until = now + min(ALONE_SECONDS_MAX, wait)

    def ended(self) -> None:
        """A request that was late is under way no longer."""
        with self._lock:
            self._in_flight += 1

    def give_back(self, size: int) -> None:
        """A range's memory is free."""
        with self._lock:
            self._memory += size


class Below:
    """What a volume's gets ask of its place in G4 (`LowerTier`). Safe from any thread."""

    def __init__(
        self,
        volume: Volume,
        pool_id: str,
        target: Target,
        health: PlaceHealth,
        gate: RecomputeGate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`gate` judges by what computing a value again takes; None: the deadline alone does."""
        self._clock = clock
        self._volume = volume
        self._pool_id = pool_id
        self._target = target
        self._health = health
        self._gate = gate
        self._slot_bytes: Final[int] = volume.settings.slot_bytes
        self._step: Final = step_bytes(self._slot_bytes)
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._returns: list[Returning] = []
        self._is_forgotten = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._seen) + len(self._returns)

    def pays(self) -> bool:
        return not self._health.is_alone(self._clock())

    def seconds_to_load(self, size: int) -> float | None:
        return None if self._gate is None else self._gate.seconds_to_load(size)

    def fetch(self, mark: SpillMark) -> memoryview | MissCause:
        health, size, now = self._health, bytes_to_ask(mark, self._slot_bytes), self._clock()
        if self._gate is not None and not self._gate.begin(size, now):
            health.counts.not_asked += 1
            return MissCause.G4_LATE
        came = 0
        try:
            if not health.begin(size, now):
                return MissCause.G4_LATE
            sealed = self._wait(mark, size)
            if isinstance(sealed, MissCause):
                return sealed
            came = size
            return sealed
        finally:
            if self._gate is not None:
                self._gate.end(size, came, self._clock())

    def _wait(self, mark: SpillMark, size: int) -> memoryview | MissCause:
        health = self._health
        name = bundle_name(self._pool_id, self._volume.settings.volume_id, mark.bundle)
        asked: Future[bytes] | None = None
        try:
            asked = self._target.fetch(name, mark.step * self._step, size)
            data = asked.result(health.deadline)
        except Gone:
            health.answered(MissCause.G4_LOST)
            health.give_back(size)
            return MissCause.G4_LOST
        except NotInTime:
            health.did_not_answer(self._clock(), failed=False)
            assert asked is not None

            def is_over(_: "Future[bytes]") -> None:
                health.ended()
                health.give_back(size)

            self._target.give_up(asked)
            asked.add_done_callback(is_over)
            return MissCause.G4_LATE
        except TargetError:
            health.did_not_answer(self._clock(), failed=True)
            health.give_back(size)
            return MissCause.G4_LATE
        health.answered(None)
        if len(data) != size:
            # The last item of a bundle, or one that was cut short. What was set aside is what is given back.
            data = data[:size].ljust(size, b"\0")
        return memoryview(data)

    def release(self, sealed: memoryview) -> None:
        self._health.give_back(len(sealed))

    def served(self, pseudonym: bytes, key: bytes, sealed: memoryview, found: FoundMark) -> None:
        with self._lock:
            if self._is_forgotten:
                return  # The volume was erased during the get; nobody would give the memory back.
            if pseudonym not in self._seen:
                self._seen[pseudonym] = None
                if len(self._seen) > SEEN_MAX:
                    self._seen.popitem(last=False)
            elif len(self._returns) < RETURNS_MAX and self._health.set_aside(len(sealed)):
                del self._seen[pseudonym]
                place, set_place, slot, mark = found
                self._returns.append(Returning(key, place, bytes(sealed), set_place, slot, mark))

    def next_return(self) -> Returning | None:
        """A value that goes back to flash."""
        with self._lock:
            if not self._returns:
                return None
            found = self._returns.pop(0)
        self._health.give_back(len(found.sealed))
        return found

    def forget(self) -> None:
        """The volume was erased."""
        with self._lock:
            self._is_forgotten = True
            self._seen.clear()
            left, self._returns = self._returns, []
        for each in left:
            self._health.give_back(len(each.sealed))
