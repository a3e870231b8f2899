"""Checksums of whole multipart objects, made from those of their parts."""

from __future__ import annotations

import base64

import hypothesis.strategies as st
import pytest
from hypothesis import given

from agent.s3.checksums import ALGORITHMS
from agent.s3.errors import S3Error
from agent.s3.index import Part, Piece
from agent.s3.part_checksums import whole_checksum

CRCS = ["crc32", "crc32c", "crc64nvme"]


def raw(name: str, data: bytes) -> bytes:
    made = ALGORITHMS[name]()
    made.update(memoryview(data))
    return made.digest()


def text(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def parts_of(name: str, *bodies: bytes) -> list[Part]:
    return [
        Part(number, Piece(str(number), len(body)), "0" * 32, 1, f"{name}:{text(raw(name, body))}")
        for number, body in enumerate(bodies, 1)
    ]


@given(bodies=st.lists(st.binary(max_size=50), min_size=1, max_size=5), name=st.sampled_from(CRCS))
def test_the_checksum_of_all_bytes_in_a_row_is_found_right_and_kept(bodies: list[bytes], name: str) -> None:
    said = text(raw(name, b"".join(bodies)))
    for more in ({}, {"x-amz-checksum-type": "FULL_OBJECT"}):
        headers = {f"x-amz-checksum-{name}": said, **more}
        assert whole_checksum(headers, parts_of(name, *bodies)) == f"{name}:{said}"


@pytest.mark.parametrize("name", ["crc32", "crc32c", "sha1", "sha256"])
def test_a_composite_one_is_found_right_with_the_number_of_parts_and_without(name: str) -> None:
    parts = parts_of(name, b"one", b"two")
    said = text(raw(name, raw(name, b"one") + raw(name, b"two")))
    for value in (said, said + "-2"):
        assert whole_checksum({f"x-amz-checksum-{name}": value}, parts) == ""
    with pytest.raises(S3Error):
        whole_checksum({f"x-amz-checksum-{name}": said + "-3"}, parts)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"x-amz-checksum-crc32": "AAAAAA=="}, "BadDigest"),
        ({"x-amz-checksum-crc32": "nonsense"}, "BadDigest"),
        ({"x-amz-checksum-crc32": "AAAAAA==", "x-amz-checksum-type": "COMPOSITE"}, "BadDigest"),
        ({"x-amz-checksum-crc32": "AAAAAA==", "x-amz-checksum-type": "OTHER"}, "InvalidRequest"),
        ({"x-amz-checksum-crc32": "AAAAAA==-2", "x-amz-checksum-type": "FULL_OBJECT"}, "InvalidRequest"),
        ({"x-amz-checksum-crc32": "AAAAAA==", "x-amz-checksum-sha1": "A"}, "InvalidRequest"),
        ({"x-amz-checksum-sha1": "AAAA"}, "InvalidRequest"),
    ],
)
def test_a_wrong_one_and_one_that_cannot_be_checked_are_refused(headers: dict[str, str], code: str) -> None:
    with pytest.raises(S3Error) as refused:
        whole_checksum(headers, parts_of("crc32", b"one", b"two"))
    assert refused.value.code == code


def test_none_is_asked_for_and_none_is_told() -> None:
    assert whole_checksum({"x-amz-checksum-type": "FULL_OBJECT"}, parts_of("crc32", b"one")) == ""
