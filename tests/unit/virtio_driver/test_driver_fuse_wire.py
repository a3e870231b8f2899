"""The driver's own FUSE layouts against what a C compiler made of fuse.h, and answers that are none."""

from __future__ import annotations

import errno
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from agent.bench.virtio_driver import fuse_wire as wire
from agent.bench.virtio_driver.fuse_wire import FuseReplyError, Node
from tests.support.fs import guest_requests as requests
from tests.support.fs.guest_requests import Listed

VECTORS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "vectors" / "fuse_abi.json").read_text()
)
LAYOUTS = {
    "InHeader": wire.IN_HEADER,
    "OutHeader": wire.OUT_HEADER,
    "InitOut": wire.INIT_OUT,
    "OpenIn": wire.OPEN_IN,
    "CreateIn": requests.CREATE_IN,
    "MkdirIn": requests.MKDIR_IN,
    "ReadIn": wire.READ_IN,
    "WriteIn": wire.WRITE_IN,
    "ReleaseIn": wire.RELEASE_IN,
    "GetattrIn": requests.GETATTR_IN,
    "ForgetIn": requests.FORGET_IN,
    "BatchForgetIn": requests.BATCH_FORGET_IN,
    "ForgetOne": requests.FORGET_ONE,
    "OpenOut": wire.OPEN_OUT,
    "WriteOut": wire.WRITE_OUT,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    """All fields of a vector are non-zero, so what is zero is what the record calls padding."""
    found = LAYOUTS[name].unpack(bytes.fromhex(VECTORS[name]["plain"]))
    assert [value for value in found if value] == VECTORS[name]["fields"]


def test_entries_and_attributes() -> None:
    entry = VECTORS["EntryOut"]
    body = bytes.fromhex(entry["plain"])
    assert wire.decode_entry(b"\x5a" * 3 + body, 3) == Node(
        entry["fields"][0], entry["fields"][7], entry["fields"][15]
    )
    attributes = VECTORS["AttrOut"]
    assert requests.decode_attributes(bytes.fromhex(attributes["plain"])) == Node(
        attributes["fields"][2], attributes["fields"][3], attributes["fields"][11]
    )


def test_folders() -> None:
    lines = [
        struct.pack("<QQII", 7, 1, 3, 4) + b"abc" + bytes(5),
        struct.pack("<QQII", 8, 2, 8, 8) + b"12345678",
    ]
    whole = b"".join(lines)
    found = [Listed(b"abc", 7, 1), Listed(b"12345678", 8, 2)]
    assert list(requests.decode_entries(whole, plus=False)) == found
    for cut in (1, 23, 25, 26):
        with pytest.raises(FuseReplyError):
            list(requests.decode_entries(lines[0][:cut], plus=False))
    with pytest.raises(FuseReplyError):
        list(requests.decode_entries(bytes(wire.ENTRY_BYTES - 1), plus=True))


def test_answers() -> None:
    assert wire.check_reply((20, 0, 7), 7, 20, wire.Opcode.READ) == 4
    with pytest.raises(FileNotFoundError):
        wire.check_reply((16, -errno.ENOENT, 7), 7, 16, wire.Opcode.LOOKUP)
    for header, written in (
        ((20, 0, 8), 20),  # to another request
        ((20, 0, 7), 19),  # shorter than it says
        ((15, 0, 7), 15),
        ((16, 2, 7), 16),
        ((20, -2, 7), 20),
        ((16, -512, 7), 16),
    ):
        with pytest.raises(FuseReplyError):
            wire.check_reply(header, 7, written, wire.Opcode.READ)
