"""A request that an earlier process may have carried out."""

from __future__ import annotations

import errno

import pytest

from agent.fs.fuse.abi import Opcode
from agent.fs.virtiofs.request_service import acknowledged, as_done_before, is_given_back, refused_again
from tests.support.fs.fuse_records import InHeader, OutHeader, Rename2In


def message(opcode: Opcode, body: bytes = b"name\0") -> memoryview:
    return memoryview(InHeader(40 + len(body), opcode, 9, 1, 0, 0, 0).encode() + body)


def error_of(reply: list[bytes | memoryview]) -> int:
    return -OutHeader.decode_untrusted(reply[0]).error


@pytest.mark.parametrize("opcode", [Opcode.UNLINK, Opcode.RMDIR, Opcode.RENAME, Opcode.RENAME2])
@pytest.mark.parametrize(("was", "told"), [(errno.ENOENT, 0), (errno.EACCES, errno.EACCES), (0, 0)])
def test_what_is_gone_was_removed(opcode: Opcode, was: int, told: int) -> None:
    reply = as_done_before(message(opcode), [OutHeader(16, -was, 9).encode()])
    assert error_of(reply) == told
    assert OutHeader.decode_untrusted(reply[0]).unique == 9


@pytest.mark.parametrize(("opcode", "code"), [(Opcode.LOOKUP, errno.ENOENT), (Opcode.MKDIR, errno.EEXIST)])
def test_other_refusals_stay(opcode: Opcode, code: int) -> None:
    assert error_of(as_done_before(message(opcode), [OutHeader(16, -code, 9).encode()])) == code


@pytest.mark.parametrize(("flags", "refused"), [(0, False), (1, False), (2, True)])
def test_an_exchange_is_not_undone(flags: int, refused: bool) -> None:
    asked = message(Opcode.RENAME2, Rename2In(1, flags).encode() + b"a\0b\0")
    reply = refused_again(asked, len(asked))
    assert (reply is not None) is refused
    if reply is not None:
        assert error_of(reply) == errno.EIO


def test_short_ones_are_left_to_the_session() -> None:
    assert refused_again(memoryview(bytes(8)), 8) is None
    short = message(Opcode.RENAME2, b"")
    assert refused_again(short, len(short)) is None


@pytest.mark.parametrize(
    ("opcode", "given_back"),
    [(Opcode.FORGET, True), (Opcode.BATCH_FORGET, True), (Opcode.RELEASEDIR, True), (Opcode.RELEASE, False)],
)
def test_references_are_not_given_back_twice(opcode: Opcode, given_back: bool) -> None:
    asked = message(opcode, bytes(16))
    assert is_given_back(asked, len(asked)) is given_back
    assert not is_given_back(asked, 8)
    assert error_of(acknowledged(asked)) == 0
