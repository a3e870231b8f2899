"""What a client's thread does after it has looked a name up, so that its next call finds half done already.

A thread that opens what it looks up has the chunks held with the lookup, in the same round trip. One that
creates what it did not find has the directories of the first chunk read. A thread that only asks (whether a
file is there) pays for neither. Nothing depends on a guess but its cost.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from agent.fs.interface import Caller
from agent.fs.shared.manifest import Manifest
from agent.fs.shared.unnamed import UnnamedChunks
from agent.fs.shared.volume import Hold
from agent.host_os.per_user_bounds import Holder
from agent.pool.steps import IoChannel, Steps

THREADS_MAX: Final = 1024
KNOWN_MAX: Final = 8192
KNOWN_BYTES_MAX: Final = 1024
"""A longer manifest is not remembered."""
READY_MAX: Final = 64
READY_SECONDS: Final = 1.0

Thread = tuple[Holder, int]
Place = tuple[str, bytes]


class _Habit:
    __slots__ = ("creates", "found", "missed", "opens", "place", "removes")

    def __init__(self) -> None:
        self.opens = self.creates = self.removes = False
        self.found: int | None = None
        """The node that it looked up last, and has not opened."""
        self.place: Place | None = None
        """Its name."""
        self.missed: Place | None = None
        """The name that it did not find, and has not created."""


class Habits:
    """The habits of the threads that use one door, and the answers that are ready for them. Safe from any
    thread."""

    def __init__(self, upkeep: UnnamedChunks | None = None) -> None:
        """`upkeep` comes by for what is held, where no lookup does."""
        self._upkeep: Final = UnnamedChunks() if upkeep is None else upkeep
        self._threads: OrderedDict[Thread, _Habit] = OrderedDict()
        self._known: OrderedDict[Place, tuple[bytes, Manifest | None]] = OrderedDict()
        """The identity of what a name leads to, and what that is where it is short enough."""
        self._ready: OrderedDict[int, tuple[float, Sequence[Hold]]] = OrderedDict()
        self._prepared: OrderedDict[Place, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def opens(self, caller: Caller) -> bool:
        return self._of(caller).opens

    def creates(self, caller: Caller) -> bool:
        return self._of(caller).creates

    def found(self, caller: Caller, ino: int, place: Place) -> None:
        """A lookup has found a file. The kernel may look a name up twice, and be told of two nodes."""
        habit = self._of(caller)
        if habit.found is not None:
            habit.opens = False
            habit.removes = habit.removes and habit.place == place
        habit.found, habit.place = ino, place

    def missed(self, caller: Caller, place: Place) -> None:
        """A lookup has found nothing."""
        habit = self._of(caller)
        if habit.missed is not None:
            habit.creates = False
        habit.missed = place

    def opened(self, caller: Caller, ino: int) -> None:
        habit = self._of(caller)
        habit.opens = habit.opens or habit.found == ino
        habit.removes, habit.found = False, None

    def listed(self, caller: Caller) -> None:
        """It lists a folder, and may remove what it finds there: also names of files that are gone."""
        habit = self._of(caller)
        habit.removes, habit.found = True, None

    def removes(self, caller: Caller) -> bool:
        """Whether it has listed a folder, and since then removed each file that it has looked up."""
        return self._of(caller).removes

    def removed(self, caller: Caller) -> None:
        self._of(caller).found = None

    def created(self, caller: Caller, place: Place) -> None:
        habit = self._of(caller)
        habit.creates = habit.creates or habit.missed == place
        habit.missed = None

    def renamed(self, caller: Caller) -> None:
        """The lookups before a rename say nothing of what follows others."""
        habit = self._of(caller)
        habit.found = habit.missed = None

    def _of(self, caller: Caller) -> _Habit:
        thread = (caller.holder, caller.pid)
        with self._lock:
            habit = self._threads.get(thread)
            if habit is None:
                habit = self._threads[thread] = _Habit()
                if len(self._threads) > THREADS_MAX:
                    self._threads.popitem(last=False)
            else:
                self._threads.move_to_end(thread)
            return habit

    # -- what is known of names, a hint ----------------------------------------------------------

    def know(self, volume: str, manifest: Manifest) -> None:
        if manifest.is_folder:
            return
        place = (volume, manifest.path)
        known = None if manifest.size > KNOWN_BYTES_MAX else manifest
        with self._lock:
            self._known[place] = manifest.identity, known
            self._known.move_to_end(place)
            if len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)

    def known(self, volume: str, path: bytes) -> Manifest | None:
        return self._known.get((volume, path), (b"", None))[1]

    def leads_to(self, volume: str, path: bytes) -> bytes | None:
        """The identity of what was found or stored under a path last, which may be out of date."""
        return self._known.get((volume, path), (None, None))[0]

    def known_or(self, volume: str, path: bytes, found: Manifest | None) -> Manifest | None:
        """What is known of a path; `found`, if that is known to be there and is too long to be remembered."""
        identity, known = self._known.get((volume, path), (b"", None))
        return found if found is not None and found.identity == identity else known

    def looked_up(self, volume: str, path: bytes, before: bytes | None, found: Manifest | None) -> None:
        """Know what a lookup has found, or that it has found nothing. `before`: what the name led to when it
        began; where that has changed since, a process has stored something, which the lookup may not have
        seen."""
        if self.leads_to(volume, path) != before:
            return
        if found is None:
            self.know_no_more(volume, path)
        else:
            self.know(volume, found)

    def know_no_more(self, volume: str, path: bytes) -> bytes | None:
        """The identity of what was known."""
        with self._lock:
            return self._known.pop((volume, path), (None, None))[0]

    # -- what is ready --------------------------------------------------------------------------

    def hold(self, ino: int, holds: Sequence[Hold], now: float) -> None:
        """The chunks of a file are held for the one who opens it now."""
        with self._lock:
            before = self._ready.pop(ino, None)
            self._ready[ino] = (now + READY_SECONDS, holds)
            self._upkeep.add(self)
        if before is not None:
            for each in before[1]:
                each.let_go()
        self.expire(now)

    def expire(self, now: float) -> None:
        """Let go of what nobody has come for: with each lookup, and by upkeep."""
        dropped: list[tuple[float, Sequence[Hold]]] = []
        with self._lock:
            while self._ready and (len(self._ready) > READY_MAX or next(iter(self._ready.values()))[0] < now):
                dropped.append(self._ready.popitem(last=False)[1])
        for _, gone in dropped:
            for each in gone:
                each.let_go()

    def name_stale(self, channel: IoChannel) -> Steps[None]:
        """As a file whose chunks wait: a program that looked files up does nothing more."""
        self.expire(channel.now())
        with self._lock:
            if not self._ready:
                self._upkeep.discard(self)
        yield from ()

    def take_held(self, ino: int, now: float) -> Sequence[Hold] | None:
        with self._lock:
            until, holds = self._ready.pop(ino, (0.0, ()))
        if until >= now:
            return holds
        for each in holds:
            each.let_go()
        return None

    def drop_held(self, ino: int) -> None:
        """Nobody opens this node any more."""
        if ino in self._ready:
            self.take_held(ino, float("inf"))

    def prepare(self, place: Place, identity: bytes) -> None:
        with self._lock:
            self._prepared[place] = identity
            if len(self._prepared) > READY_MAX:
                self._prepared.popitem(last=False)

    def take_prepared(self, place: Place) -> bytes | None:
        """The identity for which the first directories were read: it is used once."""
        with self._lock:
            return self._prepared.pop(place, None)
