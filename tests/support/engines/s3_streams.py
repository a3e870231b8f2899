"""Streams of requests as no client of good manners sends them, and the answers to one."""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Sequence

from agent.inline.secrets import SecretKey
from agent.s3.chunked import UNSIGNED_TRAILER
from agent.s3.credentials import AccessKey
from agent.s3.errors import S3Error
from agent.s3.signature import UNSIGNED
from tests.support.engines.s3_served import KEY, OTHER_KEY, signed_head

SECONDS = 60.0
"""After so long without a byte a stream is given up."""

Answer = tuple[int, tuple[bytes, ...], bytes]
"""Status, headers and body."""

KEYS = ("a", "b", "c")
"""Of the objects that the streams are about."""
_KEYS = (*KEYS, "a", "none", "a/b//../c%20d", "%F0%9F%98%80", "k" * 1024, "k" * 1025, "%zz", "%00")
_FORGED = AccessKey(KEY.key_id, SecretKey(b"another secret"), KEY.tenant)
_UNKNOWN = AccessKey("G35NOBODY", SecretKey(b"another secret"), KEY.tenant)
_DELETE = b"<Delete><Object><Key>b</Key></Object><Object><Key>none</Key></Object></Delete>"
_ENDINGS = (b"", b"\r\n", b"\r\n\r\n", b"GET", b"\x00" * 9, b"GET / HTTP/1.1\r\n\r\n", b"x" * 17_000)
"""What comes behind the last request."""
_OF_READS: tuple[dict[str, str], ...] = (
    {}, {}, {}, {"range": "bytes=2-4"}, {"range": "bytes=-3"}, {"range": "bytes=99999999-"},
    {"range": "bytes=x"}, {"if-match": '"another"'}, {"if-none-match": "*"}, {"expect": "100-continue"},
    {"x-amz-checksum-mode": "ENABLED"}, {"x-amz-rdma-token": "x"},
)  # fmt: skip
_PARAMETERS = (
    "", "", "", "?x-id=GetObject", "?response-content-type=text%2Fplain", "?partNumber=1", "?acl", "?tagging"
)  # fmt: skip
_OF_PUTS: tuple[dict[str, str], ...] = (
    {}, {}, {}, {"expect": "100-continue"}, {"content-md5": "AAAAAAAAAAAAAAAAAAAAAA=="},
    {"if-none-match": "*"}, {"x-amz-meta-of": "ours"}, {"x-amz-acl": "public-read"},
)  # fmt: skip
_LINES = (
    b"connection: close", b"connection: keep-alive", b"connection: upgrade", b"upgrade: h2c", b"x: y",
    b"expect: 200-ok", b"content-length: 0", b"content-length: 3", b"transfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked", b"x: " + b"y" * 15_000, b"x: " + b"y" * 17_000, b"x:y\r\n z",
    b"host: another", b"x : y", b"\x01: x", b"\r\n".join([b"x: y"] * 70), b"\r\n".join([b"x: y"] * 300),
)  # fmt: skip
"""Which nobody signed, behind those of a head."""
_NEW_EACH_TIME = re.compile(rb"<(RequestId|LastModified|UploadId)>[^<]*</")
_HEADERS_NEW_EACH_TIME = (b"date:", b"x-amz-request-id:", b"last-modified:")


def stream(chance: random.Random) -> bytes:
    """Some requests that follow each other at once."""
    requests = [_request(chance) for _ in range(chance.randint(1, 6))]
    last = _with_line(_signed(chance, "GET", "/blocks/a"), b"connection: close")
    return b"".join([*requests, last, chance.choice(_ENDINGS)])


def in_pieces(chance: random.Random, data: bytes) -> list[bytes]:
    """The bytes as a network may bring them."""
    cuts = sorted(chance.randrange(len(data)) for _ in range(chance.choice([0, 0, 1, 3, 8])))
    parts = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return [part for part in parts if part]


def _signed(
    chance: random.Random,
    method: str,
    target: str,
    headers: dict[str, str] | None = None,
    payload: str = UNSIGNED,
) -> bytes:
    key = chance.choice([KEY] * 25 + [OTHER_KEY, _FORGED, _UNKNOWN])
    region = chance.choice(["us-east-1"] * 30 + ["elsewhere-1"])
    try:
        return signed_head(method, target, headers, payload, key=key, region=region)[0]
    except S3Error:  # no client signs such a target
        head = signed_head(method, "/", headers, payload, key=key, region=region)[0]
        return head.replace(b"/", target.encode(), 1)


def _with_line(head: bytes, line: bytes) -> bytes:
    return head[:-2] + line + b"\r\n\r\n"


def _request(chance: random.Random) -> bytes:
    kind = chance.choice([_read, _read, _read, _put, _put, _put_by_chunks, _other])
    made = kind(chance, f"/blocks/{chance.choice(_KEYS)}")
    return _bent(chance, made) if chance.random() < 0.15 else made


def _read(chance: random.Random, target: str) -> bytes:
    method, headers = chance.choice(["GET", "GET", "HEAD"]), dict(chance.choice(_OF_READS))
    target += chance.choice(_PARAMETERS)
    body = b""
    if chance.random() < 0.15:
        body = b"y" * chance.choice([0, 1, 5, 20_000])
        headers["content-length"] = str(len(body))
    elif chance.random() < 0.1:
        headers["transfer-encoding"], body = "chunked", b"2\r\nab\r\n0\r\n\r\n"
    return _signed(chance, method, target, headers) + body


def _put(chance: random.Random, target: str) -> bytes:
    body = chance.randbytes(chance.choice([0, 1, 10, 3000, 70_000]))
    headers = dict(chance.choice(_OF_PUTS))
    if chance.random() < 0.95:
        headers["content-length"] = str(len(body))
    return _signed(chance, "PUT", target, headers, chance.choice([UNSIGNED] * 9 + ["0" * 64])) + body


def _put_by_chunks(chance: random.Random, target: str) -> bytes:
    """A body of unknown length, in chunks of HTTP's, which may have extensions and trailers."""
    value = chance.randbytes(chance.choice([0, 1, 10, 20_000]))
    body = (b"%x\r\n%s\r\n" % (len(value), value) if value else b"") + b"0\r\n\r\n"
    headers = {"transfer-encoding": "chunked"}
    if chance.random() < 0.9:
        headers["x-amz-decoded-content-length"] = str(len(value))
    if chance.random() < 0.2:
        headers["content-length"] = str(len(body))
    made, at = [_signed(chance, "PUT", target, headers, UNSIGNED_TRAILER)], 0
    while at < len(body):
        part = body[at : at + chance.choice([1, 7, 5000, 20_000])]
        at += len(part)
        made.append(b"%x%s\r\n%s\r\n" % (len(part), chance.choice([b"", b"", b";x=y", b';x="\r']), part))
    made.append(
        chance.choice([b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nof: ours\r\n\r\n", b"0;x\r\n\r\n", b"g\r\n"])
    )
    return b"".join(made)


def _other(chance: random.Random, target: str) -> bytes:
    methods = {
        "delete": ("DELETE", target, {}), "buckets": ("GET", "/", {}), "no bucket": ("HEAD", "/nobody", {}),
        "list": ("GET", "/blocks?list-type=2&max-keys=2", {}), "where": ("GET", "/blocks?location=", {}),
        "bucket": ("HEAD", "/blocks", {}), "unknown": ("OPTIONS", "/blocks", {}),
        "upload": ("POST", target + "?uploads=", {}),
        "several": ("POST", "/blocks?delete=", {"content-length": str(len(_DELETE))}),
    }  # fmt: skip
    what = chance.choice([*methods, "unsigned"])
    if what == "unsigned":
        return b"GET /blocks/a HTTP/1.1\r\nhost: localhost\r\n\r\n"
    return _signed(chance, *methods[what]) + (_DELETE if what == "several" else b"")


def _bent(chance: random.Random, made: bytes) -> bytes:
    """A request that is changed behind its signature."""
    head, body = made[: made.find(b"\r\n\r\n") + 4], made[made.find(b"\r\n\r\n") + 4 :]
    how = chance.randrange(5)
    if how < 3:
        return _with_line(head, chance.choice(_LINES)) + body
    if how == 3:
        version = chance.choice([b"HTTP/1.0", b"HTTP/1.0", b"HTTP/2.0", b"http/1.1"])
        return head.replace(b"HTTP/1.1", version, 1) + body
    others = [head.replace(b"\r\n", b"\n"), b"\r\n" + head, head[:-40], head.swapcase()]
    return chance.choice(others) + body


def answers_to(connection: socket.socket, pieces: Sequence[bytes]) -> list[Answer]:
    """All answers to a stream, until the other side closes, without what is new in each. The client ends its
    side behind the stream, so that nobody waits for the rest of a request."""
    received = bytearray()
    try:
        connection.settimeout(SECONDS)
        for piece in pieces:
            connection.sendall(piece)
        socket.socket.shutdown(connection, socket.SHUT_WR)  # with TLS, its answers are still to be decoded
    except OSError:
        pass  # it has been closed: after which answer is to be seen
    try:
        while data := connection.recv(1 << 16):
            received += data
    except OSError as end:
        if isinstance(end, TimeoutError):
            received += b"nothing more"
    return _parsed(bytes(received))


def _parsed(data: bytes) -> list[Answer]:
    found: list[Answer] = []
    while data:
        head, is_there, rest = data.partition(b"\r\n\r\n")
        if not is_there or not head.startswith(b"HTTP/1.1 "):
            found.append((0, (), data))
            break
        first, *lines = head.split(b"\r\n")
        status = int(first.split()[1])
        kept = tuple(line for line in lines if not line.lower().startswith(_HEADERS_NEW_EACH_TIME))
        length = next((int(line[15:]) for line in kept if line.lower().startswith(b"content-length:")), 0)
        # An answer to HEAD has no body: the next one begins at once.
        if status in (100, 204, 304) or rest.startswith(b"HTTP/1.1 "):
            length = 0
        body, data = rest[:length], rest[length:]
        found.append((status, kept, _NEW_EACH_TIME.sub(b"", body)))
    return found
