"""RDMA connections of tenants: whose they are, how many, and when they end."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import cast

import pytest
import trio

from agent.s3.errors import S3Error
from agent.s3.rdma.connections import FRESH_SECONDS, IDLE_SECONDS, Caller, ClientConnections
from agent.s3.rdma.engine import Connection


class Pair:
    """A connection without a device."""

    def __init__(self) -> None:
        self.why = ""

    def over(self) -> str:
        return self.why


def caller(tenant: str, peer: str = "10.1.0.7", age: float = 100.0) -> Caller:
    return Caller(tenant, peer, age)


class Table:
    """The connections of tenants `one` and `two`, four at once, and those that were ended."""

    def __init__(self, total: int = 4) -> None:
        self.ended: list[Connection] = []
        self.now = 0.0
        self.connections = ClientConnections(total, ["one", "two"], self.ended.append, lambda: self.now)

    def add(self, tenant: str, now: float = 0.0) -> str:
        async def make() -> Connection:
            return cast(Connection, Pair())

        self.now = now
        return trio.run(self.connections.add, caller(tenant), make).name

    def use(self, name: str, who: Caller, now: float = 0.0) -> AbstractContextManager[Connection]:
        self.now = now
        return self.connections.use(name, who)


def test_a_connection_is_its_tenants_alone_at_one_address() -> None:
    table = Table()
    name = table.add("one")
    with table.use(name, caller("one"), 1.0) as connection:
        assert not connection.over()
    for stranger, what in (
        (caller("two"), name),
        (caller("one"), "0" * 32),
        (caller("one", "10.1.0.8"), name),
    ):
        with (
            pytest.raises(S3Error, match="no such RDMA connection") as caught,
            table.use(what, stranger, 1.0),
        ):
            pass
        assert dict(caught.value.headers) == {"x-amz-rdma-protocol-status": "unconnected"}
    for stranger in (caller("two"), caller("one", "10.1.0.8")):
        with pytest.raises(S3Error, match="no such RDMA connection"):
            table.connections.remove(name, stranger)
    table.connections.remove(name, caller("one"))
    assert len(table.connections) == 0
    assert len(table.ended) == 1


def test_a_request_is_as_fresh_as_the_connect_was() -> None:
    table = Table()
    name = table.add("one")
    for age in (100.0, 100.0 + FRESH_SECONDS, -9.0):
        with table.use(name, caller("one", age=age)):
            pass
    with pytest.raises(S3Error) as caught, table.use(name, caller("one", age=101.0 + FRESH_SECONDS)):
        pass
    assert caught.value.code == "RequestTimeTooSkewed"


def test_half_of_the_places_are_owed_to_the_other_tenant() -> None:
    table = Table()
    names = [table.add("one", now) for now in (1.0, 2.0, 3.0)]
    # The place of its own connection that rested longest goes to its next one.
    names.append(table.add("one", 4.0))
    assert len(table.ended) == 1
    assert table.add("two", 5.0)
    with pytest.raises(S3Error, match="no such"), table.use(names[0], caller("one"), 6.0):
        pass
    with table.use(names[1], caller("one"), 6.0):
        pass


def test_a_tenant_whose_connections_are_all_in_use_has_to_wait() -> None:
    table = Table()
    names = [table.add("one") for _ in range(3)]
    with (
        table.use(names[0], caller("one"), 1.0),
        table.use(names[1], caller("one"), 1.0),
        table.use(names[2], caller("one"), 1.0),
        pytest.raises(S3Error) as caught,
    ):
        table.add("one")
    assert caught.value.code == "SlowDown"
    assert table.connections.shares.refusals == 1
    assert not table.ended


def test_a_connection_that_could_not_be_made_has_no_place() -> None:
    table = Table()

    async def fails() -> Connection:
        raise OSError

    for _ in range(9):
        with pytest.raises(OSError):
            trio.run(table.connections.add, caller("one"), fails)
    assert table.connections.shares.held == 0


def test_a_connection_that_broke_goes_with_the_request_that_it_has() -> None:
    table = Table()
    name = table.add("one")
    with table.use(name, caller("one"), 1.0) as connection:
        with pytest.raises(S3Error, match="one request at a time"), table.use(name, caller("one"), 1.0):
            pass
        cast(Pair, connection).why = "remote access error"
        assert not table.ended
        with pytest.raises(S3Error, match="connect again"), table.use(name, caller("one"), 1.0):
            pass
    assert table.ended == [connection]
    assert table.connections.shares.held == 0


def test_a_connection_that_nobody_uses_ends_and_so_does_that_of_an_erased_tenant() -> None:
    table = Table()
    old, busy, erased = table.add("one"), table.add("one"), table.add("two", IDLE_SECONDS)
    with table.use(busy, caller("one")):
        table.now = IDLE_SECONDS
        table.connections.end_idle()
        assert not table.ended
        table.now = IDLE_SECONDS + 1
        table.connections.end_idle()
        assert len(table.ended) == 1
    # A long use ends now: the rest begins.
    table.connections.end_idle()
    assert len(table.ended) == 1
    table.connections.end_idle(lambda tenant: tenant == "two")
    assert len(table.ended) == 2
    with pytest.raises(S3Error), table.use(old, caller("one")):
        pass
    with pytest.raises(S3Error), table.use(erased, caller("two")):
        pass
    table.connections.close()
    assert len(table.connections) == 0
    assert table.connections.shares.held == 0
