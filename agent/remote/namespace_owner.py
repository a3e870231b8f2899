"""The enclosure that a namespace is taken to be of, where several show one of its NGUID.

Two subsystems with one NGUID are a copy and its original, or an impostor: a write to one is not in the other,
so a pool that changed over would lose values and bring deleted ones back. So:

* the configuration goes before discovery;
* of several configured ones, the one in use stays in use, else the first counts;
* an enclosure by discovery takes over only from one that is connected and shows the namespace no more, or
  that is not listed any more. While the enclosure that had it is away, the namespace is away;
* of several by discovery of which none was in use, none is used.

The owners are remembered for as long as the process runs. Without I/O; the fabric's lock is held.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from agent.remote.enclosure import Enclosure, Route

Claims: TypeAlias = Mapping[str, Sequence[Route]]
"""By subsystem, the ways by which it shows one namespace."""


class NamespaceOwners:
    def __init__(self) -> None:
        self._owners: dict[bytes, str] = {}

    def keep_only(self, nguids: Sequence[bytes]) -> None:
        kept = set(nguids)
        self._owners = {nguid: each for nguid, each in self._owners.items() if nguid in kept}

    def choose(
        self, nguid: bytes, claims: Claims, known: Mapping[str, Sequence[Enclosure]]
    ) -> tuple[Sequence[Route], str]:
        """The ways to a namespace, and a message about those that are left out, if any are.

        `known` has the enclosures by subsystem, connected or not.
        """
        if not claims:
            return (), ""
        owner = self._owners.get(nguid)
        configured = [each for each, ways in claims.items() if is_configured(ways)]
        able = configured or list(claims)
        if owner in able:
            chosen = owner
        elif configured:
            chosen = configured[0]
        elif len(able) > 1:
            return (), f"{_names(claims, able)} show it, and none of them is used"
        elif owner is not None and _is_away(before := known.get(owner, ())):
            return (), f"{_names(claims, able)} shows it while {before[0].name} is away: it is not used"
        else:
            chosen = able[0]
        self._owners[nguid] = chosen
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
