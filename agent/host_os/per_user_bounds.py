"""Counts that a stranger can raise: each has a limit, a share of one, and a row of `g35 status --bounds`.

A stranger is not the agent's owner: another user of the machine, a guest, a tenant, a peer that connects.
Whatever grows with requests is declared here (`Limit`), counted here (`Bound`), or shown here by the table
that counts it (`Bounds.watch`); a test walks all of them to their limits (docs/concurrency.md).

Where strangers share, one may hold as much as it leaves to others: the first has half, the second half of the
rest, and a newcomer always finds room. A part is kept for the agent's owner and root.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, TypeAlias

Holder: TypeAlias = int | str
"""The number of a user of this machine, or the name of a guest, a peer, a session."""

RESERVE_PART: Final = 8
"""One in so many places is kept for owners."""
SHARED: Final = "as much as it leaves to others"
ALL: Final = "all"


@dataclass(frozen=True, slots=True, eq=False)
class Limit:
    """What is counted and how far it may go. A constant of the module that has the table."""

    name: str
    counts: str
    most: int
    _: KW_ONLY
    by: str
    """Who shares it."""
    share: str
    """Of one of them."""
    refused: str
    """What one beyond it gets."""
    bytes_each: int
    """Memory of the agent that one costs at the most; 0 where bytes are counted."""

    def __post_init__(self) -> None:
        CATALOGUE[self.name] = self


CATALOGUE: Final[dict[str, Limit]] = {}
"""Every limit of the modules that are loaded, by its name."""


class Bound:
    """A limit, and how much of it each holder has now. Safe from any thread."""

    def __init__(self, limit: Limit, most: int, owners: frozenset[Holder] = frozenset()) -> None:
        self.limit: Final = limit
        self.most: Final = most
        self._owners = owners
        self._is_shared: Final = limit.share == SHARED
        self._reserve: Final = most // RESERVE_PART if self._is_shared else 0
        self._held: dict[Holder, int] = {}
        self._total = 0
        self._of_owners = 0
        self.refusals = 0
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        return self._total

    def take(self, holder: Holder, count: int = 1) -> bool:
        """Whether there was room for `count` more, which are the holder's until it gives them back."""
        with self._lock:
            held = self._held.get(holder, 0)
            is_owner = holder in self._owners
            if not self._may_hold(held, count, is_owner):
                self.refusals += 1
                return False
            self._held[holder] = held + count
            self._total += count
            if is_owner:
                self._of_owners += count
            return True

    def _may_hold(self, held: int, count: int, is_owner: bool) -> bool:
        left = self.most - self._total - count
        if not self._is_shared or is_owner:
            return left >= 0
        left -= max(0, self._reserve - self._of_owners)
        # A holder without any gets one, to the last.
        return left >= 0 and (held + count <= left or held + count == 1)

    def give_back(self, holder: Holder, count: int = 1) -> None:
        with self._lock:
            left = self._held.get(holder, 0) - count
            assert left >= 0, f"{self.limit.name}: more is given back than was taken"
            self._total -= count
            if holder in self._owners:
                self._of_owners -= count
            if left:
                self._held[holder] = left
            else:
                self._held.pop(holder, None)

    def pass_on(self, holder: Holder, heir: Holder) -> None:
        """One of a holder's is another's from now on."""
        with self._lock:
            self._held[holder] -= 1
            if not self._held[holder]:
                del self._held[holder]
            self._held[heir] = self._held.get(heir, 0) + 1
            self._of_owners += (heir in self._owners) - (holder in self._owners)

    def by_holder(self) -> dict[Holder, int]:
        with self._lock:
            return dict(self._held)

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            most_of_one = max(self._held.values(), default=0)
            return _row(self.limit, self.most, self._total, len(self._held), most_of_one, self.refusals)


def _row(limit: Limit, most: int, held: int, holders: int, most_of_one: int, refusals: int) -> dict[str, Any]:
    return {
        "name": limit.name,
        "counts": limit.counts,
        "limit": most,
        "held": held,
        "by": limit.by,
        "share": limit.share,
        "holders": holders,
        "most_of_one": most_of_one,
        "refusals": refusals,
        "refused": limit.refused,
    }


class Bounds:
    """All bounds of one agent. Safe from any thread."""

    def __init__(self, owners: Iterable[Holder] = (0,)) -> None:
        """`owners`: users for whom a part of what is shared is kept."""
        self._owners = frozenset(owners)
        self._bounds: dict[str, Bound] = {}
        self._watched: dict[str, Callable[[], dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def of(self, limit: Limit, most: int = 0, owners: Iterable[Holder] | None = None) -> Bound:
        """The one bound of a limit, for all doors. `most`, `owners`: where they are not the limit's and the
        users."""
        with self._lock:
            bound = self._bounds.get(limit.name)
            if bound is None:
                bound = self._bounds[limit.name] = Bound(
                    limit, most or limit.most, self._owners if owners is None else frozenset(owners)
                )
            return bound

    def watch(
        self,
        limit: Limit,
        held: Callable[[], Mapping[str, int]],
        refusals: Callable[[], int] = lambda: 0,
        most: int = 0,
    ) -> None:
        """Show a table that keeps its own limit: how much each holder has, and how often one was refused;
        never, where the table lets go of something instead."""

        def row() -> dict[str, Any]:
            values = [each for each in held().values() if each]
            most_of_one = max(values, default=0)
            return _row(limit, most or limit.most, sum(values), len(values), most_of_one, refusals())

        with self._lock:
            self._watched[limit.name] = row

    def snapshot(self) -> list[dict[str, Any]]:
        with self._lock:
            counted, watched = list(self._bounds.values()), list(self._watched.values())
        rows = [each.snapshot() for each in counted] + [row() for row in watched]
        return sorted(rows, key=lambda row: str(row["name"]))
