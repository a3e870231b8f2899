"""The RDMA connections of the door's clients: whose they are, how many there are, when they end.

A connection is named in requests and belongs to the tenant that made it: for others it does not exist. A
client that dies says nothing, so a connection that nobody uses for `IDLE_SECONDS` ends. A tenant that has
no place left gets that of its own connection that rested longest.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from agent.http.shares import Place, Shares
from agent.s3.errors import S3Error
from agent.s3.rdma.engine import Connection
from agent.s3.rdma.token import STATUS

IDLE_SECONDS: Final = 300.0


class ClientConnection:
    """One connection, with its place among those of all tenants."""

    def __init__(self, name: str, tenant: str, connection: Connection, place: Place, now: float) -> None:
        self.name = name
        self.tenant = tenant
        self.connection = connection
        self.place = place
        self.used_at = now
        self.under_way = 0
        """Requests that use it."""


class ClientConnections:
    """All of them. Lives in the door's event loop; `now` is in seconds of any clock."""

    def __init__(self, total: int, tenants: Iterable[str], disconnect: Callable[[Connection], None]) -> None:
        self.shares = Shares(total, tenants)
        self._disconnect = disconnect
        self._by_name: dict[str, ClientConnection] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def add(self, tenant: str, make: Callable[[], Connection], now: float) -> ClientConnection:
        """Make one. Raises S3Error where the tenant has no place, and what `make` raises."""
        place = self.shares.take_now(tenant)
        if place is None and (idle := self._longest_idle(tenant)) is not None:
            self._drop(idle)
            place = self.shares.take_now(tenant)
        if place is None:
            self.shares.refusals += 1
            raise S3Error("SlowDown", "This tenant has too many RDMA connections.")
        try:
            made = ClientConnection(secrets.token_hex(16), tenant, make(), place, now)
        except BaseException:
            place.give_back()
            raise
        self._by_name[made.name] = made
        return made

    @contextmanager
    def use(self, name: str, tenant: str, now: float) -> Iterator[Connection]:
        """The connection, which stays meanwhile; it goes after a use that broke it. Raises S3Error."""
        found = self._by_name.get(name)
        if found is None or found.tenant != tenant or found.connection.over():
            raise _unknown()
        found.used_at = now
        found.under_way += 1
        try:
            yield found.connection
        finally:
            found.under_way -= 1
            if found.connection.over() and not found.under_way:
                self._drop(found)

    def remove(self, name: str, tenant: str) -> None:
        """End a connection and what is under way on it. Raises S3Error."""
        found = self._by_name.get(name)
        if found is None or found.tenant != tenant:
            raise _unknown()
        self._drop(found)

    def end_idle(self, now: float, is_over: Callable[[str], bool] = lambda tenant: False) -> None:
        """End those that rested too long, and all of tenants of which `is_over` is true."""
        for each in list(self._by_name.values()):
            rested = not each.under_way and now - each.used_at > IDLE_SECONDS
            if rested or is_over(each.tenant):
                self._drop(each)

    def close(self) -> None:
        for each in list(self._by_name.values()):
            self._drop(each)

    def _longest_idle(self, tenant: str) -> ClientConnection | None:
        idle = [each for each in self._by_name.values() if each.tenant == tenant and not each.under_way]
        return min(idle, key=lambda each: each.used_at, default=None)

    def _drop(self, each: ClientConnection) -> None:
        if self._by_name.pop(each.name, None) is not None:
            each.place.give_back()
            self._disconnect(each.connection)


def _unknown() -> S3Error:
    return S3Error(
        "InvalidArgument",
        "There is no such RDMA connection, or it is over. Please connect again.",
        headers=[(STATUS, "unconnected")],
    )
