"""Which enclosure a namespace is taken to be of, where several show one of its NGUID.

Paths to one subsystem lead to the same bytes, two subsystems do not: the second is a copy of a shelf, a drive
that was cloned, or an impostor, and what is written to one is not in the other. A pool that went from one
to the other would lose what it has acknowledged and bring back what it has deleted. So:

* what the configuration names goes before what a discovery controller lists;
* of several that the configuration names, the one that is in use stays in use, else the first counts;
* what discovery lists takes over a namespace only from one that no longer shows it though it is connected, or
  that is not listed any more. While the enclosure that had it is away, it is away;
* several by discovery of which none was in use before: none is used.

What is remembered are the namespaces that have numbers in the fabric, for as long as the process runs.
Without I/O; the fabric's lock is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from agent.remote.enclosure import Enclosure, Route

Claims: TypeAlias = Mapping[str, Sequence["Route"]]
"""By subsystem, the ways by which it shows one namespace."""


class NamespaceOwners:
    """The subsystem of each namespace. See the module's docstring."""

    def __init__(self) -> None:
        self._holders: dict[bytes, str] = {}

    def keep_only(self, nguids: Sequence[bytes]) -> None:
        """Forget the others."""
        kept = set(nguids)
        self._holders = {nguid: each for nguid, each in self._holders.items() if nguid in kept}

    def choose(
        self, nguid: bytes, claims: Claims, known: Mapping[str, Sequence[Enclosure]]
    ) -> tuple[Sequence[Route], str]:
        """The ways to a namespace, and what is to be said of those that are left out, if any are.

        `known` has the enclosures by subsystem, connected or not.
        """
        if not claims:
            return (), ""
        holder = self._holders.get(nguid)
        configured = [each for each, ways in claims.items() if is_configured(ways)]
        able = configured or list(claims)
        if holder in able:
            chosen = holder
        elif configured:
            chosen = configured[0]
        elif len(able) > 1:
            return (), f"{_names(claims, able)} show it, and none of them is used"
        elif holder is not None and _is_away(before := known.get(holder, ())):
            return (), f"{_names(claims, able)} shows it while {before[0].name} is away: it is not used"
        else:
            chosen = able[0]
        self._holders[nguid] = chosen
        others = [each for each in claims if each != chosen]
        said = f"{_names(claims, others)} shows it as well as {claims[chosen][0].enclosure.name}: left out"
        return claims[chosen], said if others else ""


def is_configured(ways: Sequence[Route]) -> bool:
    """Whether the configuration names one of them."""
    return any(not way.enclosure.discovered for way in ways)


def _is_away(paths: Sequence[Enclosure]) -> bool:
    """Whether there are paths to it, and none is connected."""
    return bool(paths) and all(each.session is None for each in paths)


def _names(claims: Claims, subsystems: Sequence[str]) -> str:
    return " and ".join(claims[each][0].enclosure.name for each in subsystems[:4])
