"""boto3 is the judge: what it does with S3 it does with the door."""

from __future__ import annotations

import base64
import hashlib
import io
import random
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError, IncompleteReadError, ResponseStreamingError

from agent.fs.files import suspect_blocks
from tests.support.engines.s3_served import OTHER_KEY, Served, served
from tests.support.waiting import wait_until

BUCKET = "blocks"
BIG = random.Random(3).randbytes((5 << 20) + 12_345)


def code_of(call: Callable[..., Any], **arguments: Any) -> str:
    """The code that a call is refused with."""
    with pytest.raises(ClientError) as refused:
        call(**arguments)
    return str(refused.value.response["Error"]["Code"])


def body_of(client: Any, key: str, **more: Any) -> bytes:
    data: bytes = client.get_object(Bucket=BUCKET, Key=key, **more)["Body"].read()
    return data


def test_an_object_is_put_read_in_ranges_described_and_removed(s3: Served) -> None:
    client = s3.client()
    made = client.put_object(
        Bucket=BUCKET,
        Key="a/b",
        Body=BIG,
        ContentType="x/y",
        Metadata={"layer": "7"},
        CacheControl="no-cache",
    )
    assert made["ETag"] == f'"{hashlib.md5(BIG).hexdigest()}"'
    found = client.get_object(Bucket=BUCKET, Key="a/b")
    assert found["Body"].read() == BIG
    assert (found["ContentType"], found["Metadata"], found["CacheControl"]) == (
        "x/y",
        {"layer": "7"},
        "no-cache",
    )
    for first, last in ((0, 0), (100, 3 << 20), (1 << 20, len(BIG) - 1)):
        part = client.get_object(Bucket=BUCKET, Key="a/b", Range=f"bytes={first}-{last}")
        assert part["Body"].read() == BIG[first : last + 1]
        assert part["ContentRange"] == f"bytes {first}-{last}/{len(BIG)}"
    assert body_of(client, "a/b", Range="bytes=-7") == BIG[-7:]
    assert code_of(client.get_object, Bucket=BUCKET, Key="a/b", Range=f"bytes={len(BIG)}-") == "InvalidRange"
    assert client.head_object(Bucket=BUCKET, Key="a/b")["ContentLength"] == len(BIG)
    client.delete_object(Bucket=BUCKET, Key="a/b")
    client.delete_object(Bucket=BUCKET, Key="a/b")
    assert code_of(client.get_object, Bucket=BUCKET, Key="a/b") == "NoSuchKey"
    assert code_of(client.head_object, Bucket=BUCKET, Key="a/b") == "404"
    assert code_of(client.get_object, Bucket="nobucket", Key="a/b") == "NoSuchBucket"
    assert (
        client.put_object(Bucket=BUCKET, Key="empty", Body=b"")["ETag"].strip('"')
        == hashlib.md5().hexdigest()
    )
    assert body_of(client, "empty") == b""


def test_headers_of_an_object_may_have_any_letters(s3: Served) -> None:
    client, text = s3.client(), 'attachment; filename="\u00fc\u0160.txt"'
    client.put_object(Bucket=BUCKET, Key="a", Body=b"x", ContentDisposition=text)
    found = client.head_object(Bucket=BUCKET, Key="a")["ContentDisposition"]
    assert found.encode("latin-1").decode() == text


def test_any_key_is_a_name_of_its_own(s3: Served) -> None:
    client = s3.client()
    keys = ["a", "a/", "a//b", "..", "../..", "€ &<>'\"", "%2F", "a+b", "k" * 1024, " ", "a/../b"]
    urls = {}
    for key in keys:
        # urllib3 takes dots out of a path before it sends it, so such keys go by a raw request below.
        if ".." in key:
            continue
        client.put_object(Bucket=BUCKET, Key=key, Body=key.encode())
        urls[key] = body_of(client, key)
    assert urls == {key: key.encode() for key in urls}
    listed = client.list_objects_v2(Bucket=BUCKET)
    assert [each["Key"] for each in listed["Contents"]] == sorted(urls, key=str.encode)


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
def test_checksums_are_checked_kept_and_given_back(s3: Served, algorithm: str) -> None:
    client = s3.client()
    made = client.put_object(Bucket=BUCKET, Key="a", Body=b"bytes", ChecksumAlgorithm=algorithm)
    found = client.get_object(Bucket=BUCKET, Key="a", ChecksumMode="ENABLED")
    assert found["Body"].read() == b"bytes"
    name = f"Checksum{algorithm}"
    assert made[name] == found[name]
    wrong = base64.b64encode(bytes(len(base64.b64decode(made[name])))).decode()
    assert code_of(client.put_object, Bucket=BUCKET, Key="a", Body=b"other", **{name: wrong}) == "BadDigest"
    assert body_of(client, "a") == b"bytes"


def test_content_md5_is_checked(s3: Served) -> None:
    client = s3.client()
    right = base64.b64encode(hashlib.md5(b"bytes").digest()).decode()
    client.put_object(Bucket=BUCKET, Key="a", Body=b"bytes", ContentMD5=right)
    assert code_of(client.put_object, Bucket=BUCKET, Key="b", Body=b"other", ContentMD5=right) == "BadDigest"
    assert code_of(client.put_object, Bucket=BUCKET, Key="b", Body=b"x", ContentMD5="AAAA") == "InvalidDigest"
    assert code_of(client.get_object, Bucket=BUCKET, Key="b") == "NoSuchKey"


def test_conditions_of_reads_and_writes(s3: Served) -> None:
    client = s3.client()
    tag = client.put_object(Bucket=BUCKET, Key="a", Body=b"one", IfNoneMatch="*")["ETag"]
    assert (
        code_of(client.put_object, Bucket=BUCKET, Key="a", Body=b"2", IfNoneMatch="*") == "PreconditionFailed"
    )
    assert body_of(client, "a", IfMatch=tag) == b"one"
    assert code_of(client.get_object, Bucket=BUCKET, Key="a", IfMatch='"x"') == "PreconditionFailed"
    assert code_of(client.get_object, Bucket=BUCKET, Key="a", IfNoneMatch=tag) == "304"
    assert body_of(client, "a") == b"one"


def test_what_is_not_sent_is_told_apart_by_its_headers(s3: Served) -> None:
    client = s3.client()
    etag = client.put_object(Bucket=BUCKET, Key="a", Body=b"0123456789")["ETag"]
    with pytest.raises(ClientError) as refused:
        client.get_object(Bucket=BUCKET, Key="a", IfNoneMatch=etag)
    found = refused.value.response["ResponseMetadata"]
    assert (found["HTTPStatusCode"], found["HTTPHeaders"]["etag"]) == (304, etag)
    with pytest.raises(ClientError) as refused:
        client.get_object(Bucket=BUCKET, Key="a", Range="bytes=10-")
    found = refused.value.response["ResponseMetadata"]
    assert (found["HTTPStatusCode"], found["HTTPHeaders"]["content-range"]) == (416, "bytes */10")


def test_listings_have_pages_prefixes_and_delimiters(s3: Served) -> None:
    client = s3.client()
    keys = [f"{folder}/{number:02}" for folder in ("a", "b", "c") for number in range(4)]
    keys.append("z")
    for key in keys:
        client.put_object(Bucket=BUCKET, Key=key, Body=b"x")
    for method in ("list_objects_v2", "list_objects"):
        pages = client.get_paginator(method).paginate(Bucket=BUCKET, PaginationConfig={"PageSize": 3})
        assert [each["Key"] for page in pages for each in page["Contents"]] == keys
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=BUCKET, Delimiter="/", PaginationConfig={"PageSize": 1}
    )
    rows = [(page.get("CommonPrefixes"), page.get("Contents")) for page in pages]
    assert [row[0][0]["Prefix"] for row in rows if row[0]] == ["a/", "b/", "c/"]
    assert [row[1][0]["Key"] for row in rows if row[1]] == ["z"]
    found = client.list_objects_v2(Bucket=BUCKET, Prefix="b/", StartAfter="b/01")
    assert [each["Key"] for each in found["Contents"]] == ["b/02", "b/03"]
    assert client.list_objects_v2(Bucket=BUCKET, MaxKeys=0)["KeyCount"] == 0
    assert code_of(client.list_objects_v2, Bucket=BUCKET, ContinuationToken="?") == "InvalidArgument"
    gone = client.delete_objects(
        Bucket=BUCKET, Delete={"Objects": [{"Key": key} for key in [*keys, "never"]]}
    )
    assert len(gone["Deleted"]) == len(keys) + 1
    assert client.list_objects_v2(Bucket=BUCKET)["KeyCount"] == 0


def test_buckets_are_made_listed_and_removed(s3: Served) -> None:
    client = s3.client()
    client.create_bucket(Bucket="warm")
    assert [each["Name"] for each in client.list_buckets()["Buckets"]] == ["blocks", "warm"]
    assert client.head_bucket(Bucket="warm")
    assert client.get_bucket_location(Bucket="warm")["LocationConstraint"] is None
    assert code_of(client.create_bucket, Bucket="warm") == "BucketAlreadyOwnedByYou"
    client.put_object(Bucket="warm", Key="a", Body=b"x")
    assert code_of(client.delete_bucket, Bucket="warm") == "BucketNotEmpty"
    client.delete_object(Bucket="warm", Key="a")
    client.delete_bucket(Bucket="warm")
    assert code_of(client.head_bucket, Bucket="warm") == "404"


def test_s3transfer_uploads_and_downloads_in_parts(s3: Served) -> None:
    client = s3.client()
    settings = TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20, max_concurrency=4)
    data = BIG * 3
    client.upload_fileobj(io.BytesIO(data), BUCKET, "large", Config=settings)
    assert client.head_object(Bucket=BUCKET, Key="large")["ETag"].endswith('-4"')
    back = io.BytesIO()
    client.download_fileobj(BUCKET, "large", back, Config=settings)
    assert back.getvalue() == data
    assert (
        body_of(client, "large", Range=f"bytes={(5 << 20) - 3}-{(5 << 20) + 3}")
        == data[(5 << 20) - 3 : (5 << 20) + 4]
    )


def test_a_multipart_upload_step_by_step(s3: Served) -> None:
    client = s3.client()
    where = {"Bucket": BUCKET, "Key": "large"}
    name = client.create_multipart_upload(**where, Metadata={"a": "b"})["UploadId"]
    tags = {
        number: client.upload_part(**where, UploadId=name, PartNumber=number, Body=body)["ETag"]
        for number, body in ((2, b"second"), (1, BIG), (7, b"dropped"), (3, b"third"), (2, BIG))
    }
    listed = client.list_parts(**where, UploadId=name, MaxParts=2)
    assert [(each["PartNumber"], each["Size"]) for each in listed["Parts"]] == [(1, len(BIG)), (2, len(BIG))]
    assert listed["IsTruncated"]
    more = client.list_parts(**where, UploadId=name, PartNumberMarker=listed["NextPartNumberMarker"])
    assert [each["PartNumber"] for each in more["Parts"]] == [3, 7]
    assert [each["UploadId"] for each in client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]] == [name]
    assert code_of(client.head_object, **where) == "404"

    def complete(*numbers: int, tag: str = "") -> str:
        parts = [{"PartNumber": number, "ETag": tag or tags[number]} for number in numbers]
        return code_of(
            client.complete_multipart_upload, **where, UploadId=name, MultipartUpload={"Parts": parts}
        )

    assert complete(1, 2, tag='"0"') == "InvalidPart"
    assert complete(2, 1) == "InvalidPartOrder"
    assert complete(1, 3, 7) == "EntityTooSmall"
    parts = [{"PartNumber": number, "ETag": tags[number]} for number in (1, 2, 3)]
    client.complete_multipart_upload(**where, UploadId=name, MultipartUpload={"Parts": parts})
    found = client.get_object(**where)
    assert found["Body"].read() == BIG + BIG + b"third"
    assert found["Metadata"] == {"a": "b"}
    assert complete(1) == "NoSuchUpload"
    other = client.create_multipart_upload(**where)["UploadId"]
    client.upload_part(**where, UploadId=other, PartNumber=1, Body=b"x")
    client.abort_multipart_upload(**where, UploadId=other)
    assert code_of(client.upload_part, **where, UploadId=other, PartNumber=1, Body=b"x") == "NoSuchUpload"
    client.delete_object(**where)
    wait_until(lambda: not s3.blocks["one"].blocks, what="all blocks to be freed")


def test_presigned_urls_are_good_for_what_they_were_signed_for(s3: Served) -> None:
    client = s3.client(signature_version="s3v4")
    url = client.generate_presigned_url("put_object", {"Bucket": BUCKET, "Key": "a"}, ExpiresIn=60)
    with urllib.request.urlopen(urllib.request.Request(url, data=b"by url", method="PUT")) as answer:
        assert answer.status == 200
    url = client.generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": "a"}, ExpiresIn=60)
    with urllib.request.urlopen(url) as answer:
        assert answer.read() == b"by url"
    wanted = {"Bucket": BUCKET, "Key": "a", "ResponseContentType": "x/y", "ResponseCacheControl": "no-store"}
    with urllib.request.urlopen(client.generate_presigned_url("get_object", wanted)) as answer:
        assert (answer.headers["content-type"], answer.headers["cache-control"]) == ("x/y", "no-store")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url, method="DELETE"))
    refused.value.close()
    assert refused.value.code == 403
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url.replace("/a?", "/b?"))
    refused.value.close()
    assert refused.value.code == 403


def test_bodies_that_are_streamed_come_in_chunks_with_a_trailer(s3: Served) -> None:
    class Unseekable(io.RawIOBase):
        """boto3 sends the checksum of what it cannot read twice after the body."""

        def __init__(self, data: bytes) -> None:
            self._data = io.BytesIO(data)

        def read(self, size: int = -1) -> bytes:
            return self._data.read(size)

        def readable(self) -> bool:
            return True

    client = s3.client(s3={"addressing_style": "path", "payload_signing_enabled": False})
    client.upload_fileobj(Unseekable(BIG), BUCKET, "a")
    assert body_of(client, "a") == BIG


def test_tenants_have_buckets_of_their_own_and_no_word_of_others(s3: Served) -> None:
    mine, other = s3.client(), s3.client(OTHER_KEY)
    mine.create_bucket(Bucket="secrets")
    mine.put_object(Bucket="secrets", Key="a", Body=b"mine")
    mine.put_object(Bucket=BUCKET, Key="a", Body=b"mine")
    name = mine.create_multipart_upload(Bucket="secrets", Key="up")["UploadId"]
    assert [each["Name"] for each in other.list_buckets()["Buckets"]] == ["blocks"]
    for bucket in ("secrets", "never-made"):
        assert code_of(other.get_object, Bucket=bucket, Key="a") == "NoSuchBucket"
        assert code_of(other.put_object, Bucket=bucket, Key="a", Body=b"x") == "NoSuchBucket"
        assert code_of(other.list_objects_v2, Bucket=bucket) == "NoSuchBucket"
        assert code_of(other.delete_object, Bucket=bucket, Key="a") == "NoSuchBucket"
        assert code_of(other.list_parts, Bucket=bucket, Key="up", UploadId=name) == "NoSuchUpload"
    assert code_of(other.get_object, Bucket=BUCKET, Key="a") == "NoSuchKey"
    other.create_bucket(Bucket="secrets")
    other.put_object(Bucket="secrets", Key="a", Body=b"theirs")
    assert mine.get_object(Bucket="secrets", Key="a")["Body"].read() == b"mine"


@pytest.mark.expects_log(".*")
def test_what_is_lost_before_the_first_byte_is_no_such_key_and_after_it_ends_the_connection(
    s3: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such key once the loss is certain; until then the client may try again."""
    monkeypatch.setattr(suspect_blocks, "LOOK_SECONDS", 0.01)
    client, blocks = s3.client(), s3.blocks["one"].blocks
    client.put_object(Bucket=BUCKET, Key="a", Body=BIG)
    large = [name for name, (_, data) in blocks.items() if len(data) == 1 << 20]
    del blocks[large[3]]
    with pytest.raises((IncompleteReadError, ResponseStreamingError)):
        body_of(client, "a")
    # It lost a block, so it is gone as a whole, for everybody and for good.
    wait_until(lambda: _last_code(client, "a") == "NoSuchKey", 60, "the loss to be certain")
    assert client.list_objects_v2(Bucket=BUCKET)["KeyCount"] == 0
    client.put_object(Bucket=BUCKET, Key="b", Body=b"small")
    blocks.clear()
    wait_until(lambda: _last_code(client, "b") == "NoSuchKey", 60, "the loss to be certain")


def _last_code(client: Any, key: str) -> str:
    """Of reading an object whole; empty where the connection ended amid it."""
    try:
        client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    except ClientError as refused:
        return str(refused.response["Error"]["Code"])
    except (IncompleteReadError, ResponseStreamingError):
        return ""
    return "read"


def test_an_enclosure_that_is_away_is_no_loss(s3: Served) -> None:
    client, store = s3.client(), s3.blocks["one"]
    client.put_object(Bucket=BUCKET, Key="a", Body=b"stays")
    store.unavailable.add("get")
    assert code_of(client.get_object, Bucket=BUCKET, Key="a") == "ServiceUnavailable"
    store.unavailable.clear()
    assert body_of(client, "a") == b"stays"


def test_a_full_tenant_is_told_so_and_another_is_not_concerned(s3: Served) -> None:
    s3.blocks["one"].refuse_as_full = True
    assert code_of(s3.client().put_object, Bucket=BUCKET, Key="a", Body=BIG) == "InsufficientStorage"
    s3.client(OTHER_KEY).put_object(Bucket=BUCKET, Key="a", Body=BIG)
    s3.blocks["one"].refuse_as_full = False
    assert s3.client().list_objects_v2(Bucket=BUCKET)["KeyCount"] == 0


def test_a_refused_read_gives_its_turn_back(tmp_path: Path) -> None:
    with served(tmp_path, transfers=2) as s3:
        client = s3.client()
        client.put_object(Bucket="blocks", Key="a", Body=b"x")
        for _ in range(4):
            with pytest.raises(ClientError, match="InvalidArgument"):
                client.get_object(Bucket="blocks", Key="a", ResponseContentType="\n")
        assert client.get_object(Bucket="blocks", Key="a")["Body"].read() == b"x"


@pytest.mark.expects_log("was not made: A tenant has 0 buckets")
def test_a_bucket_that_cannot_be_made_at_a_start_does_not_end_the_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.s3.index.BUCKETS_MAX", 0)
    with served(tmp_path) as s3:
        assert s3.client().list_buckets()["Buckets"] == []
