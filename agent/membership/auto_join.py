"""`[pool] membership = "auto"`: a serving agent lets blank namespaces in, as `g35 pool add` does.

The thread `members` has a channel of its own on a view of the fabric in which newcomers have numbers too.
Once a second it looks at the pool, and does at most one thing:

* Blank newcomers (agent/membership/join.py: the operator's rule) join, all at once, when none has come or
  gone for `join_after_s` and a random part of that more, so that one of several agents is first. They do not
  join before the pool is settled, nor within REST_SECONDS of a join or a failed try.
* A pool whose values have all been moved is settled, by the agent that moves them.
* Every MEND_SECONDS the copies of the pool map are compared with the map in force. Where one differs twice in
  a row (a namespace was away while a tenant was erased, a program died while it changed the map), all are
  brought to one map.

Agents and operators that change the map at the same time: agent/pool/map/commit.py.
"""

import logging
import random
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict
from typing import Any

from agent.attach.inspect_namespaces import look_round, want_all
from agent.attach.map_watch import MapWatch
from agent.config.configuration import PoolSection
from agent.errors import G35Error
from agent.host_os.worker_thread import OwnThread
from agent.inline.secrets import RootKey
from agent.membership.join import (
    Seen,
    complete_map,
    join,
    misplaced_values,
    newcomers_in,
    numbers_of,
    settle,
    unsettled,
    why_not,
)
from agent.pool.maintenance.rebalance import Rebalancer
from agent.pool.map.commit import change_map, simply
from agent.pool.map.document import PoolMap
from agent.pool.map.inspect import NOT_BLANK, Content, newest_map
from agent.pool.map.map_seal import MapSeal
from agent.pool.map.replicas import mark_at, name_in, name_of, places_on
from agent.pool.volume.volume import PoolVolume, in_sets
from agent.remote.channel import WorkerChannel
from agent.remote.fabric import Fabric

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
MEND_SECONDS = 10.0
SETTLE_SECONDS = 10.0
"""Between tries to settle."""
REST_SECONDS = 30.0
"""Between joins, and after one that failed."""
STOP_SECONDS = 15.0


class Patience:
    """When newcomers may join. `now` in seconds."""

    def __init__(self, join_after: float, spread: Callable[[], float] = random.random) -> None:
        """`spread` gives the part of `join_after` that is waited in addition, 0 to 1."""
        self._join_after, self._spread = join_after, spread
        self._last: frozenset[str] = frozenset()
        self._due = self._rested = float("-inf")

    def is_time(self, newcomers: Set[str], now: float) -> bool:
        """Whether these, which are there now, have been there alone for long enough."""
        if newcomers != self._last:
            self._last = frozenset(newcomers)
            self._due = now + self._join_after * (1 + self._spread())
        return bool(newcomers) and now >= max(self._due, self._rested)

    def rest(self, now: float) -> None:
        self._rested = now + REST_SECONDS


class _Stopped(Exception):
    """The agent ends; the next program completes what was begun."""


class AutoJoin(OwnThread):
    """See the module's docstring. `turn` is for one thread, `snapshot` for any."""

    def __init__(
        self,
        section: PoolSection,
        fabric: Fabric,
        root: RootKey,
        in_force: Callable[[], PoolMap],
        moves_left: Callable[[], int | None],
        seal: MapSeal,
        queue_id: int = 0,
    ) -> None:
        """`in_force` gives the map that the agent goes by; `moves_left` the values that are left to move,
        None where that is not known. Nobody else uses queues of `queue_id`."""
        super().__init__("members", STOP_SECONDS, "the change of the pool map that is under way")
        self._queue_id = queue_id
        self._seal = seal
        self._section, self._fabric, self._root = section, fabric, root
        self._in_force, self._moves_left = in_force, moves_left
        self.view = Fabric(fabric.enclosures, fence=fabric.fence, unflushed=fabric.unflushed)
        self._patience = Patience(section.join_after_s)
        self._refused: dict[str, str] = {}
        self._waiting_for = ""
        self._next_mend = self._next_settle = float("-inf")
        self._differed = False
        self.joins = self.joined = self.settles = self.mended = 0

    def _work(self) -> None:
        channel = WorkerChannel(self.view, self._queue_id)
        try:
            while not self.stopping.wait(LOOK_SECONDS):
                self._turn_safely(channel)
        finally:
            channel.close()

    def snapshot(self) -> dict[str, Any]:
        return {
            "newcomers_refused": dict(self._refused),
            "waiting_for": self._waiting_for,
            "joins": self.joins,
            "joined_namespaces": self.joined,
            "settles": self.settles,
            "maps_mended": self.mended,
        }

    def _turn_safely(self, channel: WorkerChannel) -> None:
        try:
            self.turn(channel, time.monotonic())
        except _Stopped:
            log.info("the agent ends; another add or another agent completes what was begun")
        except G35Error as error:
            self._wait_for(str(error))
            self._patience.rest(time.monotonic())
        except Exception:
            log.exception("following the pool's members failed; it is tried again")
            self._patience.rest(time.monotonic())

    def turn(self, channel: WorkerChannel, now: float) -> None:
        """Do what is due. Raises G35Error where that was not possible, and comes again."""
        self.view.enclosures = list(self._fabric.enclosures)
        strays = dict(self._fabric.strays)
        self._refused = {nguid: why for nguid, why in self._refused.items() if nguid in strays}
        newcomers = strays.keys() - self._refused.keys()
        is_time = self._patience.is_time(newcomers, now)
        if unsettled(self._in_force()):
            self._wait_for("the pool to be settled since the last join" if newcomers else "")
            if self._section.rebalance and self._moves_left() == 0 and now >= self._next_settle:
                self._next_settle = now + SETTLE_SECONDS
                self._settle(channel)
        elif is_time:
            self._patience.rest(now)
            self._join(channel)
        elif not newcomers:
            self._wait_for("")
        if now >= self._next_mend:
            self._next_mend = now + MEND_SECONDS
            self._mend(channel)

    def _wait_for(self, what: str) -> None:
        if what and what != self._waiting_for:
            log.info("namespaces do not join the pool by themselves for now: %s", what)
        self._waiting_for = what

    def _look(self, channel: WorkerChannel) -> tuple[PoolMap, Seen]:
        """The map in force and all reached namespaces of its pool, numbered in the channel. Raises G35Error
        where the agent's map is away."""
        ours = self._in_force()
        self.view.own_pool = ours.pool_id
        seen = look_round(self.view, channel)
        found = [
            each
            for _, _, each in seen
            if each.superblock is not None and each.superblock.pool_map.pool_id == ours.pool_id
        ]
        pool_map = newest_map(found, self._seal)
        if pool_map.version < ours.version:
            raise G35Error("the newest pool map is away", "bring back the enclosures that are")
        return pool_map, seen

    def _unused(self) -> set[str]:
        """Members that the agent does not reach, or not where it trusts them (namespace_owner.py)."""
        routes = zip(self._fabric.nguids, self._fabric.routes, strict=False)
        return {nguid.hex() for nguid, route in routes if route is None}

    def _want_all(self, pool_map: PoolMap, seen: Seen) -> None:
        if self._unused() or self._fabric.contested:
            raise G35Error(
                "the agent does not reach all of the pool, or several enclosures claim a part of it",
                "see g35 status",
            )
        want_all(pool_map, seen, self._fabric)

    def _join(self, channel: WorkerChannel) -> None:
        pool_map, seen = self._look(channel)
        members = {each.nguid for each in pool_map.namespaces}
        for nguid, _, inspection in seen:
            name, why = nguid.hex(), why_not(inspection, pool_map.pool_id)
            if name not in members and inspection.claimants and why:
                # It may give way.
                self._wait_for(f"namespace {name}: {why}")
            elif name not in members and why and inspection.content is not Content.UNREADABLE:
                self._refused[name] = why
                log.warning("namespace %s does not join by itself: %s (g35 pool add)", name, why)
        newcomers = [
            each
            for each in newcomers_in(pool_map, seen, frozenset(), False)
            if each[0].hex() not in self.view.contested
        ]
        if not newcomers or unsettled(pool_map):
            return
        self._want_all(pool_map, seen)
        channel.run(complete_map(channel, pool_map, seen, self._seal))
        names = ", ".join(nguid.hex() for nguid, _ in newcomers)
        log.info("namespaces join the pool: %s", names)
        changed = channel.run(
            join(channel, pool_map, newcomers, numbers_of(seen), self._advance, seal=self._seal)
        )
        self._wait_for("")
        self.joins += 1
        self.joined += len(changed.namespaces) - len(pool_map.namespaces)
        log.info("the pool has %d namespaces by map %d", len(changed.namespaces), changed.version)

    def _advance(self, _: int) -> None:
        if self.stopping.is_set():
            raise _Stopped

    def _settle(self, channel: WorkerChannel) -> None:
        pool_map, seen = self._look(channel)
        self._want_all(pool_map, seen)
        for volume in unsettled(pool_map):
            if pool_map.is_erased(volume):
                continue
            secret = pool_map.secret(volume, self._root)
            values, wrong = channel.run(misplaced_values(channel, pool_map, volume, secret, numbers_of(seen)))
            if wrong:
                log.info("%d of %d values of volume %s have yet to move", wrong, values, volume.name)
                return
        changed = channel.run(settle(channel, pool_map, numbers_of(seen), self._seal))
        self.settles += 1
        log.info("the pool is settled by map %d", changed.version)

    def _mend(self, channel: WorkerChannel) -> None:
        differed, self._differed = self._differed, self._differs(channel)
        if not (differed and self._differed):
            return
        self._differed = False
        pool_map, seen = self._look(channel)
        members = {each.nguid for each in pool_map.namespaces}
        numbers = numbers_of(seen)
        for name in (self._unused() | self._fabric.contested.keys()) & numbers.keys():
            del numbers[name]
        for nguid, _, inspection in seen:
            whole = inspection.content in (Content.POOL, Content.BLANK) or inspection.detail == NOT_BLANK
            foreign = (
                inspection.superblock is not None
                and inspection.superblock.pool_map.pool_id != pool_map.pool_id
            )
            if nguid.hex() in members and (foreign or not whole):
                # Its owner has to be asked.
                numbers.pop(nguid.hex(), None)
        change = simply(lambda it: it)
        done = channel.run(change_map(channel, pool_map, numbers, change, all_of_them=False, seal=self._seal))
        self.mended += 1
        log.info("copies of the pool map differed; map %d is in force", done.pool_map.version)

    def _differs(self, channel: WorkerChannel) -> bool:
        """Whether a copy that can be read is another map than the one that the agent goes by."""
        pool_map = self._in_force()
        self.view.adopt([bytes.fromhex(each.nguid) for each in pool_map.namespaces])
        name = name_of(pool_map)
        for number, member in enumerate(pool_map.namespaces):
            if self.view.routes[number] is None:
                continue
            for place in places_on(member):
                try:
                    mark = channel.run(mark_at(channel, number, place))
                except G35Error:
                    break
                if name_in(mark) != name:
                    return True
        return False


def membership_status(
    section: PoolSection,
    volumes: Sequence[PoolVolume],
    fabric: Fabric,
    watch: MapWatch,
    rebalancer: Rebalancer,
    auto: AutoJoin | None,
) -> dict[str, Any]:
    """For the status: namespaces without a place in the map, members that are not to be trusted, and the
    moving."""
    unsettled_volumes = [each.settings.name for each in in_sets(volumes) if each.old_placement is not None]
    taken = {
        nguid.hex(): f"carries pool {pool_id} now; nothing is written there"
        for nguid, pool_id in fabric.taken.items()
    }
    blank = {
        nguid: f"does not carry the pool's map any more: {found}"
        for nguid, found in watch.without_map.items()
    }
    return {
        "newcomers": dict(fabric.strays),
        "contested": {**blank, **fabric.contested, **taken},
        "membership": section.membership,
        "rebalance_bytes_per_s": section.rebalance,
        "volumes_unsettled": unsettled_volumes,
        **{f"moves_{name}": value for name, value in asdict(rebalancer.moves).items()},
        **(auto.snapshot() if auto is not None else {}),
    }
