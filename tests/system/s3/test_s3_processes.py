"""Objects by a reader: it serves reads, and has the first process answer all else, by one connection."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, HTTPClientError

from agent.inline.secrets import SecretKey
from agent.s3.chunked import UNSIGNED_TRAILER
from agent.s3.credentials import AccessKey
from agent.s3.processes import lookups
from tests.support.engines.s3_served import KEY, answer_of, signed_head
from tests.support.engines.s3_with_reader import WithReader, with_reader
from tests.support.waiting import wait_until
from tests.system.s3.test_s3_tls import make_certificate

DATA = random.Random(35).randbytes(3_500_000)


@pytest.fixture
def near(tmp_path: Path) -> Iterator[WithReader]:
    with with_reader(tmp_path) as made:
        yield made


@pytest.fixture(params=["plain", "TLS"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[WithReader, Any]]:
    """A door with a client, which speaks TLS or does not."""
    if request.param == "plain":
        with with_reader(tmp_path) as made, contextlib.closing(made.client()) as client:
            yield made, client
    else:
        certificate, private = make_certificate(tmp_path)
        with (
            with_reader(tmp_path, certificate=str(certificate), private_key=str(private)) as made,
            contextlib.closing(made.client(verify=str(certificate))) as client,
        ):
            yield made, client


def test_a_reader_sends_what_was_stored(either: tuple[WithReader, Any]) -> None:
    near, client = either
    for name, body in (("long", DATA), ("short", DATA[:1000]), ("empty", b"")):
        client.put_object(Bucket="blocks", Key=name, Body=body, Metadata={"of": "ours"})
        found = client.get_object(Bucket="blocks", Key=name)
        assert found["Body"].read() == body
        assert found["Metadata"] == {"of": "ours"}
        assert client.head_object(Bucket="blocks", Key=name)["ContentLength"] == len(body)
    part = client.get_object(Bucket="blocks", Key="long", Range="bytes=1000000-3200000")
    assert part["Body"].read() == DATA[1_000_000:3_200_001]
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.get_object(Bucket="blocks", Key="long", IfMatch='"another"')
    with pytest.raises(ClientError, match="NoSuchKey"):
        client.get_object(Bucket="blocks", Key="none")
    assert near.reader.counters.requests == {"GetObject": 6, "HeadObject": 3}
    assert near.door.counters.requests == {"PutObject": 3}
    assert near.reader.counters.bytes_read == len(DATA) + 1000 + 2_200_001
    wait_until(lambda: near.held() == 0)


def test_everything_else_is_answered_by_the_first_process(either: tuple[WithReader, Any]) -> None:
    near, client = either
    upload = client.create_multipart_upload(Bucket="blocks", Key="parts")["UploadId"]
    tags = [
        client.upload_part(
            Bucket="blocks", Key="parts", UploadId=upload, PartNumber=number, Body=bytes([number]) * (5 << 20)
        )["ETag"]
        for number in (1, 2)
    ]
    parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
    client.complete_multipart_upload(
        Bucket="blocks", Key="parts", UploadId=upload, MultipartUpload={"Parts": parts}
    )
    client.copy_object(Bucket="blocks", Key="copy", CopySource="blocks/parts")
    listed = client.list_objects_v2(Bucket="blocks")["Contents"]
    assert [each["Key"] for each in listed] == ["copy", "parts"]
    for name in ("copy", "parts"):
        whole = client.get_object(Bucket="blocks", Key=name)["Body"].read()
        assert whole == b"\x01" * (5 << 20) + b"\x02" * (5 << 20)
    client.delete_objects(Bucket="blocks", Delete={"Objects": [{"Key": "copy"}, {"Key": "parts"}]})
    with pytest.raises(ClientError, match="NoSuchKey"):
        client.get_object(Bucket="blocks", Key="parts")
    assert set(near.reader.counters.requests) == {"GetObject"}


def test_a_connection_stays_with_the_reader_whatever_is_asked(either: tuple[WithReader, Any]) -> None:
    near, client = either
    for number in range(10):
        client.put_object(Bucket="blocks", Key="a", Body=DATA[: 1000 * number])
        assert client.get_object(Bucket="blocks", Key="a")["Body"].read() == DATA[: 1000 * number]
    assert near.reader.counters.connections == 1
    wait_until(lambda: near.door.counters.connections == 0)


def _signed(near: WithReader, method: str, target: str, body: bytes = b"", **headers: str) -> bytes:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    if body:
        names["content-length"] = str(len(body))
    return signed_head(method, target, names)[0] + body


def test_requests_that_follow_each_other_at_once_are_all_answered(near: WithReader) -> None:
    with near.connect() as connection:
        connection.sendall(
            _signed(near, "PUT", "/blocks/a", b"one") + _signed(near, "GET", "/blocks/a")
            + _signed(near, "PUT", "/blocks/a", b"three") + _signed(near, "GET", "/blocks/a")
        )  # fmt: skip
        answers = [answer_of(connection) for _ in range(4)]
    assert [status for status, _ in answers] == [200] * 4
    assert [answers[at][1] for at in (1, 3)] == [b"one", b"three"]


def test_by_tls_the_bytes_behind_a_request_are_the_next_one(tmp_path: Path) -> None:
    certificate, private = make_certificate(tmp_path)
    context = ssl.create_default_context(cafile=str(certificate))
    with with_reader(tmp_path, certificate=str(certificate), private_key=str(private)) as near:
        secured = context.wrap_socket(near.connect(), server_hostname="127.0.0.1")
        with secured:
            secured.sendall(
                _signed(near, "PUT", "/blocks/a", b"one") + _signed(near, "GET", "/blocks/a")
                + _signed(near, "DELETE", "/blocks/a") + _signed(near, "GET", "/blocks/a")
            )  # fmt: skip
            answers = [answer_of(secured) for _ in range(4)]
    assert [status for status, _ in answers] == [200, 200, 204, 404]
    assert answers[1][1] == b"one"


def test_a_body_of_unknown_length_is_followed_by_the_next_request(either: tuple[WithReader, Any]) -> None:
    near, _ = either
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(near.connect())
        if near.section.certificate is not None:
            context = ssl.create_default_context(cafile=str(near.section.certificate))
            connection = stack.enter_context(context.wrap_socket(connection, server_hostname="127.0.0.1"))
        for value in (b"one", b"three"):
            length = {"x-amz-decoded-content-length": str(len(value)), "transfer-encoding": "chunked"}
            head, _ = signed_head("PUT", "/blocks/a", length, UNSIGNED_TRAILER)
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(value), value)
            connection.sendall(head + b"%x\r\n" % len(body))
            connection.sendall(body + b"\r\n0\r\n\r\n" + _signed(near, "GET", "/blocks/a"))
            assert answer_of(connection)[0] == 200
            assert answer_of(connection) == (200, value)


def test_what_a_client_announces_is_asked_for(near: WithReader) -> None:
    with near.connect() as connection:
        head = _signed(near, "PUT", "/blocks/a", expect="100-continue", content_length="3")
        connection.sendall(head)
        assert answer_of(connection)[0] == 100
        connection.sendall(b"one")
        assert answer_of(connection)[0] == 200
        connection.sendall(_signed(near, "GET", "/blocks/a"))
        assert answer_of(connection) == (200, b"one")


def test_a_signature_is_checked_before_anything_is_carried(near: WithReader) -> None:
    with near.connect() as connection:
        forged = AccessKey(KEY.key_id, SecretKey(b"another secret"), KEY.tenant)
        head, _ = signed_head("PUT", "/blocks/a", {"content-length": "3"}, key=forged)
        connection.sendall(head + b"one")
        assert answer_of(connection)[0] == 403
    assert near.reader.counters.refusals["SignatureDoesNotMatch"] == 1
    assert not near.door.counters.connections


def test_an_object_that_is_replaced_is_read_on_as_it_was(near: WithReader) -> None:
    client = near.client()
    client.put_object(Bucket="blocks", Key="a", Body=DATA)
    body = client.get_object(Bucket="blocks", Key="a")["Body"]
    client.put_object(Bucket="blocks", Key="a", Body=b"another")
    client.put_object(Bucket="blocks", Key="b", Body=DATA[::-1])
    assert body.read() == DATA
    assert client.get_object(Bucket="blocks", Key="a")["Body"].read() == b"another"
    wait_until(lambda: near.held() == 0)


def test_what_the_reader_does_not_have_the_first_process_sends(near: WithReader) -> None:
    client = near.client()
    client.put_object(Bucket="blocks", Key="a", Body=DATA)
    near.serves = False
    assert client.get_object(Bucket="blocks", Key="a")["Body"].read() == DATA
    assert near.door.counters.requests["GetObject"] == 1
    assert not near.reader.counters.requests["GetObject"]
    wait_until(lambda: near.held() == 0)


def test_a_lost_object_is_judged_by_the_first_process(near: WithReader) -> None:
    client = near.client()
    client.put_object(Bucket="blocks", Key="a", Body=DATA)
    near.blocks["one"].blocks.clear()
    with pytest.raises(ClientError):
        client.get_object(Bucket="blocks", Key="a")
    assert near.door.counters.requests["GetObject"] == 1


def test_an_object_that_is_lost_in_the_middle_is_not_read_there_again(near: WithReader) -> None:
    client = near.client()
    client.put_object(Bucket="blocks", Key="a", Body=DATA)
    blocks = near.blocks["one"].blocks
    last = list(blocks)[-1]
    kept = blocks.pop(last)
    with pytest.raises((ClientError, HTTPClientError, http.client.HTTPException)):
        client.get_object(Bucket="blocks", Key="a")["Body"].read()
    assert near.reader.counters.bodies_broken_off == 1
    blocks[last] = kept  # as flash that was late alone
    assert client.get_object(Bucket="blocks", Key="a")["Body"].read() == DATA
    assert near.door.counters.requests["GetObject"] == 1
    wait_until(lambda: near.held() == 0)


def test_a_reader_that_ends_lets_go_of_what_it_read(near: WithReader) -> None:
    client = near.client()
    client.put_object(Bucket="blocks", Key="a", Body=DATA)
    connection = near.connect()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sendall(_signed(near, "GET", "/blocks/a"))
    wait_until(lambda: near.held() == 1)
    near.end_reader()
    wait_until(lambda: near.held() == 0)
    connection.close()


def test_without_the_first_process_nothing_hangs(near: WithReader) -> None:
    client = near.client()
    client.put_object(Bucket="blocks", Key="a", Body=DATA)
    for link in near.ours:
        link.shutdown(socket.SHUT_RDWR)
    for ask in (
        lambda: client.get_object(Bucket="blocks", Key="a"),
        lambda: client.put_object(Bucket="blocks", Key="a", Body=b"one"),
    ):
        with pytest.raises((ClientError, HTTPClientError)):
            ask()
    wait_until(lambda: near.held() == 0)


def test_bodies_are_asked_for_by_one_process_alone(near: WithReader) -> None:
    near.client().put_object(Bucket="blocks", Key="a", Body=b"one")
    near.serves = False
    with near.connect() as connection:
        connection.sendall(_signed(near, "GET", "/blocks/a", expect="100-continue"))
        assert answer_of(connection)[0] == 100
        assert answer_of(connection) == (200, b"one")


def test_an_object_of_more_blocks_than_one_answer_has_is_held_once(
    near: WithReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = near.client()
    client.put_object(Bucket="blocks", Key="a", Body=DATA)
    for name, most in (("BLOCKS_MAX", 1), ("MESSAGE_BYTES_MAX", 200)):
        with monkeypatch.context() as patched:
            patched.setattr(lookups, name, most)
            assert client.get_object(Bucket="blocks", Key="a")["Body"].read() == DATA
        wait_until(lambda: near.held() == 0)
        client.put_object(Bucket="blocks", Key="a", Body=DATA)
    assert near.door.counters.requests["GetObject"] == 2


@pytest.mark.expects_log("finding an object for a process of this agent")
def test_a_look_up_that_fails_costs_no_link(near: WithReader, monkeypatch: pytest.MonkeyPatch) -> None:
    client = near.client()
    client.put_object(Bucket="blocks", Key="a", Body=DATA)
    with monkeypatch.context() as patched:
        patched.setattr(near.stores["one"], "blocks", lambda pieces: 1 / 0)
        for _ in range(near.door.links_of_reader):
            assert client.get_object(Bucket="blocks", Key="a")["Body"].read() == DATA
    assert not near.reader.counters.requests["GetObject"]
    assert client.get_object(Bucket="blocks", Key="a")["Body"].read() == DATA
    assert near.reader.counters.requests["GetObject"] == 1
    wait_until(lambda: near.held() == 0)
