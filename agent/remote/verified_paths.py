"""The paths to one namespace that were shown to lead to the same medium.

Two sessions that name one subsystem may be two ports of an enclosure, or an enclosure and a copy of it with
the same folder, NQN and secrets. A write by one is not in the other. So:

* a path of the configuration (`paths`) is the operator's word, and is used;
* a path by discovery is used once a block written by a path in use was read by it (path_prober.py). That
  holds for as long as both sessions last, and goes on holding when the other ends;
* a path that reads something else is left out, and contested, until its session is new;
* where all paths are by discovery and none was in use, the first by name begins. One that turns out to be
  another then casts doubt on both, and neither is used while both are listed;
* while the configured path is away, or all that were in use, a path that was never shown does not take their
  place: a miss, and not a loss.

Without I/O; the fabric's lock is held.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from agent.remote.enclosure import Enclosure, Route


@dataclass(frozen=True, slots=True)
class Unproven:
    """A path that may be used once it reads a block that another wrote."""

    nguid: bytes
    by: Route
    """The one that is in use."""
    path: Route
    epochs: tuple[int, int]
    """Of the sessions of the two."""


@dataclass(slots=True, eq=False)
class _Namespace:
    """The record of one namespace. Paths by enclosure, with the epoch of their session."""

    used: dict[Enclosure, int] = field(default_factory=dict)
    """Those that lead to one medium, connected or not."""
    others: dict[Enclosure, int] = field(default_factory=dict)
    """Those that were shown to lead to another."""
    blind: bool = False
    """Whether the first was taken among several."""
    split: bool = False
    """Whether such a one was shown to be one of two."""


class VerifiedPaths:
    def __init__(self) -> None:
        self._namespaces: dict[bytes, _Namespace] = {}
        self.unproven: tuple[Unproven, ...] = ()
        """The paths to be proven since the last `begin`."""

    def begin(self, nguids: Sequence[bytes]) -> None:
        """All namespaces are looked at anew; the others are forgotten."""
        kept = set(nguids)
        self._namespaces = {nguid: each for nguid, each in self._namespaces.items() if nguid in kept}
        self.unproven = ()

    def usable(
        self, nguid: bytes, ways: Sequence[Route], known: Sequence[Enclosure]
    ) -> tuple[Sequence[Route], str]:
        """The ways by one subsystem that are used, and a message about the others, if any.

        `known` has all enclosures of the subsystem, connected or not.
        """
        if not ways:
            return ways, ""
        it = self._namespaces.setdefault(nguid, _Namespace())
        it.used = {each: epoch for each, epoch in it.used.items() if each in known}
        it.split = it.split and len(known) > 1
        if it.split:
            return (), f"{_names(ways)} show it by one name and are not one: none of them is used"
        used = [each for each in ways if not each.enclosure.discovered or _is_in(it.used, each)]
        named = [each for each in known if not each.discovered]
        if not used and not named:
            used = self._begin_with(it, ways)
        it.used |= {each.enclosure: each.enclosure.epoch for each in used}
        if len(used) == len(ways):
            return ways, ""
        rest = [each for each in ways if each not in used]
        if not used:
            away = next(iter(named or it.used)).name
            return (), f"{_names(rest)} listed as a way to it while {away} is away: not used"
        refuted = [each for each in rest if _is_in(it.others, each)]
        epoch = used[0].enclosure.epoch
        self.unproven += tuple(
            Unproven(nguid, used[0], each, (epoch, each.enclosure.epoch))
            for each in rest
            if each not in refuted
        )
        first = used[0].enclosure.name
        return used, "; ".join(
            f"{each.enclosure.name} says that it is a path of {first} and is another: left out"
            for each in refuted
        )

    def _begin_with(self, it: _Namespace, ways: Sequence[Route]) -> list[Route]:
        """The ways to use where none of the earlier ones is connected."""
        if it.used:
            # Of those that were one: the others show it again.
            return [each for each in ways if each.enclosure in it.used][:1]
        it.blind = len(ways) > 1
        return [min(ways, key=lambda each: each.enclosure.name)]

    def found(self, what: Unproven, is_one: bool) -> None:
        """The result of a proof, unless one of the sessions is new."""
        it = self._namespaces.get(what.nguid)
        by, path = what.by.enclosure, what.path.enclosure
        if it is None or (by.epoch, path.epoch) != what.epochs or it.used.get(by) != by.epoch:
            return
        if is_one:
            it.used[path] = path.epoch
            it.others.pop(path, None)
            it.blind = False
        else:
            it.others = {each: epoch for each, epoch in it.others.items() if each.epoch == epoch}
            it.others[path] = path.epoch
            it.split = it.blind


def _is_in(paths: dict[Enclosure, int], way: Route) -> bool:
    return paths.get(way.enclosure) == way.enclosure.epoch


def _names(ways: Sequence[Route]) -> str:
    return " and ".join(each.enclosure.name for each in ways[:4])
