"""What is asked for and is not done here is refused, and nothing is done of it in part."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from agent.config.s3_section import S3Section
from agent.fs.files.options import FilesOptions
from agent.pool.map.document import tenant_id
from agent.s3.credentials import new_credentials_file, read_credentials_file
from agent.s3.make_door import make_s3_door
from tests.support.engines.s3_served import Served, boto_client
from tests.support.pool.inline_runner import InlineRunner
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import PoolAgent, volume_settings

BUCKET = "blocks"


def code_of(call: Callable[..., Any], **arguments: Any) -> str:
    """The code that a call is refused with."""
    with pytest.raises(ClientError) as refused:
        call(**arguments)
    return str(refused.value.response["Error"]["Code"])


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
