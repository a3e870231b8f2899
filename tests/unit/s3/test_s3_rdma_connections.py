"""RDMA connections of tenants: whose they are, how many, and when they end."""

from __future__ import annotations

from typing import cast

import pytest

from agent.s3.errors import S3Error
from agent.s3.rdma.connections import IDLE_SECONDS, ClientConnections
from agent.s3.rdma.engine import Connection


class Pair:
    """A connection without a device."""

    def __init__(self) -> None:
        self.why = ""

    def over(self) -> str:
        return self.why


class Table:
    """The connections of tenants `one` and `two`, four at once, and those that were ended."""

    def __init__(self, total: int = 4) -> None:
        self.ended: list[Connection] = []
        self.connections = ClientConnections(total, ["one", "two"], self.ended.append)

    def add(self, tenant: str, now: float = 0.0) -> str:
        return self.connections.add(tenant, lambda: cast(Connection, Pair()), now).name


def test_a_connection_is_its_tenants_alone() -> None:
    table = Table()
    name = table.add("one")
    with table.connections.use(name, "one", 1.0) as connection:
        assert not connection.over()
    for stranger, what in (("two", name), ("one", "0" * 32)):
        with (
            pytest.raises(S3Error, match="no such RDMA connection") as caught,
            table.connections.use(what, stranger, 1.0),
        ):
            pass
        assert dict(caught.value.headers) == {"x-amz-rdma-protocol-status": "unconnected"}
    with pytest.raises(S3Error, match="no such RDMA connection"):
        table.connections.remove(name, "two")
    table.connections.remove(name, "one")
    assert len(table.connections) == 0
    assert len(table.ended) == 1


def test_half_of_the_places_are_owed_to_the_other_tenant() -> None:
    table = Table()
    names = [table.add("one", now) for now in (1.0, 2.0, 3.0)]
    # The place of its own connection that rested longest goes to its next one.
    names.append(table.add("one", 4.0))
    assert len(table.ended) == 1
    assert table.add("two", 5.0)
    with pytest.raises(S3Error, match="no such"), table.connections.use(names[0], "one", 6.0):
        pass
    with table.connections.use(names[1], "one", 6.0):
        pass


def test_a_tenant_whose_connections_are_all_in_use_has_to_wait() -> None:
    table = Table()
    names = [table.add("one") for _ in range(3)]
    with (
        table.connections.use(names[0], "one", 1.0),
        table.connections.use(names[1], "one", 1.0),
        table.connections.use(names[2], "one", 1.0),
        pytest.raises(S3Error) as caught,
    ):
        table.add("one")
    assert caught.value.code == "SlowDown"
    assert table.connections.shares.refusals == 1
    assert not table.ended


def test_a_connection_that_could_not_be_made_has_no_place() -> None:
    table = Table()

    def fails() -> Connection:
        raise OSError

    for _ in range(9):
        with pytest.raises(OSError):
            table.connections.add("one", fails, 0.0)
    assert table.connections.shares.held == 0


def test_a_connection_that_broke_goes_when_its_last_request_does() -> None:
    table = Table()
    name = table.add("one")
    with table.connections.use(name, "one", 1.0) as connection:
        with table.connections.use(name, "one", 1.0):
            cast(Pair, connection).why = "remote access error"
        assert not table.ended
        with pytest.raises(S3Error, match="connect again"), table.connections.use(name, "one", 1.0):
            pass
    assert table.ended == [connection]
    assert table.connections.shares.held == 0


def test_a_connection_that_nobody_uses_ends_and_so_does_that_of_an_erased_tenant() -> None:
    table = Table()
    old, busy, erased = table.add("one"), table.add("one"), table.add("two", IDLE_SECONDS)
    with table.connections.use(busy, "one", 0.0):
        table.connections.end_idle(IDLE_SECONDS)
        assert not table.ended
        table.connections.end_idle(IDLE_SECONDS + 1)
        assert len(table.ended) == 1
    table.connections.end_idle(IDLE_SECONDS, lambda tenant: tenant == "two")
    assert len(table.ended) == 2
    with pytest.raises(S3Error), table.connections.use(old, "one", 0.0):
        pass
    with pytest.raises(S3Error), table.connections.use(erased, "two", 0.0):
        pass
    table.connections.close()
    assert len(table.connections) == 0
    assert table.connections.shares.held == 0
