"""Golden vectors of the FUSE layouts (tests/vectors/make_fuse_abi.c), and truncation at every byte."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from agent.fs.fuse import abi, replies, requests
from agent.fs.fuse.abi import FuseFormatError
from agent.fs.fuse.names import decode_names_untrusted
from agent.fs.fuse.replies import dirent_bytes, encode_dirent
from agent.fs.fuse.requests import decode_forgets_untrusted
from tests.support.fs import fuse_records
from tests.support.fs.fuse_records import (
    AttrOfFile,
    AttrOut,
    BatchForgetIn,
    DirentHead,
    EntryOut,
    ForgetOne,
    InitIn,
    SetxattrIn,
)

VECTORS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "vectors" / "fuse_abi.json").read_text()
)
WITHOUT_VECTOR = {"InitIn", "SetxattrIn"}
"""Shorter in our form than in fuse.h, which has their extended forms; they have tests of their own."""


def record_type(name: str) -> Any:
    return getattr(fuse_records, name)


def record_of(name: str) -> Any:
    kind, fields = record_type(name), list(VECTORS[name]["fields"])
    if kind in (AttrOut, EntryOut):
        head = kind.HEAD
        own = len(dataclasses.fields(head))
        fields = [head(*fields[:own]), AttrOfFile(*fields[own:])]
    return kind(*fields)


def test_every_layout_has_a_record_and_every_record_a_vector() -> None:
    layouts = {
        value
        for module in (abi, requests, replies)
        for value in vars(module).values()
        if isinstance(value, struct.Struct) and value is not abi.INIT_FLAGS2
    }
    records = {
        value for value in vars(fuse_records).values() if isinstance(value, type) and hasattr(value, "LAYOUT")
    }
    assert {record.LAYOUT for record in records} == layouts
    wholes = {AttrOut.HEAD: AttrOut, EntryOut.HEAD: EntryOut}
    assert {wholes.get(record, record).__name__ for record in records} == {*VECTORS, *WITHOUT_VECTOR}


@pytest.mark.parametrize("name", VECTORS)
def test_encodes_to_what_the_compiler_made(name: str) -> None:
    assert record_of(name).encode().hex() == VECTORS[name]["plain"]


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("form", ["plain", "noisy"])
def test_decodes_whatever_stands_in_the_padding(name: str, form: str) -> None:
    encoded = bytes.fromhex(VECTORS[name][form])
    assert record_type(name).decode_untrusted(encoded) == record_of(name)
    assert record_type(name).decode_untrusted(memoryview(b"\x5a" * 7 + encoded), 7) == record_of(name)


@pytest.mark.parametrize("name", [*VECTORS, *WITHOUT_VECTOR])
def test_refuses_every_truncation(name: str) -> None:
    kind = record_type(name)
    whole = bytes.fromhex(VECTORS[name]["plain"]) if name in VECTORS else bytes(kind.LAYOUT.size)
    for length in range(len(whole)):
        with pytest.raises(FuseFormatError):
            kind.decode_untrusted(whole[:length])


def test_the_short_forms() -> None:
    assert InitIn(7, 45, 0x01020304, 0x05060708).encode() == bytes.fromhex("070000002d0000000403020108070605")
    assert SetxattrIn(0x01020304, 0x05060708).encode() == bytes.fromhex("0403020108070605")


def test_names_end_in_nul() -> None:
    assert decode_names_untrusted(b"one\0two\0rest", 2) == ([b"one", b"two"], 8)
    for length in range(8):
        with pytest.raises(FuseFormatError):
            decode_names_untrusted(b"one\0two\0"[:length], 2)


def test_a_batch_of_forgets_is_as_long_as_its_count() -> None:
    whole = BatchForgetIn(2).encode() + ForgetOne(5, 1).encode() + ForgetOne(6, 9).encode()
    assert list(decode_forgets_untrusted(whole)) == [(5, 1), (6, 9)]
    for length in range(len(whole)):
        with pytest.raises(FuseFormatError):
            decode_forgets_untrusted(whole[:length])
    with pytest.raises(FuseFormatError):
        decode_forgets_untrusted(BatchForgetIn(0xFFFFFFFF).encode() + bytes(64))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 255])
def test_a_directory_entry_is_padded_to_eight(length: int) -> None:
    encoded = encode_dirent(5, 6, 0o040755, b"n" * length)
    assert len(encoded) == dirent_bytes(b"n" * length)
    assert len(encoded) % 8 == 0
    assert DirentHead.decode_untrusted(encoded) == DirentHead(5, 6, length, 4)
    assert encoded[24 : 24 + length] == b"n" * length
    assert not any(encoded[24 + length :])
