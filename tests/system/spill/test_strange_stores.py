"""A bucket's server that answers what no store should: an error says what; what others have stays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agent.spill.care import drop
from agent.spill.names import pool_prefix
from agent.spill.s3_target import EMPTY_PAGES_MAX, S3Target
from agent.spill.target import TargetError
from tests.support.pool.spill_pool import POOL_ID

PREFIX = pool_prefix(POOL_ID)


class StrangeStore(ThreadingHTTPServer):
    """Answers every request with `status` and `body`; `{n}` in the body is the number of the request."""

    daemon_threads = False  # The end waits for them.

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.body = 200, ""
        self.encoding = "utf-8"
        self.asked: list[str] = []
        self._thread = threading.Thread(target=self.serve_forever)
        self._thread.start()

    def end(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        store = self.server
        assert isinstance(store, StrangeStore)
        store.asked.append(f"{self.command} {self.path.partition('?')[0]}")
        body = store.body.replace("{n}", str(len(store.asked))).encode(store.encoding)
        self.send_response(store.status)
        self.send_header("content-length", str(len(body)))
        self.send_header("connection", "close")  # Nothing is left open when the test ends.
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_DELETE = _serve


@pytest.fixture
def store() -> Iterator[StrangeStore]:
    made = StrangeStore()
    yield made
    made.end()


@pytest.fixture
def target(store: StrangeStore, tmp_path: Path) -> Iterator[S3Target]:
    file = tmp_path / "credentials"
    file.write_text(
        "[default]\naws_access_key_id = AKIATESTONE\naws_secret_access_key = a+long/secret+of+theirs\n"
    )
    file.chmod(0o600)
    made = S3Target(f"http://127.0.0.1:{store.server_address[1]}", "blocks", "us-east-1", file)
    yield made
    made.close()


def listing(*names: str, following: str = "") -> str:
    rows = "".join(f"<Contents><Key>{name}</Key><Size>1</Size></Contents>" for name in names)
    token = f"<NextContinuationToken>{following}</NextContinuationToken>" if following else ""
    return f"<ListBucketResult>{rows}{token}</ListBucketResult>"


@pytest.mark.parametrize("following", ["same", "another-{n}"])
def test_a_listing_without_an_end_is_given_up(store: StrangeStore, target: S3Target, following: str) -> None:
    store.body = listing(following=following)
    with pytest.raises(TargetError, match="does not come to the end of its listing"):
        list(target.names(PREFIX))
    assert len(store.asked) <= EMPTY_PAGES_MAX


def test_what_others_have_in_the_bucket_is_not_deleted(store: StrangeStore, target: S3Target) -> None:
    """A store that takes no notice of the prefix lists it all."""
    store.body = listing("theirs/backup", f"{PREFIX}ours", "g35-spill/" + "f" * 32 + "/another-pool")
    assert [each.name for each in drop(target, PREFIX)] == [f"{PREFIX}ours"]
    assert [each for each in store.asked if each.startswith("DELETE")] == [f"DELETE /blocks/{PREFIX}ours"]


def test_a_listing_in_another_encoding_is_none(store: StrangeStore, target: S3Target) -> None:
    """There an entity would be past the look for one."""
    store.body = '<?xml version="1.0" encoding="UTF-16"?><!DOCTYPE a [<!ENTITY b "c">]>' + listing("&b;")
    store.encoding = "utf-16"
    with pytest.raises(TargetError, match="no ListBucketResult"):
        list(target.names(PREFIX))


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (404, "NoSuchBucket", "answers 404 NoSuchBucket: there is no bucket blocks; make it"),
        (403, "SignatureDoesNotMatch", "answers 403 SignatureDoesNotMatch: see credentials_file, region"),
        (400, "ExpiredToken", "answers 400 ExpiredToken: see credentials_file, region"),
        (301, "PermanentRedirect", "answers 301 PermanentRedirect: the bucket is elsewhere; see endpoint"),
        (409, "not of letters\n\x1b", "answers 409$"),
    ],
)
def test_a_refusal_says_what_the_store_calls_it_and_what_to_look_at(
    store: StrangeStore, target: S3Target, status: int, code: str, said: str
) -> None:
    store.status, store.body = status, f"<Error><Code>{code}</Code><Message>of theirs</Message></Error>"
    with pytest.raises(TargetError, match=said) as put:
        target.put(f"{PREFIX}one", memoryview(b"1"))
    with pytest.raises(TargetError, match=said):
        list(target.names(PREFIX))
    assert "theirs" not in str(put.value)


def test_an_answer_longer_than_the_range_is_refused(store: StrangeStore, target: S3Target) -> None:
    store.status, store.body = 206, "a" * 5000
    with pytest.raises(TargetError, match="more than was asked for"):
        target.fetch(f"{PREFIX}one", 0, 100).result(60)
