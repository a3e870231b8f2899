"""`[pool] membership = "auto"`: an agent that serves lets blank namespaces in, as `g35 pool add` does.

A thread of its own, `members`, with lanes of its own on a view of the fabric in which newcomers have numbers
too. Once a second it looks at what is there, and does at most one thing:

* Newcomers that are blank (agent/membership/candidates.py: the operator's rule) join, all that are there,
  once none has come or gone for `join_after_s` and a random part of that more, so that of several agents one
  is first. They do not join before the pool is settled, nor within REST_SECONDS of a join or a try that
  failed.
* A pool whose values have all been moved is settled, by the agent that moves them.
* Every MEND_SECONDS the copies of the pool map are compared with the one in force. Where one differs twice in
  a row (a namespace that was away while a tenant was erased, a program that died while it changed the map),
  all are brought to one map.

Whoever else changes the map at the same time, an agent or an operator: agent/pool/map/commit.py.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Set
from typing import Any

from agent.attach.inspect_namespaces import WITH_ALL, look_round
from agent.config.pool_section import PoolSection
from agent.errors import G35Error
from agent.host_os.worker_thread import OwnThread
from agent.inline.root_keys import RootKey
from agent.membership.candidates import newcomers_in, why_not
from agent.membership.join import (
    Seen,
    complete_map,
    join,
    members_missing,
    misplaced_values,
    numbers_of,
    settle,
    unsettled,
)
from agent.pool.map.commit import change_map, simply
from agent.pool.map.document import PoolMap
from agent.pool.map.inspect import NOT_BLANK, Content, newest_map
from agent.pool.map.replicas import mark_at, name_in, name_of
from agent.pool.map.seal import MapSeal
from agent.pool.map.superblock import COPY_OFFSETS
from agent.remote.channel import WorkerLanes
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
        """Something was tried."""
        self._rested = now + REST_SECONDS


class _Stopped(Exception):
    """The agent ends; what was begun is completed by whoever comes next."""


class AutoJoin:
    """See the module's docstring. `turn` is for one thread, `snapshot` for any."""

    def __init__(
        self,
        section: PoolSection,
        fabric: Fabric,
        root: RootKey,
        in_force: Callable[[], PoolMap],
        moves_left: Callable[[], int | None],
        seal: MapSeal,
    ) -> None:
        """`in_force` gives the map that the agent goes by; `moves_left` what its mover has left to move, None
        where it cannot tell."""
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
        self._thread = OwnThread("members", STOP_SECONDS, "the change of the pool map that is under way")

    def start(self, queue_id: int) -> None:
        """Begin; `queue_id` is of queues that nobody else uses."""

        def work() -> None:
            lanes = WorkerLanes(self.view, queue_id)
            try:
                while not self._thread.stopping.wait(LOOK_SECONDS):
                    self._turn_safely(lanes)
            finally:
                lanes.close()

        self._thread.start(work)

    def stop(self) -> None:
        self._thread.stop()

    def snapshot(self) -> dict[str, Any]:
        return {
            "newcomers_refused": dict(self._refused),
            "waiting_for": self._waiting_for,
            "joins": self.joins,
            "joined_namespaces": self.joined,
            "settles": self.settles,
            "maps_mended": self.mended,
        }

    # -- one turn -----------------------------------------------------------------------------------

    def _turn_safely(self, lanes: WorkerLanes) -> None:
        try:
            self.turn(lanes, time.monotonic())
        except _Stopped:
            log.info("the agent ends; another add or another agent completes what was begun")
        except G35Error as error:
            self._wait_for(str(error))
            self._patience.rest(time.monotonic())
        except Exception:
            log.exception("following the pool's members failed; it is tried again")
            self._patience.rest(time.monotonic())

    def turn(self, lanes: WorkerLanes, now: float) -> None:
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
                self._settle(lanes)
        elif is_time:
            self._patience.rest(now)
            self._join(lanes)
        elif not newcomers:
            self._wait_for("")
        if now >= self._next_mend:
            self._next_mend = now + MEND_SECONDS
            self._mend(lanes)

    def _wait_for(self, what: str) -> None:
        if what and what != self._waiting_for:
            log.info("namespaces do not join the pool by themselves for now: %s", what)
        self._waiting_for = what

    def _look(self, lanes: WorkerLanes) -> tuple[PoolMap, Seen]:
        """The map in force and everything that is reached, numbered in the lanes.

        Raises G35Error where the map that the agent goes by is away. Other pools are not looked at.
        """
        ours = self._in_force()
        self.view.own_pool = ours.pool_id
        seen = look_round(self.view, lanes)
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
        """Members that the agent itself does not reach, or only where it does not trust it
        (namespace_owner.py)."""
        routes = zip(self._fabric.nguids, self._fabric.routes, strict=False)
        return {nguid.hex() for nguid, route in routes if route is None}

    def _want_all(self, pool_map: PoolMap, seen: Seen) -> None:
        if self._unused() or self._fabric.contested:
            raise G35Error(
                "the agent does not reach all of the pool, or several enclosures claim a part of it",
                "see g35 status",
            )
        if missing := members_missing(pool_map, seen):
            raise G35Error(
                f"{len(missing)} of the pool's {len(pool_map.namespaces)} namespaces are not reached",
                WITH_ALL,
            )

    def _join(self, lanes: WorkerLanes) -> None:
        pool_map, seen = self._look(lanes)
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
        lanes.run(complete_map(lanes, pool_map, seen, self._seal))
        names = ", ".join(nguid.hex() for nguid, _ in newcomers)
        log.info("namespaces join the pool: %s", names)
        changed = lanes.run(
            join(lanes, pool_map, newcomers, numbers_of(seen), self._advance, seal=self._seal)
        )
        self._wait_for("")
        self.joins += 1
        self.joined += len(changed.namespaces) - len(pool_map.namespaces)
        log.info("the pool has %d namespaces by map %d", len(changed.namespaces), changed.version)

    def _advance(self, _: int) -> None:
        if self._thread.stopping.is_set():
            raise _Stopped

    def _settle(self, lanes: WorkerLanes) -> None:
        pool_map, seen = self._look(lanes)
        self._want_all(pool_map, seen)
        for volume in unsettled(pool_map):
            if pool_map.is_erased(volume):
                continue
            secret = pool_map.secret(volume, self._root)
            values, wrong = lanes.run(misplaced_values(lanes, pool_map, volume, secret, numbers_of(seen)))
            if wrong:
                log.info("%d of %d values of volume %s have yet to move", wrong, values, volume.name)
                return
        changed = lanes.run(settle(lanes, pool_map, numbers_of(seen), self._seal))
        self.settles += 1
        log.info("the pool is settled by map %d", changed.version)

    def _mend(self, lanes: WorkerLanes) -> None:
        differed, self._differed = self._differed, self._differs(lanes)
        if not (differed and self._differed):
            return
        self._differed = False
        pool_map, seen = self._look(lanes)
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
                # Whoever put that there has to be asked.
                numbers.pop(nguid.hex(), None)
        change = simply(lambda it: it)
        done = lanes.run(change_map(lanes, pool_map, numbers, change, all_of_them=False, seal=self._seal))
        self.mended += 1
        log.info("copies of the pool map differed; map %d is in force", done.pool_map.version)

    def _differs(self, lanes: WorkerLanes) -> bool:
        """Whether a copy that can be read is another map than the one that the agent goes by."""
        pool_map = self._in_force()
        self.view.adopt([bytes.fromhex(each.nguid) for each in pool_map.namespaces])
        name = name_of(pool_map)
        for number, member in enumerate(pool_map.namespaces):
            if self.view.routes[number] is None:
                continue
            for which in range(1 if member.kind == "kv" else len(COPY_OFFSETS)):
                try:
                    mark = lanes.run(mark_at(lanes, number, member, which))
                except G35Error:
                    break
                if name_in(mark) != name:
                    return True
        return False
