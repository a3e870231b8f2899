"""Clients that mean no good, or are broken: what they cost, and that others are served meanwhile."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from agent.http.connection import HEAD_BYTES_MAX
from agent.s3.chunked import SIGNED, UNSIGNED_TRAILER
from tests.support.engines.s3_served import Served, answer_of, served, signed_head
from tests.support.waiting import wait_until

BUCKET = "blocks"


def send(s3: Served, head: bytes, body: bytes = b"", *, shut: bool = False) -> tuple[int, bytes]:
    """One request on a connection of its own, and what comes back."""
    with s3.connect() as connection:
        connection.sendall(head + body)
        if shut:
            connection.shutdown(socket.SHUT_WR)
        return answer_of(connection)


def put_head(target: str = "/blocks/a", payload: str = "UNSIGNED-PAYLOAD", **headers: str) -> bytes:
    found = {name.replace("_", "-"): text for name, text in headers.items()}
    return signed_head("PUT", target, found, payload)[0]


def is_there(s3: Served, key: str = "a") -> bool:
    return bool(s3.client().list_objects_v2(Bucket=BUCKET, Prefix=key)["KeyCount"])


def holds_nothing(s3: Served) -> bool:
    return not s3.blocks["one"].blocks and not s3.stores["one"].index.spare(9)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /blocks/a HTTP/1.1\r\nhost: x\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n", 501),
        (b"PUT /blocks/a HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 4 * HEAD_BYTES_MAX + b"\r\n\r\n", 400),
        (b"GET /%00 HTTP/1.1\r\nhost: a\r\n\r\n", 403),
    ],
    ids=range(9),
)
def test_what_is_no_request_or_nobodys_is_refused(s3: Served, head: bytes, status: int) -> None:
    found = send(s3, head)[0]
    assert found in (status, 400), found
    assert s3.client().list_buckets()["Buckets"]


@pytest.mark.parametrize(
    "target", ["/blocks/../../etc/passwd", "/blocks/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/blocks//a/./b/../c"]
)
def test_a_key_that_looks_like_a_path_is_a_key(s3: Served, target: str) -> None:
    assert send(s3, put_head(target, content_length="4"), b"body")[0] == 200
    assert send(s3, signed_head("GET", target)[0]) == (200, b"body")
    assert s3.client().list_objects_v2(Bucket=BUCKET)["KeyCount"] == 1


@pytest.mark.parametrize("target", ["/blocks/a%00b", "/blocks/" + "k" * 1025, "/blocks/%ff"])
def test_a_key_that_is_none_is_refused(s3: Served, target: str) -> None:
    assert send(s3, put_head(target, content_length="4"), b"body")[0] == 400
    assert s3.client().list_objects_v2(Bucket=BUCKET)["KeyCount"] == 0


def test_a_body_that_ends_early_stores_nothing(s3: Served) -> None:
    status, _ = send(s3, put_head(content_length=str(3 << 20)), bytes(2 << 20), shut=True)
    assert status in (0, 400)
    wait_until(lambda: holds_nothing(s3), what="what was written to be freed")
    assert not is_there(s3)


def test_a_body_that_is_not_what_was_signed_stores_nothing(s3: Served) -> None:
    said = hashlib.sha256(b"good").hexdigest()
    status, body = send(s3, put_head(payload=said, content_length="4"), b"evil")
    assert (status, b"XAmzContentSHA256Mismatch" in body) == (400, True)
    assert send(s3, put_head(payload="nonsense", content_length="4"), b"evil")[0] == 400
    wait_until(lambda: holds_nothing(s3))
    assert not is_there(s3)


def chunked(
    change: Callable[[bytes], bytes] = bytes, length: int = 70_000, said: int = 70_000
) -> tuple[bytes, bytes]:
    """Head and body in two signed chunks and an empty one; `change` is what somebody on the way does."""
    headers = {"x-amz-decoded-content-length": str(said), "content-encoding": "aws-chunked"}
    parts = [b"a" * 65_536, b"b" * (length - 65_536), b""]
    overhead = sum(len(f"{len(part):x};chunk-signature=\r\n\r\n") + 64 for part in parts)
    headers["content-length"] = str(length + overhead)
    head, signer = signed_head("PUT", "/blocks/a", headers, SIGNED)
    body, previous = b"", signer.signature
    for part in parts:
        empty, own = hashlib.sha256().hexdigest(), hashlib.sha256(part).hexdigest()
        previous = signer.chunk_signature(previous, f"{empty}\n{own}")
        body += f"{len(part):x};chunk-signature={previous}\r\n".encode() + part + b"\r\n"
    return head, change(body)


def test_signed_chunks_are_taken(s3: Served) -> None:
    assert send(s3, *chunked())[0] == 200
    assert s3.client().get_object(Bucket=BUCKET, Key="a")["Body"].read() == b"a" * 65_536 + b"b" * 4464


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.replace(b"aaaa", b"aaab", 1),
        lambda body: body.replace(b"bbbb\r\n0;", b"bbbc\r\n0;", 1),
        lambda body: body.replace(b"10000;", b"fffff;", 1),
        lambda body: body.replace(b"chunk-signature", b"chunk_signature", 1),
    ],
)
def test_chunks_that_somebody_changed_store_nothing(s3: Served, change: Callable[[bytes], bytes]) -> None:
    assert send(s3, *chunked(change))[0] in (400, 403)
    wait_until(lambda: holds_nothing(s3))
    assert not is_there(s3)


def test_a_decoded_length_that_lies_stores_nothing(s3: Served) -> None:
    for said in (69_999, 70_001):
        assert send(s3, *chunked(said=said))[0] == 400
    unsigned = put_head(payload=UNSIGNED_TRAILER, x_amz_decoded_content_length="5", content_length="10")
    assert send(s3, unsigned, b"5\r\nhello\r\n", shut=True)[0] == 400
    wait_until(lambda: holds_nothing(s3))
    assert not is_there(s3)


def test_a_trailer_that_was_not_announced_stores_nothing(s3: Served) -> None:
    body = b"5\r\nhello\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n"
    head = put_head(payload=UNSIGNED_TRAILER, x_amz_decoded_content_length="5", content_length=str(len(body)))
    assert send(s3, head, body)[0] == 400
    wait_until(lambda: holds_nothing(s3))
    assert not is_there(s3)


def test_a_body_without_a_length_or_of_too_much_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with served(tmp_path, object_max=1 << 20) as s3:
        assert send(s3, put_head(transfer_encoding="chunked"), b"5\r\nhello\r\n0\r\n\r\n")[0] == 411
        assert send(s3, put_head())[0] == 411
        status, body = send(s3, put_head(content_length=str(1 << 40)), b"x")
        assert (status, b"EntityTooLarge" in body) == (400, True)
        assert not is_there(s3)


BOMB = (
    b'<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]>'
    b"<Delete><Object><Key>&b;</Key></Object></Delete>"
)


@pytest.mark.parametrize("target", ["/blocks?delete", "/blocks/a?uploadId=x"])
def test_a_document_with_entities_is_refused(s3: Served, target: str) -> None:
    head, _ = signed_head("POST", target, {"content-length": str(len(BOMB))})
    status, body = send(s3, head, BOMB)
    assert (status, b"MalformedXML" in body) == (400, True)


def test_slow_clients_are_hung_up_on_and_others_are_served_meanwhile(tmp_path: Path) -> None:
    # One address without a key has as many connections as it leaves to others.
    with served(tmp_path, idle_s=3.0, connections=16) as s3:
        client = s3.client()  # which takes its time to make, and none of the slow ones'
        slow = [s3.connect() for _ in range(6)]
        for connection in slow[:3]:
            connection.sendall(put_head(content_length=str(2 << 20)) + b"some")
        slow[3].sendall(signed_head("GET", "/")[0])
        assert answer_of(slow[3])[0] == 200
        client.put_object(Bucket=BUCKET, Key="b", Body=b"x")
        assert client.get_object(Bucket=BUCKET, Key="b")["Body"].read() == b"x"
        for connection in slow[:3]:
            status, body = answer_of(connection)
            assert (status, b"RequestTimeout" in body) == (400, True)
        assert slow[3].recv(1) == b""
        for connection in slow:
            connection.close()
        client.close()
        wait_until(lambda: s3.door.counters.connections == 0)
        assert not is_there(s3)


def test_a_client_that_goes_in_the_middle_of_an_answer_leaves_nothing_open(s3: Served) -> None:
    client = s3.client()
    client.put_object(Bucket=BUCKET, Key="a", Body=bytes(8 << 20))
    for _ in range(3):
        with s3.connect() as connection:
            connection.sendall(signed_head("GET", "/blocks/a")[0])
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    wait_until(lambda: s3.door.counters.connections <= 1)
    wait_until(lambda: s3.stores["one"].files.gauges().open_files == 0, what="files to be closed")
    client.delete_object(Bucket=BUCKET, Key="a")
    wait_until(lambda: holds_nothing(s3))


@pytest.mark.parametrize("name", ["prefix", "delimiter", "start-after"])
def test_what_xml_cannot_carry_is_listed_by_an_encoding_or_not_at_all(s3: Served, name: str) -> None:
    s3.client().put_object(Bucket=BUCKET, Key="a", Body=b"")
    target = f"/blocks?list-type=2&{name}=%01"
    status, body = send(s3, signed_head("GET", target)[0])
    assert (status, b"InvalidArgument" in body) == (400, True)
    status, body = send(s3, signed_head("GET", target + "&encoding-type=url")[0])
    assert (status, ElementTree.fromstring(body).tag.rpartition("}")[2]) == (200, "ListBucketResult")
    for unknown in ("/blocks?uploads&encoding-type=x", "/blocks?uploads&delimiter=/"):
        assert send(s3, signed_head("GET", unknown)[0])[0] in (400, 501)


@pytest.mark.parametrize("query", ["?x%01y=1", "?X-Amz-Tagging%01=1"])
def test_a_refusal_is_a_document_and_names_what_was_asked_for(s3: Served, query: str) -> None:
    status, body = send(s3, f"GET /blocks/a%01b{query} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
    assert (status, ElementTree.fromstring(body).findtext("Resource")) == (403, "/blocks/a\ufffdb")
    body = send(s3, signed_head("GET", "/blocks/a" + query)[0])[1]
    assert ElementTree.fromstring(body).findtext("Code") in ("NotImplemented", "AccessDenied")


def test_requests_in_a_row_on_one_connection_are_answered_in_order(s3: Served) -> None:
    with s3.connect() as connection:
        connection.sendall(put_head(content_length="3") + b"one" + signed_head("GET", "/blocks/a")[0])
        assert answer_of(connection)[0] == 200
        assert answer_of(connection) == (200, b"one")


def test_a_secret_is_in_no_answer_and_no_status(s3: Served) -> None:
    secret = b"the secret of the first tenant"
    for head in (
        put_head(content_length="1"),
        signed_head("GET", "/blocks/none")[0],
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
    ):
        assert secret not in send(s3, head, b"x")[1]
    assert secret not in repr(s3.door.snapshot()).encode()
