"""Copies of objects and parts, by boto3 and by hand: whole or absent, of one's own objects alone."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from agent.fs.files import suspect_blocks
from agent.s3 import copy_object
from tests.support.engines.s3_served import OTHER_KEY, Served, answer_of, served, signed_head
from tests.support.waiting import wait_until

BUCKET = "blocks"
BIG = random.Random(5).randbytes((6 << 20) + 4321)
REPLACED = {"MetadataDirective": "REPLACE", "Metadata": {"layer": "8"}, "ContentType": "y/z"}


def code_of(call: Callable[..., Any], **arguments: Any) -> str:
    """The code that a call is refused with."""
    with pytest.raises(ClientError) as refused:
        call(**arguments)
    return str(refused.value.response["Error"]["Code"])


def body_of(client: Any, key: str, **more: Any) -> bytes:
    data: bytes = client.get_object(Bucket=BUCKET, Key=key, **more)["Body"].read()
    return data


def copy(client: Any, source: str, key: str, **more: Any) -> Any:
    wanted = {"Bucket": BUCKET, "Key": source}
    return client.copy_object(Bucket=BUCKET, Key=key, CopySource=wanted, **more)["CopyObjectResult"]


def test_a_copy_has_bytes_headers_and_checksum_of_its_own(s3: Served) -> None:
    client = s3.client()
    client.put_object(Bucket=BUCKET, Key="a", Body=BIG, Metadata={"layer": "7"}, ContentType="x/y")
    made = copy(client, "a", "b")
    assert made["ETag"] == f'"{hashlib.md5(BIG).hexdigest()}"'
    assert (
        made["ChecksumCRC32"]
        == client.head_object(Bucket=BUCKET, Key="a", ChecksumMode="ENABLED")["ChecksumCRC32"]
    )
    client.delete_object(Bucket=BUCKET, Key="a")
    found = client.get_object(Bucket=BUCKET, Key="b")
    assert (found["Body"].read(), found["Metadata"], found["ContentType"]) == (BIG, {"layer": "7"}, "x/y")
    made = copy(client, "b", "c", **REPLACED, ChecksumAlgorithm="SHA256")
    found = client.get_object(Bucket=BUCKET, Key="c", ChecksumMode="ENABLED")
    assert (found["Body"].read(), found["Metadata"], found["ContentType"]) == (BIG, {"layer": "8"}, "y/z")
    assert found["ChecksumSHA256"] == made["ChecksumSHA256"]
    client.put_object(Bucket=BUCKET, Key="empty", Body=b"")
    copy(client, "empty", "c")
    assert body_of(client, "c") == b""


def test_a_copy_onto_itself_changes_headers_and_moves_no_byte(s3: Served) -> None:
    client = s3.client()
    before = client.put_object(Bucket=BUCKET, Key="a", Body=BIG, Metadata={"layer": "7"})
    files = s3.stores["one"].files.gauges()
    assert code_of(copy, client=client, source="a", key="a") == "InvalidRequest"
    reading = client.get_object(Bucket=BUCKET, Key="a")
    assert copy(client, "a", "a", **REPLACED)["ETag"] == before["ETag"]
    assert reading["Body"].read() == BIG
    found = client.head_object(Bucket=BUCKET, Key="a", ChecksumMode="ENABLED")
    assert (found["Metadata"], found["ContentType"]) == ({"layer": "8"}, "y/z")
    assert found["ChecksumCRC32"] == before["ChecksumCRC32"]
    copy(client, "a", "a", StorageClass="GLACIER")
    assert client.head_object(Bucket=BUCKET, Key="a")["Metadata"] == {"layer": "8"}
    wait_until(lambda: s3.stores["one"].files.gauges() == files, what="the reader's file to be closed")
    assert (
        code_of(copy, client=client, source="a", key="a", **REPLACED, IfNoneMatch="*") == "PreconditionFailed"
    )
    # Another checksum has to be computed, of all bytes.
    sha = copy(client, "a", "a", ChecksumAlgorithm="SHA256")["ChecksumSHA256"]
    assert client.head_object(Bucket=BUCKET, Key="a", ChecksumMode="ENABLED")["ChecksumSHA256"] == sha
    assert body_of(client, "a") == BIG
    assert s3.stores["one"].index.count() == 1


def test_keys_that_look_like_escapes_or_paths_are_copied_as_they_are(s3: Served) -> None:
    client = s3.client()
    keys = ["a/b", "/a", "a//b", "%2F", "%252F", "100%", "a+b", "a b", "ü€", "a?versionId=1", "a&b=c#d", "a%"]
    for at, key in enumerate(keys):
        client.put_object(Bucket=BUCKET, Key=key, Body=f"{at}".encode())
    for at, key in enumerate(keys):
        copy(client, key, f"copy {key}")
        assert body_of(client, f"copy {key}") == f"{at}".encode(), key


def test_a_source_of_another_tenant_is_not_there(s3: Served) -> None:
    one, two = s3.client(), s3.client(OTHER_KEY)
    one.create_bucket(Bucket="ofone")
    one.put_object(Bucket="ofone", Key="a", Body=b"secret")
    one.put_object(Bucket=BUCKET, Key="a", Body=b"secret")
    wanted = {"Bucket": "ofone", "Key": "a"}
    assert code_of(two.copy_object, Bucket=BUCKET, Key="b", CopySource=wanted) == "NoSuchBucket"
    nobody = {"Bucket": "ofnobody", "Key": "a"}
    assert code_of(two.copy_object, Bucket=BUCKET, Key="b", CopySource=nobody) == "NoSuchBucket"
    # The bucket of the same name is the tenant's own.
    assert code_of(copy, client=two, source="a", key="b") == "NoSuchKey"
    upload = two.create_multipart_upload(Bucket=BUCKET, Key="b")["UploadId"]
    part = {"Bucket": BUCKET, "Key": "b", "UploadId": upload, "PartNumber": 1, "CopySource": wanted}
    assert code_of(two.upload_part_copy, **part) == "NoSuchBucket"
    assert two.list_objects_v2(Bucket=BUCKET)["KeyCount"] == 0


def test_conditions_decide_before_anything_is_written(s3: Served) -> None:
    client = s3.client()
    etag = client.put_object(Bucket=BUCKET, Key="a", Body=b"bytes")["ETag"]
    copy(client, "a", "b", CopySourceIfMatch=etag, IfNoneMatch="*")
    again = {"client": client, "source": "a", "key": "b"}
    assert code_of(copy, **again, IfNoneMatch="*") == "PreconditionFailed"
    assert code_of(copy, **again, CopySourceIfNoneMatch=etag) == "PreconditionFailed"
    assert code_of(copy, **again, CopySourceIfMatch='"0"') == "PreconditionFailed"
    changed = client.head_object(Bucket=BUCKET, Key="a")["LastModified"]
    assert code_of(copy, **again, CopySourceIfModifiedSince=changed) == "PreconditionFailed"
    copy(client, "a", "b", CopySourceIfUnmodifiedSince=changed)
    assert s3.stores["one"].index.spare(10) == []


def test_parts_are_copied_whole_and_by_range(s3: Served) -> None:
    client = s3.client()
    client.put_object(Bucket=BUCKET, Key="a", Body=BIG)
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="b", Metadata={"layer": "7"})["UploadId"]
    ours = {"Bucket": BUCKET, "Key": "b", "UploadId": upload}
    source = {"Bucket": BUCKET, "Key": "a"}
    parts = []
    for number, more in ((1, {}), (2, {"CopySourceRange": f"bytes=77-{len(BIG) - 1}"})):
        made = client.upload_part_copy(**ours, PartNumber=number, CopySource=source, **more)["CopyPartResult"]
        parts.append({"PartNumber": number, "ETag": made["ETag"]})
    for text, code in (
        (f"bytes=0-{len(BIG)}", "InvalidRange"),
        ("bytes=5-4", "InvalidArgument"),
        ("bytes=-4", "InvalidArgument"),
        ("0-4", "InvalidArgument"),
    ):
        bad = {**ours, "PartNumber": 3, "CopySource": source, "CopySourceRange": text}
        assert code_of(client.upload_part_copy, **bad) == code
    wrong = {**ours, "UploadId": "none", "PartNumber": 1, "CopySource": source}
    assert code_of(client.upload_part_copy, **wrong) == "NoSuchUpload"
    client.delete_object(Bucket=BUCKET, Key="a")
    client.complete_multipart_upload(**ours, MultipartUpload={"Parts": parts})
    assert body_of(client, "b") == BIG + BIG[77:]
    assert client.head_object(Bucket=BUCKET, Key="b")["Metadata"] == {"layer": "7"}


def test_a_copy_has_the_checksum_that_its_upload_announced(s3: Served) -> None:
    client = s3.client()
    client.put_object(Bucket=BUCKET, Key="a", Body=b"bytes", ChecksumAlgorithm="SHA1")
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="b", ChecksumAlgorithm="CRC32C")["UploadId"]
    ours = {"Bucket": BUCKET, "Key": "b", "UploadId": upload}
    source = {"Bucket": BUCKET, "Key": "a"}
    made = client.upload_part_copy(**ours, PartNumber=1, CopySource=source)["CopyPartResult"]
    assert "ChecksumSHA1" not in made
    part = {"PartNumber": 1, "ETag": made["ETag"], "ChecksumCRC32C": made["ChecksumCRC32C"]}
    client.complete_multipart_upload(**ours, MultipartUpload={"Parts": [part]})
    assert body_of(client, "b") == b"bytes"


class Held:
    """Steps of copies that wait until they may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on, self.count = threading.Event(), threading.Event(), 0
        step = copy_object._Copy.step

        def slow(copying: Any, runner: Any) -> Any:
            self.count += 1
            self.begun.set()
            assert self.go_on.wait(60)
            return step(copying, runner)

        monkeypatch.setattr(copy_object._Copy, "step", slow)


@pytest.mark.parametrize("event", ["deleted", "replaced"])
def test_a_source_that_goes_meanwhile_is_copied_as_it_was(
    s3: Served, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    client, other, held = s3.client(), s3.client(), Held(monkeypatch)
    client.put_object(Bucket=BUCKET, Key="a", Body=BIG)
    copying = threading.Thread(target=copy, args=(client, "a", "b"))
    copying.start()
    assert held.begun.wait(60)
    if event == "deleted":
        other.delete_object(Bucket=BUCKET, Key="a")
    else:
        other.put_object(Bucket=BUCKET, Key="a", Body=b"another")
    held.go_on.set()
    copying.join()
    wait_until(lambda: s3.stores["one"].files_held() == 0, what="the readers to be closed")
    assert body_of(client, "b") == BIG


@pytest.mark.parametrize("event", ["deleted", "replaced", "described"])
def test_a_copy_onto_itself_undoes_nothing_that_was_acknowledged_meanwhile(
    s3: Served, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    client, other, held, refused = s3.client(), s3.client(), Held(monkeypatch), list[str]()
    client.put_object(Bucket=BUCKET, Key="a", Body=BIG, Metadata={"layer": "7"})

    def renew() -> None:
        try:
            copy(client, "a", "a", ChecksumAlgorithm="SHA256")
        except ClientError as error:
            refused.append(error.response["Error"]["Code"])

    renewing = threading.Thread(target=renew)
    renewing.start()
    assert held.begun.wait(60)
    if event == "deleted":
        other.delete_object(Bucket=BUCKET, Key="a")
    elif event == "replaced":
        other.put_object(Bucket=BUCKET, Key="a", Body=b"another", Metadata={"layer": "8"})
    else:
        copy(other, "a", "a", **REPLACED)
    held.go_on.set()
    renewing.join()
    if event == "deleted":
        assert refused == ["NoSuchKey"]
        assert s3.stores["one"].index.count() == 0
    else:
        assert refused == []
        found = client.get_object(Bucket=BUCKET, Key="a", ChecksumMode="ENABLED")
        assert found["Metadata"] == {"layer": "8"}
        assert found["Body"].read() == (b"another" if event == "replaced" else BIG)
        assert "ChecksumSHA256" in found
    wait_until(lambda: s3.stores["one"].files_held() == 0, what="the readers to be closed")


def test_a_copy_onto_itself_of_what_changes_again_and_again_ends(
    s3: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, tries = s3.client(), 0
    client.put_object(Bucket=BUCKET, Key="a", Body=b"bytes")
    step = copy_object._Copy.step

    def beaten(self: Any, runner: Any) -> Any:
        nonlocal tries
        tries += 1
        index = s3.stores["one"].index
        assert index.describe(BUCKET, replace(index.find(BUCKET, "a"), headers={"x-amz-meta-n": str(tries)}))
        return step(self, runner)

    monkeypatch.setattr(copy_object._Copy, "step", beaten)
    again = {"client": client, "source": "a", "key": "a", "ChecksumAlgorithm": "SHA256"}
    assert code_of(copy, **again) == "ServiceUnavailable"
    assert tries == copy_object.COPY_TRIES
    assert client.head_object(Bucket=BUCKET, Key="a")["Metadata"] == {"n": str(tries)}
    assert code_of(copy, **again, IfNoneMatch="*") == "PreconditionFailed"
    assert tries == copy_object.COPY_TRIES


def test_a_copy_ends_when_the_door_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path) as s3:
        s3.client().put_object(Bucket=BUCKET, Key="a", Body=BIG)
        held = Held(monkeypatch)
        with s3.connect() as asking, s3.connect() as idle:
            asking.sendall(signed_head("PUT", "/blocks/b", {"x-amz-copy-source": "blocks/a"})[0])
            assert held.begun.wait(60)
            stopping = threading.Thread(target=s3.door.stop, args=(0.0,))
            stopping.start()
            assert idle.recv(1) == b"", "all connections are told at once"
            held.go_on.set()
            stopping.join()
            assert held.count == 1
            assert answer_of(asking) == (0, b"")


def test_a_copy_whose_client_is_gone_ends(s3: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.client().put_object(Bucket=BUCKET, Key="a", Body=BIG)
    held = Held(monkeypatch)
    with s3.connect() as asking:
        asking.sendall(signed_head("PUT", "/blocks/b", {"x-amz-copy-source": "blocks/a"})[0])
        assert held.begun.wait(60)
    held.go_on.set()
    wait_until(lambda: s3.door._service.transfers.held == 0, what="the copy to end")
    assert held.count == 1
    assert (s3.stores["one"].index.count(), s3.stores["one"].files_held()) == (1, 0)


def test_a_copy_whose_client_has_sent_its_next_request_goes_on(
    s3: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = s3.client()
    client.put_object(Bucket=BUCKET, Key="a", Body=BIG)
    held = Held(monkeypatch)
    with s3.connect() as asking:
        asking.sendall(signed_head("PUT", "/blocks/b", {"x-amz-copy-source": "blocks/a"})[0])
        assert held.begun.wait(60)
        asking.sendall(signed_head("GET", "/blocks/b")[0])
        held.go_on.set()
        assert answer_of(asking)[0] == 200
        assert answer_of(asking) == (200, BIG)


@pytest.mark.expects_log(".*")
def test_a_source_that_has_lost_bytes_is_no_source_and_leaves_nothing(
    s3: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such key once the loss is certain, as for a reader."""
    monkeypatch.setattr(suspect_blocks, "LOOK_SECONDS", 0.01)
    client = s3.client()
    client.put_object(Bucket=BUCKET, Key="a", Body=BIG)
    # The last block, so that copying has begun when it is found missing.
    s3.blocks["one"].blocks.popitem()
    assert code_of(copy, client=client, source="a", key="b") == "ServiceUnavailable"

    def is_lost() -> bool:
        return code_of(copy, client=client, source="a", key="b") == "NoSuchKey"

    wait_until(is_lost, 60, "the loss to be certain")
    assert client.list_objects_v2(Bucket=BUCKET)["KeyCount"] == 0
    wait_until(lambda: s3.stores["one"].files_held() == 0, what="the readers to be closed")
    wait_until(lambda: not s3.blocks["one"].blocks, what="what was copied so far to be freed")


def test_a_copy_into_a_bucket_that_is_not_there_writes_nothing(s3: Served) -> None:
    client = s3.client()
    client.put_object(Bucket=BUCKET, Key="a", Body=b"bytes")
    source = {"Bucket": BUCKET, "Key": "a"}
    assert code_of(client.copy_object, Bucket="nobucket", Key="a", CopySource=source) == "NoSuchBucket"
    assert code_of(copy, client=client, source="none", key="b") == "NoSuchKey"
    assert s3.stores["one"].index.count() == 1


def test_a_source_above_the_bound_of_a_body_goes_in_parts(tmp_path: Path) -> None:
    with served(tmp_path, object_max=5 << 20) as s3:
        client = s3.client()
        upload = client.create_multipart_upload(Bucket=BUCKET, Key="a")["UploadId"]
        ours = {"Bucket": BUCKET, "Key": "a", "UploadId": upload}
        parts = [
            {"PartNumber": n, "ETag": client.upload_part(**ours, PartNumber=n, Body=BIG[: 5 << 20])["ETag"]}
            for n in (1, 2)
        ]
        client.complete_multipart_upload(**ours, MultipartUpload={"Parts": parts})
        assert code_of(copy, client=client, source="a", key="b") == "InvalidRequest"
        # Its headers change all the same.
        copy(client, "a", "a", **REPLACED)
        assert body_of(client, "a") == BIG[: 5 << 20] * 2


def test_a_header_that_is_no_source_is_refused_and_the_connection_goes_on(s3: Served) -> None:
    with s3.connect() as connection:
        for source in ("", "/", "blocks", "%zz/a", "a" * 4000, "blocks/a?versionId=null", "\xff/\xff"):
            connection.sendall(signed_head("PUT", "/blocks/b", {"x-amz-copy-source": source})[0])
            status, body = answer_of(connection)
            assert status in (400, 501), (source, body)
        connection.sendall(signed_head("PUT", "/blocks/b", {"x-amz-copy-source": "/blocks/none"})[0])
        assert answer_of(connection)[0] == 404
