"""Places that tenants share: connections, and requests under way.

Half of all places are common, and the other half is reserved in equal shares. A tenant below its share always
finds a place; beyond it, a tenant gets places that are not reserved. So a single busy tenant has all but the
shares of the others. A tenant is any hashable: its name or its store.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Final

import trio

from agent.host_os.per_user_bounds import Bounds, Limit

WAIT_SECONDS: Final = 20.0
"""Then the request is refused, which clients try again; those of S3 wait 60 s for an answer."""


class TooBusy(Exception):
    """There was no place, or no thread, in time."""


class Place:
    """One place, held until `give_back` (idempotent) or the end of `with`."""

    def __init__(self, shares: "Shares", tenant: Hashable) -> None:
        self._shares: Shares | None = shares
        self.tenant = tenant

    def give_back(self) -> None:
        if (shares := self._shares) is not None:
            self._shares = None
            shares.give_back(self.tenant)

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()


class Shares:
    """`total` places, at least one for each tenant. Lives in one event loop."""

    def __init__(
        self,
        total: int,
        tenants: Iterable[Hashable],
        wait_seconds: float = WAIT_SECONDS,
        refusal: Callable[[str], Exception] = TooBusy,
    ) -> None:
        """`refusal` makes the exception for a request that found no place, of a text for its client."""
        self._waiting: dict[Hashable, deque[trio.Event]] = {tenant: deque() for tenant in tenants}
        self._held: Counter[Hashable] = Counter()
        self._wait_seconds = wait_seconds
        self._refusal = refusal
        count = max(1, len(self._waiting))
        self.total = max(total, count)
        self.share = max(1, self.total // (2 * count))
        self._free = self.total
        self.refusals = 0

    def of_each(self) -> dict[str, int]:
        """Places of each tenant, under numbered names."""
        return {f"tenant {at}": count for at, count in enumerate(list(self._held.values()))}

    def show(self, bounds: Bounds, limit: Limit) -> None:
        bounds.watch(limit, self.of_each, lambda: self.refusals, self.total)

    @property
    def held(self) -> int:
        return self.total - self._free

    async def take(self, tenant: Hashable) -> Place:
        """A place; one tenant's requests in order. Raises the refusal where there was none in time."""
        place = None if self._waiting[tenant] else self.take_now(tenant)
        if place is not None:
            return place
        granted = trio.Event()
        self._waiting[tenant].append(granted)
        try:
            with trio.move_on_after(self._wait_seconds):
                await granted.wait()
        except BaseException:
            if granted.is_set():
                self.give_back(tenant)
            else:
                self._waiting[tenant].remove(granted)
            raise
        if not granted.is_set():
            self._waiting[tenant].remove(granted)
            self.refusals += 1
            raise self._refusal("Too many bodies of this tenant are under way. Please try again.")
        return Place(self, tenant)

    def take_now(self, tenant: Hashable) -> Place | None:
        if not self._may_have(tenant):
            return None
        self._count(tenant, 1)
        return Place(self, tenant)

    def give_back(self, tenant: Hashable) -> None:
        """Free a place of the tenant's. It goes to the waiting tenant with the fewest that may have it."""
        self._count(tenant, -1)
        wanting = [each for each, waiting in self._waiting.items() if waiting and self._may_have(each)]
        if wanting:
            following = min(wanting, key=lambda each: self._held[each])
            self._count(following, 1)
            self._waiting[following].popleft().set()

    def _may_have(self, tenant: Hashable) -> bool:
        if self._held[tenant] < self.share:
            return True  # for it was owed to nobody else
        owed = sum(max(0, self.share - self._held[each]) for each in self._waiting if each != tenant)
        return self._free > owed

    def _count(self, tenant: Hashable, change: int) -> None:
        self._held[tenant] += change
        self._free -= change
        assert 0 <= self._free <= self.total, "reserved places stay reserved"
