"""Where every namespace of the pool can be reached just now: the supervisor writes it, workers read it.

There is a session for each path to an enclosure, and a namespace has several ways, the best first
(agent/remote/path_choice.py). Two enclosures that show one namespace are judged by
agent/remote/namespace_owner.py. Publishing replaces whole tuples, so a reader sees the old or the new state
and never half of one.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from agent.pool.write.flush_tracking import UnflushedWrites
from agent.remote.circuit_breaker import Health
from agent.remote.enclosure import Enclosure, Route
from agent.remote.fence import Fence
from agent.remote.namespace_owner import NamespaceOwners
from agent.remote.outlier_detection import Change, OutlierDetection, Verdict
from agent.remote.verified_paths import Unproven, VerifiedPaths

Ways: TypeAlias = tuple[tuple[Route, ...], ...]
Routes: TypeAlias = tuple[Route | None, ...]


@dataclass(slots=True, eq=False)
class Fabric:
    """All enclosures, and the namespaces of the pool map in the map's order."""

    enclosures: Sequence[Enclosure]
    nguids: tuple[bytes, ...] = ()
    routes: Routes = ()
    """The best way to each namespace."""
    ways: Ways = ()
    """All that serve it, the best first; as many as there are paths to its enclosure."""
    fence: Fence = field(default_factory=Fence)
    unflushed: UnflushedWrites = field(default_factory=UnflushedWrites)
    health: tuple[Health, ...] = ()
    outliers: OutlierDetection = field(default_factory=lambda: OutlierDetection(()))
    _publishing: threading.RLock = field(default_factory=threading.RLock, repr=False)
    strays: dict[str, str] = field(default_factory=dict)
    """Namespaces that an enclosure has and the map does not: NGUID as hex, enclosure."""
    contested: dict[str, str] = field(default_factory=dict)
    """Namespaces that several enclosures claim: NGUID as hex, who is left out."""
    _is_pool: bool = field(default=False, repr=False)
    """Whether `nguids` are those of a pool map."""
    _shown: set[bytes] = field(default_factory=set, repr=False)
    """Namespaces of the map that an enclosure has shown since this agent runs, by NGUID."""
    taken: dict[bytes, str] = field(default_factory=dict)
    """Namespaces of the map that carry another pool now, by NGUID, and its id: nothing is written there."""
    own_pool: str = ""
    """The id of the pool that this machine has served last, if it has; see `agent/attach/connect.py`."""
    _owners: NamespaceOwners = field(default_factory=NamespaceOwners, repr=False)
    _paths: VerifiedPaths = field(default_factory=VerifiedPaths, repr=False)

    def adopt(self, nguids: Sequence[bytes], *, is_pool: bool = True) -> None:
        """Follow a pool map: `nguids` in its order. `is_pool` is False for those of no map, which somebody
        looks at to find one. On any thread."""
        with self._publishing:
            self._is_pool = is_pool
            self.nguids = tuple(nguids)
            self.health = tuple(Health() for _ in nguids)
            self.outliers = OutlierDetection(self.health)
            self.refresh()

    def grow(self, nguids: Sequence[bytes]) -> None:
        """Follow a pool map with more namespaces behind those that there were. On any thread."""
        with self._publishing:
            # In this order: a reader of a route finds the health that belongs to it.
            self.health += tuple(Health() for _ in nguids[len(self.health) :])
            self.outliers.grow(self.health)
            self.nguids = tuple(nguids)
            self.refresh()

    def look(self, now: float) -> list[Change]:
        """Look for gray failure; the verdicts that changed."""
        with self._publishing:
            where = [None if route is None else route.enclosure.subsystem for route in self.routes]
            in_place = {member for member in range(len(where)) if self.is_local(member)}
            return self.outliers.look(now, where, in_place)

    def newcomers(self) -> dict[str, str]:
        """Namespaces that enclosures show beside those of the pool map: NGUID as hex, enclosure. None before
        there is a map. Read beside `adopt` and `grow`, `strays` may belong to the map of before."""
        with self._publishing:
            return dict(self.strays) if self._is_pool and self.nguids else {}

    def unseen(self) -> set[bytes]:
        """Namespaces of the pool map that no enclosure has shown yet, by NGUID, if all are connected."""
        with self._publishing:
            if not self._is_pool or any(each.session is None for each in self.enclosures):
                return set()
            return set(self.nguids) - self._shown

    def ways_to(self, member: int, nguid: bytes) -> tuple[Route, ...]:
        """The ways to a namespace, if it still has this number in the map."""
        nguids, ways = self.nguids, self.ways
        if member < min(len(nguids), len(ways)) and nguids[member] == nguid:
            return ways[member]
        return ()

    def is_away(self, member: int) -> bool:
        """Whether a get from there would be a miss at once."""
        routes, health = self.routes, self.health
        if member >= min(len(routes), len(health)) or routes[member] is None:
            return True
        return health[member].refuses(time.monotonic())

    def is_local(self, member: int) -> bool:
        """Whether a namespace is read without a wire just now."""
        routes = self.routes
        route = routes[member] if member < len(routes) else None
        return route is not None and route.enclosure.is_local

    def note_taken(self, nguid: bytes, pool_id: str) -> None:
        """A namespace carries another pool now; "": its own."""
        others = {each: pool for each, pool in self.taken.items() if each != nguid}
        self.taken = {**others, nguid: pool_id} if pool_id else others

    def name_of(self, member: int) -> str:
        """A namespace of the map, for people: its enclosure and its NGUID."""
        route = self.routes[member]
        where = route.enclosure.name if route is not None else "an enclosure that is away"
        return f"namespace {self.nguids[member].hex()} of {where}"

    def suspects(self, enclosure: Enclosure) -> int:
        """How many namespaces of an enclosure get no new values."""
        return sum(
            route is not None
            and route.enclosure is enclosure
            and self.outliers.verdict(member) is Verdict.SUSPECT
            for member, route in enumerate(self.routes)
        )

    def unproven(self) -> tuple[Unproven, ...]:
        """Paths that are not used yet: nothing has shown that they lead to the same medium."""
        return self._paths.unproven

    def found(self, what: Unproven, is_one: bool) -> None:
        """Whether they do. On any thread."""
        with self._publishing:
            self._paths.found(what, is_one)
            self._refresh()

    def refresh(self) -> None:
        """Publish the routes anew after a session came, went or saw its namespaces change."""
        with self._publishing:
            self._refresh()

    def _refresh(self) -> None:
        claims: dict[bytes, dict[str, list[Route]]] = {}
        known: dict[str, list[Enclosure]] = {}
        paths = Counter(enclosure.nqn for enclosure in self.enclosures if enclosure.nqn)
        for enclosure in self.enclosures:
            known.setdefault(enclosure.subsystem, []).append(enclosure)
            if enclosure.session is None:
                continue
            enclosure.has_other_paths = enclosure.has_other_paths or paths[enclosure.nqn] > 1
            for namespace in enclosure.namespaces:
                route = Route(
                    enclosure,
                    namespace.nsid,
                    namespace.lba_bytes,
                    namespace.kv,
                    namespace.used_bytes,
                    enclosure.access_to(namespace),
                )
                claims.setdefault(namespace.nguid, {}).setdefault(enclosure.subsystem, []).append(route)
        chosen: list[tuple[Route, ...]] = []
        contested: dict[str, str] = {}
        self._paths.begin(self.nguids)
        for nguid in self.nguids:
            ways, said = self._owners.choose(nguid, claims.get(nguid, {}), known)
            if ways:
                of_it = known[ways[0].enclosure.subsystem]
                ways, but = self._paths.usable(nguid, ways, of_it)
                said = "; ".join(each for each in (said, but) if each)
            chosen.append(_serving(ways))
            if said:
                contested[nguid.hex()] = said
        self._owners.keep_only(self.nguids)
        self.ways = tuple(chosen)
        self.routes = tuple(ways[0] if ways else None for ways in self.ways)
        self.contested = contested
        named = set(self.nguids)
        self._shown = (self._shown | claims.keys()) & named
        self.strays = {
            nguid.hex(): next(iter(by_subsystem.values()))[0].enclosure.name
            for nguid, by_subsystem in claims.items()
            if nguid not in named
        }


def _serving(ways: Sequence[Route]) -> tuple[Route, ...]:
    """Those that serve: a device of this machine, then optimized ones, else in the order of the
    configuration."""
    serving = (way for way in ways if way.access.serves)
    return tuple(sorted(serving, key=lambda way: (not way.enclosure.is_local, way.access)))
