"""Rebalancing after namespaces joined: values move slowly from their old places to where they belong.

Each agent has one rebalancer, on its upkeep thread, with the bandwidth that the operator gives it
(`pool.rebalance`, bytes a second; one agent of a pool is enough). It walks the directories of the extents
that were there before the join. A misplaced value is copied (migrate.py), and cleared at the old place once
every read that may have missed the copy is over. When a walk finds nothing, the operator may settle the pool
(`g35 pool settle`); then no agent looks at old places any more. Until then it walks again from time to time,
for an agent that learned late of the join may have stored a value at an old place.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.pool.format.directory import DIRECTORY_BYTES
from agent.pool.format.occupancy import SetPlace
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.maintenance.migrate import Migration, Outcome, is_misplaced
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import CachedSet, SlotState
from agent.pool.volume.volume import Found, PoolVolume, Volume, all_sets, in_sets
from agent.pool.write.flush_tracking import flush_written

TURN_SECONDS = 0.25
"""The longest turn, but for one value: upkeep has other work."""
VALUE_SECONDS = 2.0
"""Deadline of one step of a move; nobody waits for it."""
GRACE_SECONDS = 1.0
"""Between copy and clearing, at least; two read deadlines where that is more."""
FOLLOW_SECONDS = 5.0
"""From this agent's news of a join to its first move. The others know of the join by then
(agent/attach/map_watch.py looks once a second), and find moved values. Later where a write may take longer: a
delete that began before the join looks at no new place."""
WAITING_MAX = 256
"""Copies whose old slots have not been cleared yet."""
WALK_AGAIN_SECONDS = 30.0
DIRECTORY_COST = DIRECTORY_BYTES


@dataclass(slots=True)
class Moves:
    """Progress of a rebalancer."""

    values: int = 0
    bytes: int = 0
    """The bytes of copied slots."""
    not_moved: int = 0
    """Tries that ended without a copy: no room, no answer, no proof."""
    walks: int = 0
    sets_walked: int = 0
    """The sets that the present walk has done."""
    sets: int = 0
    """The sets of the earlier extents of all volumes; 0 where nothing has joined."""
    left: int | None = None
    """Values that were still at earlier places when the last whole walk ended, and sets that it could not
    read; None before the first."""


class _Waiting(NamedTuple):
    volume: Volume
    old: Found
    due: float
    written: int
    """The number of the last write before it was copied."""


@dataclass(slots=True, eq=False)
class Rebalancer:
    """See the module's docstring. `rate` in bytes a second; 0 moves nothing. For one thread."""

    _volumes: Sequence[PoolVolume]
    _rate: int
    follow_seconds: float | None = None
    """From a join to the first move; None: FOLLOW_SECONDS, or as long as a write may take."""
    grace_seconds: float = GRACE_SECONDS
    moves: Moves = field(default_factory=Moves)
    _unsettled_since: float | None = None
    _tokens: float = 0.0
    _counted_at: float | None = None
    _walk: Iterator[tuple[Volume, SetPlace]] | None = None
    _at: tuple[Volume, SetPlace] | None = None
    _found: int = 0
    _next_walk: float = float("-inf")
    _waiting: deque[_Waiting] = field(default_factory=deque)

    def turn(self, channel: IoChannel) -> Steps[None]:
        """Work for as long as time and bandwidth allow."""
        now = channel.now()
        earned = 0.0 if self._counted_at is None else (now - self._counted_at) * self._rate
        self._counted_at = now
        # Unused bandwidth is saved up for a second; a single value may be longer than that.
        self._tokens = min(self._tokens + earned, float(self._rate))
        end = now + TURN_SECONDS
        yield from self._clear_due(channel)
        moving = [
            each for each in in_sets(self._volumes) if each.old_placement is not None and not each.erased
        ]
        if not moving or not self._rate:
            self.moves.sets, self._walk, self._at, self._unsettled_since = 0, None, None, None
            return
        if self._unsettled_since is None:
            follow = self.follow_seconds
            if follow is None:
                follow = max(FOLLOW_SECONDS, *(volume.timing.write_deadline for volume in moving))
            self._unsettled_since, self._next_walk, self.moves.left = now, now + follow, None
        self.moves.sets = sum(extent.sets for volume in moving for extent in volume.settings.old_extents)
        while self._tokens > 0 and channel.now() < end and len(self._waiting) < WAITING_MAX:
            if self._at is None and not self._next_set(channel.now(), moving):
                return
            assert self._at is not None
            if (yield from self._look_at(channel, *self._at, end)):
                self._at = None
                self.moves.sets_walked += 1

    def _next_set(self, now: float, moving: list[Volume]) -> bool:
        if self._walk is None:
            if now < self._next_walk:
                return False
            self._walk, self._found, self.moves.sets_walked = all_sets(moving, old=True), 0, 0
        self._at = next(self._walk, None)
        if self._at is None:
            self.moves.walks += 1
            self.moves.left = self._found + len(self._waiting)
            soon = min(2 * self.grace_seconds, WALK_AGAIN_SECONDS)
            self._walk, self._next_walk = None, now + (soon if self._waiting else WALK_AGAIN_SECONDS)
        return self._at is not None

    def _look_at(self, channel: IoChannel, volume: Volume, place: SetPlace, end: float) -> Steps[bool]:
        """Move the misplaced values of a set. False: look again, for time or bandwidth is over."""
        with volume.borrowed_at(place) as (cached,):
            self._tokens -= DIRECTORY_COST
            trouble = yield from volume.load(channel, [cached], channel.now() + VALUE_SECONDS)
            if trouble is not None or cached.directory is None or cached.in_doubt:
                self._found += 1
                return True
            for old in self._misplaced(volume, cached):
                if self._tokens <= 0 or channel.now() >= end or len(self._waiting) >= WAITING_MAX:
                    return False
                if cached.slot_state(old.slot, channel.now()) is not SlotState.NAMED:
                    self._found += 1
                else:
                    yield from self._move(channel, volume, old)
            return True

    def _misplaced(self, volume: Volume, cached: CachedSet) -> list[Found]:
        waiting = {
            (each.old.cached.namespace, each.old.cached.offset, each.old.slot) for each in self._waiting
        }
        with cached.guard:
            assert cached.directory is not None
            entries = list(cached.directory)
        return [
            Found(cached, slot, entry)
            for slot, entry in entries
            if entry.length
            and (cached.namespace, cached.offset, slot) not in waiting
            and is_misplaced(volume, cached, entry.pseudonym)
        ]

    def _move(self, channel: IoChannel, volume: Volume, old: Found) -> Steps[None]:
        size = HEADER_BYTES + volume.codec.padded(old.entry.length)
        self._tokens -= size
        written = channel.written()
        outcome = yield from Migration(volume, channel, old, channel.now() + VALUE_SECONDS).copy()
        if outcome is Outcome.COPIED:
            self.moves.values += 1
            self.moves.bytes += size
            grace = max(self.grace_seconds, 2 * volume.timing.read_deadline)
            self._waiting.append(_Waiting(volume, old, channel.now() + grace, written))
        elif outcome is not Outcome.GONE:
            self.moves.not_moved += 1
            self._found += 1

    def _clear_due(self, channel: IoChannel) -> Steps[None]:
        while self._waiting and self._waiting[0].due <= channel.now():
            volume, old, _, written = self._waiting.popleft()
            if volume.erased:
                continue
            if volume.settings.kind == "files":
                durable = yield from self._is_on_flash(channel, volume, old, written)
                if not durable:
                    self._found += 1
                    continue
            # The set was given back meanwhile, and the place may have another `CachedSet` now.
            with volume.borrowed_at((old.cached.namespace, old.cached.offset)) as (cached,):
                old = Found(cached, old.slot, old.entry)
                outcome = yield from Migration(volume, channel, old, channel.now() + VALUE_SECONDS).clear()
                self._found += outcome is not Outcome.GONE

    def _is_on_flash(self, channel: IoChannel, volume: Volume, old: Found, written: int) -> Steps[bool]:
        """Whether the copy is durable: fsync(2) may have said so of the old one, and no other agent flushes
        this agent's writes."""
        places = {place.namespace for place in volume.placement.candidates(old.entry.pseudonym)}
        failed = yield from flush_written(channel, places)
        return not failed and all(channel.doubtful(place) <= written for place in places)
