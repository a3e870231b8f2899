"""The RDMA connections of the door's clients: whose they are, how many there are, when they end.

A connection is named in requests and belongs to the tenant that made it: for others it does not exist. A
client that dies says nothing, so a connection that nobody uses for `IDLE_SECONDS` ends. A tenant that has
no place left gets that of its own connection that rested longest.

A connection is bound to the address that connected, so a request that was recorded elsewhere is of no use.
It takes one request at a time: no other may touch the client's memory before the first is over. And it
takes fresh requests alone: as old as the connect was when it came, and `FRESH_SECONDS` more. That needs no
list of signatures and no equal clocks, and clients may sign two equal requests in one second.
"""

import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from agent.http.shares import Place, Shares
from agent.s3.errors import S3Error
from agent.s3.rdma.engine import Connection
from agent.s3.rdma.token import STATUS

IDLE_SECONDS: Final = 300.0
FRESH_SECONDS: Final = 15.0
"""Of a request's signature, by its client's clock: a request may wait that long on its way."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request: tenant, address, and how long ago the request was signed, as its client's clock
    has it (seconds; below 0 where that clock is ahead)."""

    tenant: str
    peer: str
    age: float


class ClientConnection:
    """One connection, with its place among those of all tenants."""

    def __init__(self, name: str, caller: Caller, connection: Connection, place: Place, now: float) -> None:
        self.name = name
        self.tenant = caller.tenant
        self.peer = caller.peer
        self.age = caller.age
        self.connection = connection
        self.place = place
        self.used_at = now
        self.is_used = False
        """By a request that is under way."""


class ClientConnections:
    """All of them. Lives in the door's event loop; `clock` gives seconds."""

    def __init__(
        self,
        total: int,
        tenants: Iterable[str],
        disconnect: Callable[[Connection], None],
        clock: Callable[[], float],
    ) -> None:
        self.shares = Shares(total, tenants)
        self._clock = clock
        self._disconnect = disconnect
        self._by_name: dict[str, ClientConnection] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    async def add(self, caller: Caller, make: Callable[[], Awaitable[Connection]]) -> ClientConnection:
        """Make one. Raises S3Error where the tenant has no place, and what `make` raises."""
        tenant = caller.tenant
        place = self.shares.take_now(tenant)
        if place is None and (idle := self._longest_idle(tenant)) is not None:
            self._drop(idle)
            place = self.shares.take_now(tenant)
        if place is None:
            self.shares.refusals += 1
            raise S3Error("SlowDown", "This tenant has too many RDMA connections.")
        try:
            connection = await make()
            made = ClientConnection(secrets.token_hex(16), caller, connection, place, self._clock())
        except BaseException:
            place.give_back()
            raise
        self._by_name[made.name] = made
        return made

    @contextmanager
    def use(self, name: str, caller: Caller) -> Iterator[Connection]:
        """The connection, for one request, which it stays for; it goes after a use that broke it. Raises
        S3Error."""
        found = self._known(name, caller)
        if found.connection.over():
            raise _unknown()
        if found.is_used:
            raise S3Error("SlowDown", "An RDMA connection has one request at a time.")
        found.is_used = True
        try:
            yield found.connection
        finally:
            found.is_used = False
            found.used_at = self._clock()
            if found.connection.over():
                self._drop(found)

    def remove(self, name: str, caller: Caller) -> None:
        """End a connection and what is under way on it. Raises S3Error."""
        self._drop(self._known(name, caller))

    def _known(self, name: str, caller: Caller) -> ClientConnection:
        """For others than who made it there is none. Raises S3Error."""
        found = self._by_name.get(name)
        if found is None or (found.tenant, found.peer) != (caller.tenant, caller.peer):
            raise _unknown()
        if caller.age > found.age + FRESH_SECONDS:
            raise S3Error(
                "RequestTimeTooSkewed",
                f"By RDMA, a request is signed at most {FRESH_SECONDS:.0f} s before it is sent.",
            )
        return found

    def end_idle(self, is_over: Callable[[str], bool] = lambda tenant: False) -> None:
        """End those that rested too long, and all of tenants of which `is_over` is true."""
        now = self._clock()
        for each in list(self._by_name.values()):
            rested = not each.is_used and now - each.used_at > IDLE_SECONDS
            if rested or is_over(each.tenant):
                self._drop(each)

    def close(self) -> None:
        for each in list(self._by_name.values()):
            self._drop(each)

    def _longest_idle(self, tenant: str) -> ClientConnection | None:
        idle = [each for each in self._by_name.values() if each.tenant == tenant and not each.is_used]
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
