"""Whatever comes from outside is taken or is an S3Error; nothing else is raised."""

from __future__ import annotations

import contextlib

import hypothesis.strategies as st
from hypothesis import given

from agent.inline.secrets import SecretKey
from agent.s3.body import Body
from agent.s3.chunked import WORDS, ChunkDecoder
from agent.s3.credentials import AccessKey
from agent.s3.errors import S3Error
from agent.s3.listing import _from_token
from agent.s3.requests import Hosts, byte_range, http_request, s3_request
from agent.s3.signature import ALGORITHM, Signer, verify
from agent.s3.xml_in import RowsReader

KEY = AccessKey("G35TESTONE", SecretKey(b"the secret of the first tenant"), "one")
NAMES = st.sampled_from(
    [
        b"host", b"authorization", b"x-amz-date", b"x-amz-content-sha256", b"content-length", b"content-md5",
        b"x-amz-trailer", b"x-amz-checksum-crc32", b"x-amz-decoded-content-length", b"transfer-encoding",
    ]
)  # fmt: skip
WORDS_OF_SIGNATURES = st.sampled_from(
    [ALGORITHM, "Credential=", "SignedHeaders=host", "Signature=", "0" * 64, "20130524T000000Z",
     "X-Amz-Date=", "G35TESTONE/20130524/x/s3/aws4_request",
     "X-Amz-Algorithm=" + ALGORITHM, "&", ",", " ", "=", "%2F", "?"]
)  # fmt: skip
VALUES = st.one_of(
    st.lists(WORDS_OF_SIGNATURES, max_size=8).map(lambda words: "".join(words).encode()),
    st.binary(max_size=40),
    st.sampled_from([each.encode() for each in WORDS]),
    st.integers(-5, 1 << 70).map(lambda number: str(number).encode()),
)
TARGETS = st.one_of(
    st.binary(max_size=60).map(lambda rest: b"/" + rest),
    st.lists(WORDS_OF_SIGNATURES, max_size=10).map(lambda words: b"/blocks/a?" + "".join(words).encode()),
)


def read_rows(document: bytes, root: str, row: str) -> tuple[list[dict[str, str]], dict[str, str]]:
    reader = RowsReader(root, row)
    for _ in reader.read(document):
        pass
    return reader.rows, reader.leaves


@given(
    method=st.sampled_from([b"GET", b"PUT", b"POST", b"DELETE", b"HEAD", b"OPTIONS"]),
    target=TARGETS,
    headers=st.lists(st.tuples(NAMES, VALUES), max_size=8),
)
def test_heads(method: bytes, target: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    async def nothing() -> bytes | None:
        return None

    with contextlib.suppress(S3Error):
        request = http_request(method, target, headers)
        with contextlib.suppress(S3Error):
            verify(request, {KEY.key_id: KEY}, 1_369_353_600.0)
        with contextlib.suppress(S3Error):
            s3_request(request, Hosts("s3.example", {"[::1]": "blocks"}))
        payload = request.headers.get("x-amz-content-sha256", "")
        Body(request.headers, Signer(KEY, payload, "", "", "0" * 64, KEY.secret), nothing)


CHUNK_PARTS = st.one_of(
    st.sampled_from(
        [b"5\r\nhello\r\n", b"0\r\n", b"\r\n", b"a:b\r\n", b";chunk-signature=", b"0" * 64, b"\n"]
    ),
    st.binary(max_size=20),
)


@given(parts=st.lists(CHUNK_PARTS, max_size=8), length=st.integers(0, 20))
def test_chunks(parts: list[bytes], length: int) -> None:
    for word in WORDS:
        decoder = ChunkDecoder(Signer(KEY, word, "", "", "0" * 64, KEY.secret), length)
        data = b""
        with contextlib.suppress(S3Error):
            for part in parts:
                data += b"".join(decoder.feed(part))
            decoder.finish()
            assert len(data) == length
        assert len(data) <= length


XML_PARTS = st.one_of(
    st.sampled_from(
        [b"<Delete>", b"</Delete>", b"<Object>", b"</Object>", b"<Key>", b"</Key>", b"<!DOCTYPE x>", b"&amp;",
         b"&#0;", b"<![CDATA[", b"]]>", b"<?xml version='1.0' encoding='utf-16'?>", b"<!--", b"<a b='c'/>"]
    ),
    st.binary(max_size=10),
)  # fmt: skip


@given(parts=st.lists(XML_PARTS, max_size=12))
def test_documents(parts: list[bytes]) -> None:
    with contextlib.suppress(S3Error):
        rows, leaves = read_rows(b"".join(parts), "Delete", "Object")
        assert all(isinstance(text, str) for row in [*rows, leaves] for text in row.values())


@given(header=st.text(max_size=30), size=st.integers(0, 1 << 40))
def test_ranges_and_tokens(header: str, size: int) -> None:
    for text in (header, "bytes=" + header):
        with contextlib.suppress(S3Error):
            found = byte_range(text, size)
            assert found is None or 0 <= found[0] < found[1] <= size
    with contextlib.suppress(S3Error):
        _from_token(header)
