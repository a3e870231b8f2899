"""One tenant's slow clients and hung drives, and what others have of the door meanwhile."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from agent.http.connection import RECEIVE_BYTES, UNACKNOWLEDGED_BYTES
from agent.http.shares import Shares
from agent.s3.chunked import UNSIGNED_TRAILER
from agent.s3.service import CONNECTIONS
from tests.support.engines.s3_served import (
    OTHER_KEY,
    SOCKET_SECONDS,
    Served,
    answer_of,
    served,
    signed_head,
)
from tests.support.waiting import wait_until

BUCKET = "blocks"


def slow_reader(s3: Served, key: str) -> socket.socket:
    """A client that has asked for an object and takes nothing of it yet."""
    made = s3.connect()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.sendall(signed_head("GET", f"/blocks/{key}")[0])
    assert made.recv(1000).startswith(b"HTTP/1.1 200")
    return made


def no_place_is_held(s3: Served) -> None:
    """A reader gives its place back a moment after its file is closed."""
    wait_until(lambda: s3.door._service.transfers.held == 0, what="all places to be given back")


def test_slow_readers_of_a_tenant_do_not_keep_the_others_out(tmp_path: Path) -> None:
    with served(tmp_path, transfers=4, idle_s=60) as s3:
        client, other = s3.client(), s3.client(OTHER_KEY)
        client.put_object(Bucket=BUCKET, Key="big", Body=bytes(16 << 20))
        with contextlib.ExitStack() as readers:
            for _ in range(3):  # all that are not owed to the other
                readers.enter_context(slow_reader(s3, "big"))
            for number in range(5):
                other.put_object(Bucket=BUCKET, Key="a", Body=b"%d" % number)
                assert other.get_object(Bucket=BUCKET, Key="a")["Body"].read() == b"%d" % number
            # Nobody had to wait until they were let go.
            assert s3.door._service.transfers.held >= 3
        wait_until(lambda: s3.stores["one"].files.gauges().open_files == 0, what="the readers to be let go")
        client.put_object(Bucket=BUCKET, Key="small", Body=b"x")


def test_who_has_no_place_in_time_is_told_to_slow_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, refusal = Shares.__init__.__defaults__ or ()
    monkeypatch.setattr(Shares.__init__, "__defaults__", (0.1, refusal))
    with served(tmp_path, transfers=2, idle_s=10) as s3:
        client = s3.client()
        client.put_object(Bucket=BUCKET, Key="big", Body=bytes(16 << 20))
        reader = slow_reader(s3, "big")
        for call in (
            lambda: client.put_object(Bucket=BUCKET, Key="a", Body=b"x"),
            lambda: client.get_object(Bucket=BUCKET, Key="big"),
            lambda: client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "a"}]}),
        ):
            with pytest.raises(ClientError) as refused:
                call()
            assert refused.value.response["Error"]["Code"] == "SlowDown"
            assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
        assert client.list_objects_v2(Bucket=BUCKET)["KeyCount"] == 1
        reader.close()
        wait_until(lambda: s3.stores["one"].files.gauges().open_files == 0)
        no_place_is_held(s3)
        client.put_object(Bucket=BUCKET, Key="a", Body=b"x")


def test_who_takes_nothing_of_one_piece_has_a_place_and_little_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, refusal = Shares.__init__.__defaults__ or ()
    monkeypatch.setattr(Shares.__init__, "__defaults__", (0.1, refusal))
    with served(tmp_path, transfers=2, idle_s=10) as s3:
        client = s3.client()
        client.put_object(Bucket=BUCKET, Key="big", Body=bytes(1 << 20))
        with slow_reader(s3, "big"):
            with pytest.raises(ClientError) as refused:
                client.get_object(Bucket=BUCKET, Key="big")
            assert refused.value.response["Error"]["Code"] == "SlowDown"
            assert 0 < unacknowledged(s3.port) <= UNACKNOWLEDGED_BYTES
        no_place_is_held(s3)
    assert CONNECTIONS.bytes_each >= UNACKNOWLEDGED_BYTES + RECEIVE_BYTES


def unacknowledged(port: int) -> int:
    """Bytes that the kernel keeps for the peers of a port of loopback."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(
        int(row[4].split(":")[0], 16)
        for row in rows
        if int(row[1].split(":")[1], 16) == port and row[3] != "0A"
    )  # a listener's is its backlog


def test_a_tenant_has_no_more_than_its_share_of_the_connections(tmp_path: Path) -> None:
    with served(tmp_path, connections=8) as s3:
        held = []
        for _ in range(6):
            held.append(s3.connect())
            held[-1].sendall(signed_head("HEAD", "/blocks")[0])
            assert held[-1].recv(1000).startswith(b"HTTP/1.1 200")
        with s3.connect() as one_more:
            one_more.sendall(signed_head("GET", "/")[0])
            status, body = answer_of(one_more)
            assert (status, b"SlowDown" in body) == (503, True)
        assert s3.client(OTHER_KEY).list_buckets()["Buckets"]
        for each in held:
            each.close()
        wait_until(lambda: s3.door.counters.connections <= 1)
        assert s3.client().list_buckets()["Buckets"]


def test_a_crowd_of_one_peer_leaves_room_for_a_client_with_a_key(tmp_path: Path) -> None:
    with served(tmp_path, connections=16) as s3:
        crowd = []
        for _ in range(16):
            crowd.append(s3.connect())
        # Of 16 a peer without a key has 7, and the others are hung up on at once.
        wait_until(lambda: s3.door.counters.connections_refused >= 9)
        wait_until(lambda: s3.door.counters.connections == 7)
        with s3.connect_from("127.0.0.2") as other:
            other.sendall(signed_head("GET", "/")[0])
            assert answer_of(other)[0] == 200
            with s3.connect_from("127.0.0.2") as another:
                another.sendall(signed_head("GET", "/")[0])
                assert answer_of(another)[0] == 200
        [row] = [row for row in s3.bounds.snapshot() if row["name"] == "s3-connections"]
        assert (row["limit"], row["refusals"]) == (16, s3.door.counters.connections_refused)
        for each in crowd:
            each.close()
        wait_until(lambda: s3.door.counters.connections == 0)
        assert s3.client().list_buckets()["Buckets"]


def lists(s3: Served, address: str) -> bool:
    """Whether a client with a key, at that address, is served; some of its tries may be cut off."""
    for _ in range(20):
        with contextlib.suppress(OSError), s3.connect_from(address) as asking:
            asking.sendall(signed_head("GET", "/")[0])
            if answer_of(asking)[0] == 200:
                return True
    return False


def test_a_crowd_behind_its_own_address_gives_way_to_a_client_with_a_key(tmp_path: Path) -> None:
    with served(tmp_path, connections=16) as s3, contextlib.ExitStack() as crowd:
        for _ in range(300):
            half_said = crowd.enter_context(s3.connect())
            half_said.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n")
        began = time.monotonic()
        for _ in range(5):
            assert lists(s3, "127.0.0.1")
        assert time.monotonic() - began < SOCKET_SECONDS, "none of its tries was left to wait"
        assert s3.door.counters.connections <= 16


def test_connections_without_a_key_at_many_addresses_give_way(tmp_path: Path) -> None:
    with served(tmp_path, connections=16) as s3, contextlib.ExitStack() as crowd:
        for number in range(40):
            crowd.enter_context(s3.connect_from(f"127.0.1.{number}")).sendall(b"GET / HTTP/1.1\r\n")
        began = time.monotonic()
        assert lists(s3, "127.0.0.1")
        assert time.monotonic() - began < SOCKET_SECONDS


@contextmanager
def hung_reads(s3: Served, tenant: str = "one") -> Iterator[Callable[[], int]]:
    """The drives of a tenant do not answer; how many reads wait for them."""
    healed, waiting = threading.Event(), [0]

    def before(step: str) -> None:
        if step == "get":
            waiting[0] += 1
            healed.wait(30)

    s3.blocks[tenant].before = before
    try:
        yield lambda: waiting[0]
    finally:
        s3.blocks[tenant].before = lambda step: None
        healed.set()


def test_what_needs_the_index_alone_does_not_wait_for_drives_that_hang(s3: Served) -> None:
    client = s3.client()
    client.put_object(Bucket=BUCKET, Key="a", Body=bytes(1 << 20))
    found: list[bytes] = []

    def read() -> None:
        found.append(s3.client().get_object(Bucket=BUCKET, Key="a")["Body"].read())

    readers = [threading.Thread(target=read) for _ in range(6)]
    with hung_reads(s3) as waiting:
        for reader in readers:
            reader.start()
        wait_until(lambda: waiting() == s3.section.workers)
        assert client.list_buckets()["Buckets"]
        assert client.head_object(Bucket=BUCKET, Key="a")["ContentLength"] == 1 << 20
        assert client.list_objects_v2(Bucket=BUCKET)["KeyCount"] == 1
        upload = client.create_multipart_upload(Bucket=BUCKET, Key="b")["UploadId"]
        assert client.list_parts(Bucket=BUCKET, Key="b", UploadId=upload)["IsTruncated"] is False
        client.create_bucket(Bucket="another")
        client.delete_bucket(Bucket="another")
    for reader in readers:
        reader.join()
    assert found == [bytes(1 << 20)] * 6


def in_crumbs(s3: Served, target: str, headers: dict[str, Any], body: bytes) -> bytes:
    """What comes back to a body that is in small chunks."""
    with s3.connect() as connection:
        words = {"x-amz-decoded-content-length": "400000", **headers}
        with contextlib.suppress(ConnectionError):
            connection.sendall(signed_head("PUT", target, words, UNSIGNED_TRAILER)[0] + body)
        return answer_of(connection)[1]


def test_bodies_in_chunks_of_a_byte_are_refused_at_once(s3: Served) -> None:
    inner = b"61a80\r\n" + b"x" * 400_000 + b"\r\n0\r\n\r\n"
    crumbs = b"".join(b"1\r\n%c\r\n" % each for each in inner) + b"0\r\n\r\n"
    assert b"InvalidChunkSizeError" in in_crumbs(s3, "/blocks/a", {"transfer-encoding": "chunked"}, crumbs)
    crumbs = b"1\r\nx\r\n" * 400_000 + b"0\r\n\r\n"
    length = {"content-length": str(len(crumbs))}
    assert b"InvalidChunkSizeError" in in_crumbs(s3, "/blocks/a", length, crumbs)
    assert s3.client().list_objects_v2(Bucket=BUCKET)["KeyCount"] == 0
