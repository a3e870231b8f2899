"""What is asked for and is not done here is refused, and nothing is done of it in part."""

from __future__ import annotations

import datetime
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from agent.config.s3_section import S3Section
from agent.fs.files.options import FilesOptions
from agent.inline.secrets import SecretKey
from agent.pool.map.document import tenant_id
from agent.s3.credentials import new_credentials_file, read_credentials_file
from agent.s3.make_door import make_s3_door
from tests.support.engines.s3_served import KEY, Served, answer_of, boto_client, served, signed_head
from tests.support.pool.inline_runner import InlineRunner
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import PoolAgent, volume_settings

BUCKET = "blocks"


def code_of(call: Callable[..., Any], **arguments: Any) -> str:
    """The code that a call is refused with."""
    with pytest.raises(ClientError) as refused:
        call(**arguments)
    return str(refused.value.response["Error"]["Code"])


def test_a_wrong_region_is_refused_with_the_right_one(tmp_path: Path) -> None:
    with served(tmp_path, region="eu-west-1") as s3:
        told = s3.client(region="us-east-1")
        with pytest.raises(ClientError) as refused:
            told.list_buckets()
        error = refused.value.response["Error"]
        assert (error["Code"], error["Region"]) == ("AuthorizationHeaderMalformed", "eu-west-1")
        # boto3 reads the right one there, of a bucket's request, and signs anew.
        told.put_object(Bucket=BUCKET, Key="a", Body=b"bytes")
        assert s3.client(region="eu-west-1").get_object(Bucket=BUCKET, Key="a")["Body"].read() == b"bytes"
        url = s3.client(region="us-east-1", signature_version="s3v4").generate_presigned_url(
            "get_object", Params={"Bucket": BUCKET, "Key": "a"}
        )
        with pytest.raises(urllib.error.HTTPError) as presigned:
            urllib.request.urlopen(url)
        with presigned.value as answer:
            document = answer.read()
        assert b"<Code>AuthorizationQueryParametersError</Code>" in document
        assert b"<Region>eu-west-1</Region>" in document


def test_a_wrong_region_and_a_wrong_secret_are_told_nothing(s3: Served) -> None:
    wrong = replace(KEY, secret=SecretKey(b"not the secret of any tenant"))
    for key, code in (
        (wrong, b"SignatureDoesNotMatch"),
        (replace(KEY, key_id="G35NOBODY"), b"InvalidAccess"),
    ):
        with s3.connect() as connection:
            connection.sendall(signed_head("GET", "/", key=key, region="eu-west-1")[0])
            status, document = answer_of(connection)
        assert status == 403
        assert code in document
        assert b"us-east-1" not in document


def test_classes_and_encryption_by_the_service_are_taken_and_mean_nothing(s3: Served) -> None:
    client = s3.client()
    client.put_object(
        Bucket=BUCKET, Key="a", Body=b"bytes", StorageClass="STANDARD_IA", ServerSideEncryption="AES256"
    )
    upload = client.create_multipart_upload(
        Bucket=BUCKET, Key="b", StorageClass="GLACIER", ServerSideEncryption="AES256"
    )
    client.abort_multipart_upload(Bucket=BUCKET, Key="b", UploadId=upload["UploadId"])
    found = client.get_object(Bucket=BUCKET, Key="a")
    assert found["Body"].read() == b"bytes"
    assert "StorageClass" not in found
    assert client.list_objects_v2(Bucket=BUCKET)["Contents"][0]["StorageClass"] == "STANDARD"
    put = {"Bucket": BUCKET, "Key": "a", "Body": b"other"}
    assert code_of(client.put_object, **put, StorageClass="WARM") == "InvalidStorageClass"
    assert code_of(client.put_object, **put, ServerSideEncryption="aws:kms") == "NotImplemented"
    assert client.get_object(Bucket=BUCKET, Key="a")["Body"].read() == b"bytes"


def test_a_bucket_says_that_it_keeps_no_versions_and_an_object_that_it_has_no_tags(s3: Served) -> None:
    client = s3.client()
    client.put_object(Bucket=BUCKET, Key="a", Body=b"bytes")
    assert "Status" not in client.get_bucket_versioning(Bucket=BUCKET)
    assert code_of(client.get_bucket_versioning, Bucket="nobucket") == "NoSuchBucket"
    assert client.get_object_tagging(Bucket=BUCKET, Key="a")["TagSet"] == []
    assert code_of(client.get_object_tagging, Bucket=BUCKET, Key="b") == "NoSuchKey"
    on = {"Bucket": BUCKET, "VersioningConfiguration": {"Status": "Enabled"}}
    assert code_of(client.put_bucket_versioning, **on) == "MethodNotAllowed"


@pytest.mark.parametrize(
    "condition",
    [
        {"ETag": '"0"'},
        {"Size": 7},
        {"LastModifiedTime": datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)},
        {"VersionId": "1"},
    ],
    ids=["etag", "size", "time", "version"],
)
def test_a_condition_of_one_key_of_several_deletes_none(s3: Served, condition: dict[str, Any]) -> None:
    client = s3.client()
    for key in ("a", "b"):
        client.put_object(Bucket=BUCKET, Key=key, Body=b"precious")
    rows = {"Objects": [{"Key": "b"}, {"Key": "a", **condition}]}
    assert code_of(client.delete_objects, Bucket=BUCKET, Delete=rows) == "NotImplemented"
    assert client.list_objects_v2(Bucket=BUCKET)["KeyCount"] == 2


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        ({"ObjectLockEnabledForBucket": True}, "NotImplemented"),
        ({"ObjectOwnership": "ObjectWriter"}, "NotImplemented"),
        (
            {"CreateBucketConfiguration": {"LocationConstraint": "eu-west-3"}},
            "IllegalLocationConstraintException",
        ),
        (
            {
                "CreateBucketConfiguration": {
                    "Location": {"Type": "AvailabilityZone", "Name": "a"},
                    "Bucket": {"Type": "Directory", "DataRedundancy": "SingleAvailabilityZone"},
                }
            },
            "MalformedXML",
        ),
    ],
    ids=["lock", "ownership", "region", "directory"],
)
def test_a_bucket_of_another_kind_is_not_made(s3: Served, wanted: dict[str, Any], code: str) -> None:
    client = s3.client()
    assert code_of(client.create_bucket, Bucket="another", **wanted) == code
    assert [each["Name"] for each in client.list_buckets()["Buckets"]] == [BUCKET]
    client.create_bucket(Bucket="another", ObjectOwnership="BucketOwnerEnforced")


def test_buckets_and_uploads_are_listed_as_they_are_asked_for(s3: Served) -> None:
    client = s3.client()
    names = [f"more-{number}" for number in range(7)]
    for name in names:
        client.create_bucket(Bucket=name)
    pages = client.get_paginator("list_buckets").paginate(Prefix="more-", PaginationConfig={"PageSize": 3})
    found = [[each["Name"] for each in page["Buckets"]] for page in pages]
    assert found == [names[:3], names[3:6], names[6:]]
    assert client.list_buckets(Prefix="zzz")["Buckets"] == []
    assert code_of(client.list_buckets, ContinuationToken="!") == "InvalidArgument"
    made = [
        (key, client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"])
        for key in ("a", "b", "b", "b", "c&<", "d")
    ]
    pages = client.get_paginator("list_multipart_uploads").paginate(
        Bucket=BUCKET, PaginationConfig={"PageSize": 2}
    )
    uploads = [[(each["Key"], each["UploadId"]) for each in page["Uploads"]] for page in pages]
    assert [len(page) for page in uploads] == [2, 2, 2]
    assert sorted(each for page in uploads for each in page) == sorted(made)
    assert code_of(client.list_multipart_uploads, Bucket=BUCKET, KeyMarker="a\x01") == "InvalidArgument"


def test_a_tenant_that_is_erased_while_the_agent_runs_is_nobody_from_then_on(tmp_path: Path) -> None:
    media = [MemoryNamespace(1 << 24)]
    new_credentials_file(tmp_path / "keys")
    [key] = read_credentials_file(tmp_path / "keys", "default")
    settings = volume_settings((1,), volume_id=bytes(16))
    owned = replace(settings, kind="files", tenant=bytes.fromhex(tenant_id("default")))
    volume, channel = PoolAgent(media, owned).volume, MemoryChannel(media)
    tenant = {"tenant": "default", "credentials": str(tmp_path / "keys"), "buckets": [BUCKET]}
    section = S3Section.model_validate({"listen": ["127.0.0.1:0"], "tenants": [tenant]})
    door = make_s3_door(
        section, [volume], tmp_path, FilesOptions(), lambda: channel, lambda _: InlineRunner()
    )
    door.start()
    try:
        client = boto_client(f"http://127.0.0.1:{door.ports[0]}", key.key_id, key.secret.reveal().decode())
        assert client.list_objects_v2(Bucket=BUCKET)["KeyCount"] == 0
        volume.change(erased=True)
        for call, arguments in (
            (client.list_buckets, {}),
            (client.list_objects_v2, {"Bucket": BUCKET}),
            (client.get_object, {"Bucket": BUCKET, "Key": "a"}),
            (client.put_object, {"Bucket": BUCKET, "Key": "a", "Body": b"x"}),
        ):
            assert code_of(call, **arguments) == "InvalidAccessKeyId"
    finally:
        door.stop(0.0)
