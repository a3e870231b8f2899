"""The manifest of a file or a folder: its bytes, and what is no manifest."""

from __future__ import annotations

import contextlib

import hypothesis.strategies as st
import pytest
from hypothesis import given

from agent.fs.shared.manifest import (
    HEAD,
    HOLE,
    Kind,
    Manifest,
    ManifestError,
    Run,
    decode_manifest_untrusted,
)

IDENTITY = bytes(range(0x40, 0x50))
ORIGIN = bytes(range(0x80, 0x90))
FILE = Manifest(
    Kind.FILE, b"a/b", 0o4751, 0x01020304, 0x05060708, 0x1112131415161718, 0x2122232425262728,
    0x3132333435363738, IDENTITY, 0x9_0001, 0x1_0000, (Run(2, 3, ORIGIN), Run(7, 1, HOLE)),
)  # fmt: skip
TWO_OUT_OF_ORDER = (Run(3, 1, ORIGIN), Run(2, 1, HOLE))
GOLDEN = bytes.fromhex(
    "6733356d 01 01 e909 04030201 08070605 1817161514131211 00000000 2827262524232221 3837363534333231"
    "404142434445464748494a4b4c4d4e4f 0200 0300 00000000 00000100 0100090000000000"
    "612f62"
    "02000000 03000000 808182838485868788898a8b8c8d8e8f"
    "07000000 01000000 00000000000000000000000000000000"
)
SHORT = Manifest(Kind.FILE, b"c", 0o644, 0, 0, 1, 2, 3, IDENTITY, 5, 0x1_0000, (), b"bytes")
FOLDER = Manifest(Kind.FOLDER, b"", 0o755, 7, 8, 1, 2, 3)


def test_the_bytes_of_a_file_are_these() -> None:
    assert FILE.encode() == GOLDEN
    assert decode_manifest_untrusted(GOLDEN) == FILE
    assert FILE.size == len(GOLDEN)


@pytest.mark.parametrize("manifest", [FILE, SHORT, FOLDER])
def test_what_is_encoded_is_decoded(manifest: Manifest) -> None:
    assert decode_manifest_untrusted(memoryview(manifest.encode())) == manifest


def test_a_chunk_s_origin_is_that_of_its_run_or_the_identity() -> None:
    assert FILE.chunks == 10
    origins = [FILE.origin(number) for number in range(10)]
    assert origins == [IDENTITY] * 2 + [ORIGIN] * 3 + [IDENTITY] * 2 + [HOLE] + [IDENTITY] * 2
    assert [FILE.chunk_length(number) for number in (0, 8, 9)] == [0x1_0000, 0x1_0000, 1]
    assert (HOLE, 7) not in list(FILE.stored())
    assert len(list(FILE.stored())) == 9


def test_a_short_file_and_a_folder_have_no_chunks() -> None:
    assert SHORT.chunks == FOLDER.chunks == 0
    assert not list(SHORT.stored())


def test_every_cut_is_refused() -> None:
    for end in range(len(GOLDEN)):
        with pytest.raises(ManifestError):
            decode_manifest_untrusted(GOLDEN[:end])


@given(st.integers(0, len(GOLDEN) - 1), st.integers(1, 255))
def test_a_changed_byte_is_another_manifest_or_none(at: int, change: int) -> None:
    broken = bytearray(GOLDEN)
    broken[at] ^= change
    with contextlib.suppress(ManifestError):
        assert decode_manifest_untrusted(bytes(broken)) != FILE


@given(st.binary(max_size=256))
def test_bytes_that_are_no_manifest_are_refused(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        decode_manifest_untrusted(raw)
    with pytest.raises(ManifestError):
        decode_manifest_untrusted(b"g35m\x01" + raw[:64])


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest(Kind.FILE, b"f", 0, 0, 0, 0, 0, 0, IDENTITY, 10, 65536, (Run(0, 2, ORIGIN),)),
        Manifest(Kind.FILE, b"f", 0, 0, 0, 0, 0, 0, IDENTITY, 1 << 20, 65536, TWO_OUT_OF_ORDER),
        Manifest(Kind.FILE, b"f", 0, 0, 0, 0, 0, 0, IDENTITY, 1 << 20, 65536, (Run(3, 0, ORIGIN),)),
        Manifest(Kind.FILE, b"f", 0, 0, 0, 0, 0, 0, IDENTITY, 10, 65536, (), b"other"),
        Manifest(Kind.FILE, b"f", 0, 0, 0, 0, 0, 0, HOLE, 10, 65536),
        Manifest(Kind.FILE, b"f", 0, 0, 0, 0, 0, 0, IDENTITY, 10, 0),
        Manifest(Kind.FILE, b"f", 0, 0, 0, 0, 0, 0, IDENTITY, 1 << 63, 65536),
        Manifest(Kind.FOLDER, b"f", 0, 0, 0, 0, 0, 0, length=1),
        Manifest(Kind.FOLDER, b"f" * 5000, 0, 0, 0, 0, 0, 0),
    ],
)  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_refused(manifest: Manifest) -> None:
    with pytest.raises(ManifestError):
        decode_manifest_untrusted(manifest.encode())


def test_the_head_is_eighty_bytes() -> None:
    assert HEAD.size == 80
