"""The source of a copy: its name in a header, its conditions, and the range of a part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.s3.copy_source import RANGE, check_conditions, range_of, source_of
from agent.s3.errors import S3Error
from agent.s3.index import StoredObject
from agent.s3.requests import SOURCE, Hosts, Operation, http_request, s3_request
from agent.s3.xml_out import UNFIT

FOUND = StoredObject("key", 100, "0123", 1_700_000_000_500_000_000)
"""Changed at 22:13:20.5 of 14 November 2023."""
AT, BEFORE = "Tue, 14 Nov 2023 22:13:20 GMT", "Tue, 14 Nov 2023 22:13:19 GMT"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("/blocks/a", "a"),
        ("blocks/a", "a"),
        ("blocks/a/b//c", "a/b//c"),
        ("blocks//a", "/a"),
        ("//blocks/a", None),
        ("blocks%2Fa", "a"),
        ("blocks/a%2Fb", "a/b"),
        ("blocks/a%252Fb", "a%2Fb"),
        ("blocks/100%25", "100%"),
        ("blocks/a+b", "a b"),
        ("blocks/a%2Bb", "a+b"),
        ("blocks/a?b", "a?b"),
        ("blocks/%C3%BC", "ü"),
        ("blocks/\xc3\xbc", "ü"),
        ("blocks/..%2F..%2Fx", "../../x"),
        ("blocks/a%2", None),
        ("blocks/%", None),
        ("blocks/%FF", None),
        ("blocks/%00", None),
        ("blocks/", None),
        ("blocks", None),
        ("", None),
        ("/", None),
        ("BLOCKS/a", None),
        ("../blocks/a", None),
        ("blocks/" + "k" * 1025, None),
        ("blocks/a?versionId=1", None),
        ("arn:aws:s3:us-east-1:1:accesspoint/x/object/a", None),
    ],
)
def test_a_source_is_decoded_once(text: str, key: str | None) -> None:
    if key is None:
        with pytest.raises(S3Error):
            source_of({SOURCE: text})
    else:
        assert source_of({SOURCE: text}) == ("blocks", key)


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=200))
def test_every_key_has_a_name_as_a_source(key: str) -> None:
    text = "/blocks/" + "".join(f"%{byte:02X}" for byte in key.encode())
    if UNFIT.search(key):
        with pytest.raises(S3Error):
            source_of({SOURCE: text})
    else:
        assert source_of({SOURCE: text}) == ("blocks", key)


@given(st.text(st.characters(max_codepoint=255), max_size=60))
def test_any_header_is_a_source_or_refused(text: str) -> None:
    try:
        bucket, key = source_of({SOURCE: text})
    except S3Error:
        return
    assert bucket.strip("/") == bucket != ""
    assert key


@pytest.mark.parametrize(
    ("conditions", "holds"),
    [
        ({}, True),
        ({"match": '"0123"'}, True),
        ({"match": '"4567", "0123"'}, True),
        ({"match": '"4567"'}, False),
        ({"none-match": '"4567"'}, True),
        ({"none-match": '"0123"'}, False),
        ({"none-match": "*"}, False),
        ({"modified-since": BEFORE}, True),
        ({"modified-since": AT}, False),
        ({"unmodified-since": AT}, True),
        ({"unmodified-since": BEFORE}, False),
        # A condition on the ETag decides before one on the time.
        ({"match": '"0123"', "unmodified-since": BEFORE}, True),
        ({"match": '"4567"', "unmodified-since": AT}, False),
        ({"none-match": '"0123"', "modified-since": BEFORE}, False),
        ({"none-match": '"4567"', "modified-since": AT}, True),
        ({"match": '"0123"', "none-match": '"0123"'}, False),
    ],
)
def test_conditions_on_a_source(conditions: dict[str, str], holds: bool) -> None:
    headers = {f"{SOURCE}-if-{name}": value for name, value in conditions.items()}
    if holds:
        check_conditions(headers, FOUND)
    else:
        with pytest.raises(S3Error) as refused:
            check_conditions(headers, FOUND)
        assert refused.value.code == "PreconditionFailed"


@pytest.mark.parametrize("date", ["", "yesterday", "Tue, 99 Nov 2023 22:13:20 GMT", "9" * 400])
def test_a_condition_without_a_date_is_refused(date: str) -> None:
    for name in ("modified-since", "unmodified-since"):
        with pytest.raises(S3Error) as refused:
            check_conditions({f"{SOURCE}-if-{name}": date}, FOUND)
        assert refused.value.code == "InvalidArgument"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, (0, 100)),
        ("bytes=0-99", (0, 100)),
        ("bytes=10-10", (10, 11)),
        ("bytes=0-100", "InvalidRange"),
        ("bytes=100-100", "InvalidRange"),
        ("bytes=9-8", "InvalidArgument"),
        ("bytes=5-", "InvalidArgument"),
        ("bytes=-5", "InvalidArgument"),
        ("bytes=0-1,4-5", "InvalidArgument"),
        ("bytes= 0-1", "InvalidArgument"),
        ("0-1", "InvalidArgument"),
        ("bytes=0-" + "9" * 16, "InvalidArgument"),
        ("", "InvalidArgument"),
    ],
)
def test_the_range_of_a_part(text: str | None, found: tuple[int, int] | str) -> None:
    headers = {} if text is None else {RANGE: text}
    if isinstance(found, tuple):
        assert range_of(headers, 100) == found
    else:
        with pytest.raises(S3Error) as refused:
            range_of(headers, 100)
        assert refused.value.code == found


def _operation(method: str, target: str, **headers: str) -> Operation | str:
    """The operation, or the code of the refusal; `_` in a header's name is a hyphen."""
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    try:
        return s3_request(http_request(method.encode(), target.encode(), pairs), Hosts()).operation
    except S3Error as refused:
        return refused.code


PART = "/blocks/a?partNumber=1&uploadId=u"


@pytest.mark.parametrize(
    ("method", "target", "headers", "found"),
    [
        ("PUT", "/blocks/a", {SOURCE: "b/c"}, Operation.COPY_OBJECT),
        ("PUT", PART, {SOURCE: "b/c"}, Operation.UPLOAD_PART_COPY),
        ("PUT", PART, {SOURCE: "b/c", RANGE: "bytes=0-1"}, Operation.UPLOAD_PART_COPY),
        ("PUT", "/blocks/a", {SOURCE: "b/c", RANGE: "bytes=0-1"}, "NotImplemented"),
        ("PUT", "/blocks/a", {SOURCE + "-if-match": "x"}, "NotImplemented"),
        ("PUT", "/blocks/a", {RANGE: "bytes=0-1"}, "NotImplemented"),
        ("GET", "/blocks/a", {SOURCE: "b/c"}, "NotImplemented"),
        ("PUT", "/blocks", {SOURCE: "b/c"}, "NotImplemented"),
        ("POST", "/blocks/a?uploads", {SOURCE: "b/c"}, "NotImplemented"),
        ("PUT", "/blocks/a", {SOURCE: "b/c", SOURCE + "-else": "x"}, "NotImplemented"),
        ("PUT", "/blocks/a", {SOURCE: "b/c", "x-amz-metadata-directive": "KEEP"}, "InvalidRequest"),
        ("PUT", "/blocks/a", {SOURCE: "b/c", "x-amz-tagging-directive": "REPLACE"}, Operation.COPY_OBJECT),
        ("PUT", "/blocks/a", {SOURCE: "b/c", "x-amz-tagging": "a=b"}, "NotImplemented"),
        ("PUT", "/blocks/a", {"x-amz-storage-class": "GLACIER"}, Operation.PUT_OBJECT),
        ("PUT", "/blocks/a", {"x-amz-storage-class": "WARM"}, "InvalidStorageClass"),
        ("PUT", "/blocks/a", {"x-amz-server-side-encryption": "AES256"}, Operation.PUT_OBJECT),
        ("PUT", "/blocks/a", {"x-amz-server-side-encryption": "aws:kms"}, "NotImplemented"),
        (
            "PUT", "/blocks/a", {"x-amz-server-side-encryption-customer-algorithm": "AES256"},
            "NotImplemented",
        ),
        ("PUT", "/blocks/a", {"x-amz-server-side-encryption-aws-kms-key-id": "k"}, "NotImplemented"),
        ("GET", "/blocks?versioning", {}, Operation.GET_BUCKET_VERSIONING),
        ("PUT", "/blocks?versioning", {}, "MethodNotAllowed"),
        ("GET", "/blocks/a?versioning", {}, "MethodNotAllowed"),
        ("GET", "/blocks/a?tagging", {}, Operation.GET_OBJECT_TAGGING),
        ("PUT", "/blocks/a?tagging", {}, "MethodNotAllowed"),
        ("GET", "/blocks?tagging", {}, "MethodNotAllowed"),
    ],
)  # fmt: skip
def test_what_a_header_makes_of_a_request(
    method: str, target: str, headers: dict[str, str], found: Operation | str
) -> None:
    assert _operation(method, target, **headers) == found
