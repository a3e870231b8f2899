"""Where every namespace of the pool can be reached just now: what the supervisor knows and workers read.

The supervisor (agent/remote/supervisor.py) keeps one session an enclosure and publishes what it finds;
a worker reads it with every request. Publishing replaces whole tuples, so a reader sees the old or the
new state and never half of one; nothing here is locked but the list of complaints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from agent.remote.health import Health
from agent.remote.suspicion import Change, Suspicion, Verdict
from nvmeof.transport.base import ControllerInfo, NamespaceInfo
from nvmeof.wire.kv import KvFormat


@dataclass(slots=True, eq=False)
class Enclosure:
    """One enclosure as its session last saw it. Only the supervisor writes; `complain` is for workers."""

    name: str
    session: ControllerInfo | None = None
    """Present while the session stands: queues may be connected."""
    epoch: int = 0
    """Grows with every new session; a queue of an older epoch is of no use any more."""
    namespaces: tuple[NamespaceInfo, ...] = ()
    fault: str = "not connected yet"
    reconnects: int = 0
    authentication_failures: int = 0
    """Tries of the supervisor that ended because one of the two could not prove itself."""
    complaints: int = 0
    """How often workers lost a queue of it; the supervisor resets the controller when it grows."""

    def complain(self, epoch: int) -> None:
        """A worker's queue died under it, or would not connect."""
        if epoch == self.epoch:
            self.complaints += 1


@dataclass(frozen=True, slots=True)
class Route:
    """The way to one namespace: which enclosure, which NSID there, which block size."""

    enclosure: Enclosure
    nsid: int
    lba_bytes: int
    kv: KvFormat | None = None
    """Present where it is a namespace of keys and values, which has no blocks."""
    used_bytes: int = 0
    """What a KV namespace took up when the session last looked."""


Routes: TypeAlias = tuple[Route | None, ...]


@dataclass(slots=True, eq=False)
class Fabric:
    """All enclosures, and the namespaces of the pool map in the map's order."""

    enclosures: Sequence[Enclosure]
    nguids: tuple[bytes, ...] = ()
    routes: Routes = ()
    health: tuple[Health, ...] = ()
    suspicion: Suspicion = field(default_factory=lambda: Suspicion(()))
    strays: dict[str, str] = field(default_factory=dict)
    """Namespaces that an enclosure has and the map does not: NGUID as hex, enclosure."""

    def adopt(self, nguids: Sequence[bytes]) -> None:
        """Follow a pool map: `nguids` in its order."""
        self.nguids = tuple(nguids)
        self.health = tuple(Health() for _ in nguids)
        self.suspicion = Suspicion(self.health)
        self.refresh()

    def look(self, now: float) -> list[Change]:
        """Look for gray failure; the verdicts that changed."""
        where = [None if route is None else route.enclosure.name for route in self.routes]
        return self.suspicion.look(now, where)

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
            and self.suspicion.verdict(member) is Verdict.SUSPECT
            for member, route in enumerate(self.routes)
        )

    def refresh(self) -> None:
        """Publish the routes anew after a session came, went or saw its namespaces change."""
        found: dict[bytes, Route] = {}
        for enclosure in self.enclosures:
            if enclosure.session is None:
                continue
            for namespace in enclosure.namespaces:
                found[namespace.nguid] = Route(
                    enclosure, namespace.nsid, namespace.lba_bytes, namespace.kv, namespace.used_bytes
                )
        self.routes = tuple(found.get(nguid) for nguid in self.nguids)
        self.strays = {
            nguid.hex(): route.enclosure.name for nguid, route in found.items() if nguid not in self.nguids
        }
