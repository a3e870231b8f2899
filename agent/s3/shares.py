"""Places that tenants share: connections, and bodies that move.

Half of all places are common, and the other half is owed in equal shares: a tenant that holds less than its
share finds a place, whatever the others do; beyond it, it gets what is not owed to anybody. So a tenant that
is alone has them all but the others' shares, and nobody has to say in advance who will need how many. A
tenant is whatever stands for one, its name or its store.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from types import TracebackType
from typing import Final

import trio

from agent.s3.errors import S3Error

WAIT_SECONDS: Final = 20.0
"""Then it is SlowDown, which SDKs try again: well before they give up waiting, which they do after 60 s."""


class Place:
    """What a tenant holds until `give_back`, which may be called again, or the end of `with`."""

    def __init__(self, shares: Shares, tenant: Hashable) -> None:
        self._shares: Shares | None = shares
        self.tenant = tenant

    def give_back(self) -> None:
        if (shares := self._shares) is not None:
            self._shares = None
            shares.give_back(self.tenant)

    def __enter__(self) -> Place:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.give_back()


class Shares:
    """`total` places, but one for each tenant at the least. Lives in one event loop."""

    def __init__(self, total: int, tenants: Iterable[Hashable], wait_seconds: float = WAIT_SECONDS) -> None:
        self._waiting: dict[Hashable, deque[trio.Event]] = {tenant: deque() for tenant in tenants}
        self._held: Counter[Hashable] = Counter()
        self._wait_seconds = wait_seconds
        count = max(1, len(self._waiting))
        self.total = max(total, count)
        self.share = max(1, self.total // (2 * count))
        self._free = self.total
        self.refusals = 0

    def of_each(self) -> dict[str, int]:
        """How many each tenant holds, by a name of ours."""
        return {f"tenant {at}": count for at, count in enumerate(list(self._held.values()))}

    @property
    def held(self) -> int:
        """How many places are held now."""
        return self.total - self._free

    async def take(self, tenant: Hashable) -> Place:
        """Raises S3Error where there was none in time. Of one tenant, who waits longest is next."""
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
            raise S3Error("SlowDown", "Too many bodies of this tenant are under way. Please try again.")
        return Place(self, tenant)

    def take_now(self, tenant: Hashable) -> Place | None:
        """None where there is none to be had."""
        if not self._may_have(tenant):
            return None
        self._count(tenant, 1)
        return Place(self, tenant)

    def give_back(self, tenant: Hashable) -> None:
        """A place of the tenant's is free; it goes on to whoever waits, has fewest, and may have it."""
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
        assert 0 <= self._free <= self.total, "what is owed is never given away"
