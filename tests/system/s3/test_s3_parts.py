"""Objects of several parts: their readers when they are replaced, their checksums, and lost answers."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from awscrt import checksums
from boto3.exceptions import S3UploadFailedError
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError, IncompleteReadError, ResponseStreamingError

from agent.fs.files import suspect_blocks
from agent.s3.put_object import PART_BYTES_MIN
from tests.support.engines.s3_served import Served, answer_of, signed_head
from tests.support.waiting import wait_until

BUCKET, KEY = "blocks", "a"
DATA = random.Random(5).randbytes(2 * PART_BYTES_MIN + 12_345)
BODIES = [DATA[at : at + PART_BYTES_MIN] for at in range(0, len(DATA), PART_BYTES_MIN)]


def text_of(crc: int, size: int) -> str:
    return base64.b64encode(crc.to_bytes(size, "big")).decode()


def begun(client: Any, bodies: list[bytes] = BODIES, **more: Any) -> dict[str, Any]:
    """An upload with all of its parts; what it is completed with."""
    upload = client.create_multipart_upload(Bucket=BUCKET, Key=KEY, **more)["UploadId"]
    parts = []
    for number, body in enumerate(bodies, 1):
        made = client.upload_part(Bucket=BUCKET, Key=KEY, UploadId=upload, PartNumber=number, Body=body)
        parts.append({"PartNumber": number, "ETag": made["ETag"]})
    return {"Bucket": BUCKET, "Key": KEY, "UploadId": upload, "MultipartUpload": {"Parts": parts}}


def code_of(call: Callable[..., Any], **arguments: Any) -> str:
    with pytest.raises(ClientError) as refused:
        call(**arguments)
    return str(refused.value.response["Error"]["Code"])


@pytest.mark.parametrize("by", ["put", "delete", "parts"])
def test_who_reads_an_object_reads_it_to_its_end_whoever_replaces_it(s3: Served, by: str) -> None:
    client, other = s3.client(), s3.client()
    client.complete_multipart_upload(**begun(client))
    body = client.get_object(Bucket=BUCKET, Key=KEY)["Body"]
    got = body.read(1 << 20)
    match by:
        case "put":
            other.put_object(Bucket=BUCKET, Key=KEY, Body=b"new")
        case "delete":
            other.delete_object(Bucket=BUCKET, Key=KEY)
        case "parts":
            other.complete_multipart_upload(**begun(other, [b"new"]))
    store = s3.stores["one"]
    wait_until(lambda: len(store.index.spare(9)) == len(BODIES), what="the old files to be spare")
    assert got + body.read() == DATA
    wait_until(lambda: not store.index.spare(9), what="the old files to go")
    if by == "delete":
        wait_until(lambda: not s3.blocks["one"].blocks, what="their blocks to go")
    else:
        assert other.get_object(Bucket=BUCKET, Key=KEY)["Body"].read() == b"new"


def is_there(client: Any) -> bool:
    """Whether a reader is told that it may try again, or gets a part of it."""
    try:
        client.get_object(Bucket=BUCKET, Key=KEY)["Body"].read()
    except ClientError as refused:
        return str(refused.response["Error"]["Code"]) != "NoSuchKey"
    except (IncompleteReadError, ResponseStreamingError):
        return True
    return True


@pytest.mark.expects_log(".*")
def test_who_lost_a_later_part_is_not_there_once_that_is_certain(
    s3: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspect_blocks, "LOOK_SECONDS", 0.01)
    client, blocks = s3.client(), s3.blocks["one"].blocks
    upload = client.create_multipart_upload(Bucket=BUCKET, Key=KEY)["UploadId"]
    parts = []
    for number, body in enumerate(BODIES, 1):
        kept = set(blocks)
        made = client.upload_part(Bucket=BUCKET, Key=KEY, UploadId=upload, PartNumber=number, Body=body)
        parts.append({"PartNumber": number, "ETag": made["ETag"]})
    client.complete_multipart_upload(
        Bucket=BUCKET, Key=KEY, UploadId=upload, MultipartUpload={"Parts": parts}
    )
    del blocks[next(name for name in blocks if name not in kept)]
    with pytest.raises((IncompleteReadError, ResponseStreamingError)):
        client.get_object(Bucket=BUCKET, Key=KEY)["Body"].read()
    wait_until(lambda: not is_there(client), 60, "the loss to be certain")
    assert code_of(client.head_object, Bucket=BUCKET, Key=KEY) == "404"
    assert code_of(client.get_object, Bucket=BUCKET, Key=KEY) == "NoSuchKey"
    assert client.list_objects_v2(Bucket=BUCKET)["KeyCount"] == 0
    wait_until(lambda: not blocks, what="what was left of it to go")


def test_a_completion_whose_answer_was_lost_may_be_asked_for_again(s3: Served) -> None:
    client = s3.client()
    upload = begun(client)
    first = client.complete_multipart_upload(**upload)
    again = client.complete_multipart_upload(**upload)
    assert (again["ETag"], again["Key"]) == (first["ETag"], KEY)
    assert client.complete_multipart_upload(**upload, IfNoneMatch="*")["ETag"] == first["ETag"]
    fewer = {**upload, "MultipartUpload": {"Parts": upload["MultipartUpload"]["Parts"][:1]}}
    assert code_of(client.complete_multipart_upload, **fewer) == "NoSuchUpload"
    assert code_of(client.complete_multipart_upload, **{**upload, "Key": "b"}) == "NoSuchUpload"
    client.put_object(Bucket=BUCKET, Key=KEY, Body=b"newer")
    client.complete_multipart_upload(**upload)
    assert client.get_object(Bucket=BUCKET, Key=KEY)["Body"].read() == b"newer"
    other = begun(client)
    client.abort_multipart_upload(Bucket=BUCKET, Key=KEY, UploadId=other["UploadId"])
    assert code_of(client.complete_multipart_upload, **other) == "NoSuchUpload"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ChecksumCRC64NVME", text_of(checksums.crc64nvme(DATA), 8)),
        ("ChecksumCRC32", text_of(checksums.crc32(DATA), 4)),
        ("ChecksumCRC32C", text_of(checksums.crc32c(DATA), 4)),
    ],
    ids=["crc64nvme", "crc32", "crc32c"],
)
def test_the_checksum_of_the_whole_is_checked_and_given_back(
    s3: Served, tmp_path: Path, name: str, said: str
) -> None:
    client, file = s3.client(), tmp_path / "file"
    file.write_bytes(DATA)
    config = TransferConfig(multipart_threshold=PART_BYTES_MIN, multipart_chunksize=PART_BYTES_MIN)
    client.upload_file(str(file), BUCKET, KEY, ExtraArgs={name: said}, Config=config)
    found = client.get_object(Bucket=BUCKET, Key=KEY, ChecksumMode="ENABLED")
    assert found["Body"].read() == DATA
    assert (found[name], found["ChecksumType"]) == (said, "FULL_OBJECT")
    wrong = base64.b64encode(bytes(len(base64.b64decode(said)))).decode()
    with pytest.raises(S3UploadFailedError, match="BadDigest"):
        client.upload_file(str(file), BUCKET, "wrong", ExtraArgs={name: wrong}, Config=config)
    assert client.list_objects_v2(Bucket=BUCKET)["KeyCount"] == 1


def test_parts_have_the_checksum_that_was_announced_and_the_one_that_completes_them(s3: Served) -> None:
    client = s3.client()
    upload = client.create_multipart_upload(Bucket=BUCKET, Key=KEY, ChecksumAlgorithm="SHA256")["UploadId"]
    which = {"Bucket": BUCKET, "Key": KEY, "UploadId": upload}
    part = {**which, "PartNumber": 1, "Body": b"one"}
    assert code_of(client.upload_part, **part, ChecksumAlgorithm="CRC32") == "InvalidRequest"
    made = client.upload_part(**part, ChecksumAlgorithm="SHA256")
    wrong = text_of(0, 32)
    for said in ({"ChecksumSHA256": wrong}, {"ChecksumCRC32": text_of(checksums.crc32(b"one"), 4)}):
        rows = {"Parts": [{"PartNumber": 1, "ETag": made["ETag"], **said}]}
        assert code_of(client.complete_multipart_upload, **which, MultipartUpload=rows) == "InvalidPart"
    rows = {"Parts": [{"PartNumber": 1, "ETag": made["ETag"], "ChecksumSHA256": made["ChecksumSHA256"]}]}
    client.complete_multipart_upload(**which, MultipartUpload=rows)


def test_a_checksum_that_cannot_be_told_of_the_parts_is_refused(s3: Served) -> None:
    client = s3.client()
    upload = begun(client, [b"one"], ChecksumAlgorithm="CRC32")
    assert (
        code_of(client.complete_multipart_upload, **upload, ChecksumCRC64NVME="AAAAAAAAAAA=")
        == "InvalidRequest"
    )
    head, _ = signed_head("PUT", "/blocks/x", {"content-length": "1", "x-amz-checksum-sha512": "AAAA"})
    with s3.connect() as connection:
        connection.sendall(head + b"x")
        status, body = answer_of(connection)
    assert (status, b"NotImplemented" in body) == (501, True)
