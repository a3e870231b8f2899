"""Requests taken apart: what is a bucket, what is a key, and what is refused."""

from __future__ import annotations

import pytest

from agent.s3.errors import S3Error
from agent.s3.requests import Hosts, Operation, S3Request, byte_range, http_request, s3_request

HOSTS = Hosts("s3.example", {"127.0.0.2": "blocks", "[::1]": "blocks"})


def asked(method: str, target: str, host: str = "127.0.0.1:9036", **headers: str) -> S3Request:
    found = {"host": host, **{name.replace("_", "-"): text for name, text in headers.items()}}
    pairs = [(name.encode(), text.encode()) for name, text in found.items()]
    return s3_request(http_request(method.encode(), target.encode("latin-1"), pairs), HOSTS)


@pytest.mark.parametrize(
    ("target", "key"),
    [
        ("/blocks/a/b", "a/b"),
        ("/blocks/../etc/passwd", "../etc/passwd"),
        ("/blocks/%2e%2e/%2e%2e/x", "../../x"),
        ("/blocks/a%2Fb", "a/b"),
        ("/blocks//a//b/", "/a//b/"),
        ("/blocks/a+b%20c", "a+b c"),
        ("/blocks/%E2%82%AC", "€"),
        ("/blocks/" + "k" * 1024, "k" * 1024),
    ],
)
def test_a_key_is_a_name_and_no_path(target: str, key: str) -> None:
    found = asked("GET", target)
    assert (found.operation, found.bucket, found.key) == (Operation.GET_OBJECT, "blocks", key)


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("/blocks/" + "k" * 1025, "KeyTooLongError"),
        ("/blocks/%E2%82%AC" + "k" * 1022, "KeyTooLongError"),
        ("/blocks/a%00b", "InvalidArgument"),
        ("/blocks/a%0Ab", "InvalidArgument"),
        ("/blocks/%ff", "InvalidURI"),
        ("/blocks/a%zz", "InvalidURI"),
        ("/blocks/a%2", "InvalidURI"),
        ("/blocks/\xe9", "InvalidURI"),
        ("http://elsewhere/blocks/a", "InvalidURI"),
        ("//blocks/a", "InvalidURI"),
        ("/BLOCKS/a", "InvalidBucketName"),
        ("/../a", "InvalidBucketName"),
        ("/%2e%2e/a", "InvalidBucketName"),
        ("/ab/a", "InvalidBucketName"),
        ("/a..b/a", "InvalidBucketName"),
        ("/a.-b/a", "InvalidBucketName"),
        ("/192.168.1.1/a", "InvalidBucketName"),
        ("/" + "a" * 64, "InvalidBucketName"),
        ("/blocks/a?acl", "NotImplemented"),
        ("/blocks?policy", "NotImplemented"),
        ("/blocks/a?versionId=1", "NotImplemented"),
        ("/blocks?list-type=2&list-type=2", "InvalidArgument"),
        ("/blocks?list-type=2&marker=a", "NotImplemented"),
        ("/blocks?list-type=2&part-number-marker=1", "NotImplemented"),
        ("/blocks/a?uploadId=1&encoding-type=url", "NotImplemented"),
        ("/blocks/a?prefix=a", "NotImplemented"),
        ("/blocks?location&prefix=a", "NotImplemented"),
        ("/?bucket-region=eu-west-1", "NotImplemented"),
        ("/blocks?list-type=3", "MethodNotAllowed"),
        ("/blocks/a?uploads", "MethodNotAllowed"),
        ("/blocks/" + "a" * 9000, "InvalidURI"),
        ("/?" + "&".join(f"x{at}" for at in range(65)), "InvalidURI"),
    ],
)
def test_what_is_not_taken_is_refused(target: str, code: str) -> None:
    with pytest.raises(S3Error) as refused:
        asked("GET", target)
    assert refused.value.code == code


def test_headers_that_a_presigned_url_has_in_its_query_are_headers() -> None:
    found = asked("PUT", "/blocks/a?X-Amz-Expires=60&x-amz-meta-layer=7")
    assert found.headers["x-amz-meta-layer"] == "7"
    copied = asked("PUT", "/blocks/a?x-amz-copy-source=%2Fblocks%2Fb")
    assert (copied.operation, copied.headers["x-amz-copy-source"]) == (Operation.COPY_OBJECT, "/blocks/b")
    with pytest.raises(S3Error):
        asked("PUT", "/blocks/a?X-Amz-Meta-Layer=7", x_amz_meta_layer="8")


def test_keys_of_the_customer_are_refused_rather_than_ignored() -> None:
    for place in ("", "copy_source_"):
        with pytest.raises(S3Error) as refused:
            asked("PUT", "/blocks/a", **{f"x_amz_{place}server_side_encryption_customer_algorithm": "x"})
        assert refused.value.code == "NotImplemented"


@pytest.mark.parametrize("word", ["a%0d%0aset-cookie:+b", "MD7", "%F0%9F%98%80", ""])
def test_a_checksum_that_is_announced_is_one_that_there_is(word: str) -> None:
    with pytest.raises(S3Error) as refused:
        asked("POST", f"/blocks/a?uploads&X-Amz-Checksum-Algorithm={word}")
    assert refused.value.code == "InvalidRequest"
    assert asked("POST", "/blocks/a?uploads&X-Amz-Checksum-Algorithm=CRC64NVME")


def test_what_is_no_ascii_in_a_query_is_the_header_that_a_client_would_have_sent() -> None:
    by_query = asked("PUT", "/blocks/a?X-Amz-Meta-Name=%C3%BC%C5%A0")
    assert by_query.headers["x-amz-meta-name"] == "\u00fc\u0160".encode().decode("latin-1")


@pytest.mark.parametrize(
    ("host", "bucket", "key"),
    [
        ("127.0.0.1:9036", "other", "a/b"),
        ("127.0.0.2:9036", "blocks", "other/a/b"),
        ("[::1]:9036", "blocks", "other/a/b"),
        ("warm.s3.example", "warm", "other/a/b"),
        ("WARM.S3.example:80", "warm", "other/a/b"),
        ("s3.example", "other", "a/b"),
    ],
)
def test_the_host_names_the_bucket_where_it_is_told_to(host: str, bucket: str, key: str) -> None:
    found = asked("GET", "/other/a/b", host)
    assert (found.bucket, found.key) == (bucket, key)


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ("bytes=0-9", (0, 10)),
        ("bytes=90-", (90, 100)),
        ("bytes=90-1000", (90, 100)),
        ("bytes=-10", (90, 100)),
        ("bytes=-1000", (0, 100)),
        ("bytes=0-1,5-6", None),
        ("bytes=9-3", None),
        ("bytes=-", None),
        ("lines=1-2", None),
        ("bytes=" + "9" * 40 + "-", None),
    ],
)
def test_a_range_is_taken_or_ignored_as_http_says(header: str, wanted: tuple[int, int] | None) -> None:
    assert byte_range(header, 100) == wanted


@pytest.mark.parametrize(("header", "size"), [("bytes=100-", 100), ("bytes=0-0", 0), ("bytes=-0", 100)])
def test_a_range_beyond_the_object_is_refused(header: str, size: int) -> None:
    with pytest.raises(S3Error) as refused:
        byte_range(header, size)
    assert refused.value.code == "InvalidRange"


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("PUT", {"x-amz-write-offset-bytes": "500"}),
        ("PUT", {"x-amz-acl": "public-read"}),
        ("PUT", {"x-amz-server-side-encryption": "aws:kms"}),
        ("PUT", {"x-amz-object-lock-legal-hold": "ON"}),
        ("GET", {"x-amz-expected-bucket-owner": "1"}),
        ("DELETE", {"if-match": '"0"'}),
        ("DELETE", {"x-amz-if-match-size": "7"}),
    ],
)
def test_a_header_that_asks_for_what_is_not_there_is_refused(method: str, headers: dict[str, str]) -> None:
    with pytest.raises(S3Error) as refused:
        asked(method, "/blocks/a", **headers)
    assert refused.value.code == "NotImplemented"


def test_headers_that_ask_for_what_is_done_anyway_are_taken() -> None:
    asked("PUT", "/blocks/a", **{"x-amz-acl": "private", "x-amz-storage-class": "STANDARD"})


@pytest.mark.parametrize(
    "query",
    [
        "X-Amz-Meta-foo=a%0d%0aset-cookie:b",
        "X-Amz-Meta-a%20b=c",
        "X-Amz-Meta-a=%20b",
    ],
)
def test_metadata_of_a_presigned_url_are_in_the_form_of_headers(query: str) -> None:
    with pytest.raises(S3Error) as refused:
        asked("PUT", f"/blocks/a?{query}")
    assert refused.value.code == "InvalidArgument"


def test_a_body_has_one_length() -> None:
    with pytest.raises(S3Error) as refused:
        asked("PUT", "/blocks/a", **{"content-length": "3", "transfer-encoding": "chunked"})
    assert refused.value.closes
