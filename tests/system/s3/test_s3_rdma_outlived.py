"""Requests by RDMA that outlive their clients, are sent twice, or meet a device that fails."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from agent.bench.s3_rdma_client import Refused, S3RdmaClient, crc_of
from agent.s3 import store
from agent.s3.rdma import engine
from agent.s3.rdma.service import CRC
from agent.s3.rdma.token import SESSION, TOKEN
from agent.s3.signature import EMPTY_SHA256
from nvmeof.errors import ConnectionLost
from nvmeof.transport.rdma_direct import DirectPair, PairEnd, gid_of
from tests.support.engines.s3_rdma import rdma_client, rdma_served
from tests.support.engines.s3_served import OTHER_KEY, Served, answer_of, served, signed_head
from tests.support.waiting import wait_until

MIB = 1 << 20
OLD = b"o" * (4 * MIB)


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[Served]:
    with rdma_served(tmp_path, rdma_connections=8, transfers=4) as made:
        made.client().put_object(Bucket="blocks", Key="a", Body=OLD, ChecksumAlgorithm="CRC64NVME")
        yield made


@pytest.fixture
def client(s3: Served) -> Iterator[S3RdmaClient]:
    with rdma_client(s3) as made:
        made.connect()
        yield made


class Gate:
    """Calls wait here until it is opened."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real = real
        self.came, self.opened = threading.Event(), threading.Event()

    def call(self, *arguments: Any) -> Any:
        self.came.set()
        assert self.opened.wait(30.0)
        return self._real(*arguments)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[object, str], Gate]]:
    made: list[Gate] = []

    def put(owner: Any, name: str) -> Gate:
        made.append(Gate(getattr(owner, name)))
        # A function, so that it becomes a method.
        monkeypatch.setattr(owner, name, lambda *arguments: made[-1].call(*arguments))
        return made[-1]

    yield put
    for each in made:
        each.opened.set()


def send(s3: Served, client: S3RdmaClient, method: str, path: str, headers: dict[str, str]) -> socket.socket:
    """A request on a HTTP connection of its own, from the address of the client."""
    connection = s3.connect_from(client.source)
    connection.sendall(signed_head(method, path, {"content-length": "0", **headers})[0])
    return connection


def answered(connection: socket.socket) -> tuple[int, bytes]:
    with connection:
        return answer_of(connection)


# --- clients that gave a request up -------------------------------------------------------------------------


def test_nothing_is_written_for_a_client_that_gave_its_get_up(
    s3: Served, client: S3RdmaClient, gate: Callable[[object, str], Gate]
) -> None:
    memory = memoryview(bytearray(4 * MIB))
    token = client.token(client.register(memory))
    drive = gate(store.ObjectReader, "read")
    given_up = send(s3, client, "GET", "/blocks/a", {TOKEN: token})
    assert drive.came.wait(10.0)
    given_up.close()
    drive.opened.set()
    wait_until(lambda: s3.door.snapshot()["rdma_connections"] == 0)
    assert memory == bytes(4 * MIB)
    with pytest.raises(Refused, match="connect again"):
        client.request("GET", "/blocks/a", {TOKEN: token})


def test_nothing_is_stored_of_a_client_that_gave_its_put_up(
    s3: Served, client: S3RdmaClient, gate: Callable[[object, str], Gate]
) -> None:
    out = client.register(memoryview(bytearray(4 * MIB)))
    drive = gate(store.FileWriter, "write")
    headers = {TOKEN: client.token(out), CRC: crc_of(out.view)}
    given_up = send(s3, client, "PUT", "/blocks/a", headers)
    assert drive.came.wait(10.0)
    given_up.close()
    drive.opened.set()
    wait_until(lambda: s3.door.snapshot()["rdma_connections"] == 0)
    assert s3.client().get_object(Bucket="blocks", Key="a")["Body"].read() == OLD


def test_a_connection_has_one_request_at_a_time(
    s3: Served, client: S3RdmaClient, gate: Callable[[object, str], Gate]
) -> None:
    token = client.token(client.register(memoryview(bytearray(4 * MIB))))
    drive = gate(store.ObjectReader, "read")
    first = send(s3, client, "GET", "/blocks/a", {TOKEN: token})
    assert drive.came.wait(10.0)
    with pytest.raises(Refused, match="SlowDown") as caught:
        client.request("GET", "/blocks/a", {TOKEN: token})
    assert caught.value.status == 503
    drive.opened.set()
    assert answered(first)[0] == 200
    client.request("GET", "/blocks/a", {TOKEN: token})


def test_a_put_needs_a_checksum_and_may_sign_the_empty_body(s3: Served, client: S3RdmaClient) -> None:
    out = client.register(memoryview(bytearray(b"12345")))
    token = {TOKEN: client.token(out), "content-length": "0"}
    with pytest.raises(Refused, match="needs a checksum") as caught:
        client.request("PUT", "/blocks/b", token)
    assert caught.value.status == 400
    for headers, status in (({}, 400), ({CRC: crc_of(out.view)}, 200)):
        with s3.connect_from(client.source) as connection:
            connection.sendall(signed_head("PUT", "/blocks/b", {**token, **headers}, EMPTY_SHA256)[0])
            assert answer_of(connection)[0] == status
    assert s3.client().get_object(Bucket="blocks", Key="b")["Body"].read() == b"12345"


# --- requests that are sent again ---------------------------------------------------------------------------


def test_a_recorded_request_is_of_no_use_elsewhere_or_later(s3: Served, client: S3RdmaClient) -> None:
    memory = memoryview(bytearray(4 * MIB))
    asked = {TOKEN: client.token(client.register(memory))}
    recorded = signed_head("GET", "/blocks/a", asked)[0]
    with s3.connect() as elsewhere:
        elsewhere.sendall(recorded)
        status, words = answer_of(elsewhere)
    assert (status, b"no such RDMA connection" in words) == (400, True)
    ended = signed_head("POST", "/.s3rdma-rc/disconnect", {SESSION: client.session})[0]
    with s3.connect() as elsewhere:
        elsewhere.sendall(ended)
        assert answer_of(elsewhere)[0] == 400
    with s3.connect_from(client.source) as later:
        later.sendall(signed_head("GET", "/blocks/a", asked, ago=20.0)[0])
        status, words = answer_of(later)
    assert (status, b"RequestTimeTooSkewed" in words) == (403, True)
    assert memory == bytes(4 * MIB)
    assert client.get("/blocks/a", client.register(memory)) == len(OLD)


# --- ends ---------------------------------------------------------------------------------------------------


def test_a_disconnect_ends_what_is_under_way(s3: Served, client: S3RdmaClient) -> None:
    token = client.token(client.register(memoryview(bytearray(4 * MIB))))
    session = client.session
    client.drop_pair()
    waiting = send(s3, client, "GET", "/blocks/a", {TOKEN: token})
    wait_until(lambda: bool(s3.engine is not None and s3.engine.transfers))
    assert answered(send(s3, client, "POST", "/.s3rdma-rc/disconnect", {SESSION: session}))[0] == 200
    # Within the socket's time-out, which is less than that of the transfer.
    status, words = answered(waiting)
    assert (status, b"connection broke" in words) == (503, True)


def test_a_device_that_fails_ends_rdma_and_says_so(
    s3: Served, client: S3RdmaClient, monkeypatch: pytest.MonkeyPatch, expects_log: Callable[..., None]
) -> None:
    expects_log(r"objects move by RDMA no more .*: polling: one error")
    region = client.register(memoryview(bytearray(4 * MIB)))
    token = client.token(region)

    def fails(*_: object) -> None:
        raise ConnectionLost("polling: one error")

    with rdma_client(s3) as idle:
        idle.connect()
        monkeypatch.setattr(engine, "poll", fails)
        with pytest.raises(Refused, match="connection broke") as caught:
            client.request("GET", "/blocks/a", {TOKEN: token})
        assert caught.value.status == 503
        for ask in (client.connect, lambda: client.request("GET", "/blocks/a", {TOKEN: token})):
            with pytest.raises(Refused, match="plain HTTP") as caught:
                ask()
            assert caught.value.status == 501
        wait_until(lambda: s3.door.snapshot()["rdma_connections"] == 0)
    assert s3.door.snapshot()["rdma_lost"] == "polling: one error"
    assert s3.client().get_object(Bucket="blocks", Key="a")["Body"].read() == OLD


# --- connects -----------------------------------------------------------------------------------------------


def test_a_slow_connect_keeps_nobody_else_waiting(s3: Served, gate: Callable[[object, str], Gate]) -> None:
    with rdma_client(s3) as slow:
        device = gate(DirectPair, "connect")
        end = PairEnd(17, gid_of(slow.source), 1)
        failures: list[Exception] = []

        def connect() -> None:
            try:
                slow.connect(end)
            except Exception as failure:
                failures.append(failure)

        connecting = threading.Thread(target=connect)
        connecting.start()
        assert device.came.wait(10.0)
        s3.client(OTHER_KEY).put_object(Bucket="blocks", Key="b", Body=b"12345")
        device.opened.set()
        connecting.join()
        assert not failures


def test_nobody_connects_to_the_doors_own_device_or_an_enclosures(tmp_path: Path) -> None:
    with (
        rdma_served(tmp_path, enclosures=("127.0.0.77",), rdma_clients=("127.0.0.0/8",)) as s3,
        rdma_client(s3) as client,
    ):
        for address in (s3.section.rdma, "127.0.0.77"):
            with pytest.raises(Refused, match="AccessDenied"):
                client.connect(PairEnd(17, gid_of(address), 1))
        client.connect()


# --- keys that look like the control paths ------------------------------------------------------------------


@pytest.mark.parametrize("with_rdma", [True, False])
def test_keys_may_begin_as_the_paths_of_rdma_where_the_host_names_the_bucket(
    tmp_path: Path, with_rdma: bool
) -> None:
    with (rdma_served if with_rdma else served)(tmp_path) as s3:
        for path in ("/.s3rdma-rc/connect", "/.hipobj-rc/prepare"):
            with s3.connect() as connection:
                host = {"host": "localhost"}
                connection.sendall(signed_head("PUT", path, {**host, "content-length": "3"})[0] + b"abc")
                assert answer_of(connection)[0] == 200
                connection.sendall(signed_head("GET", path, host)[0])
                assert answer_of(connection) == (200, b"abc")
        with pytest.raises(ClientError, match="MethodNotAllowed" if with_rdma else "NotImplemented"):
            s3.client().get_object(Bucket=".s3rdma-rc", Key="connect")
