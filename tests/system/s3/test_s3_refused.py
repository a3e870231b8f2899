"""What is asked for and is not done here is refused, and nothing is done of it in part."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.s3_served import Served

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
