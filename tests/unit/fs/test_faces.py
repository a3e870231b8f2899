"""Faces in one tree: an operation goes to the face of its node, and nothing moves from one to another."""

from __future__ import annotations

import errno

import pytest

from agent.fs.fuse.abi import Opcode
from agent.fs.fuse.session import FuseSession
from agent.fs.interface import FACE_SHIFT, ROOT_INODE, Attributes, Caller, FileSystem, RootFileSystem
from agent.pool.steps import Outcome
from tests.support.fs.fuse_peer import FusePeer
from tests.support.fs.fuse_records import AttrOut, GetattrIn, LinkIn, OpenIn, RenameIn

ONE, OTHER, NOBODYS = 1 << FACE_SHIFT | 1, 2 << FACE_SHIFT | 1, 9 << FACE_SHIFT | 1


class Face(FileSystem):
    def __init__(self, mode: int) -> None:
        self.mode = mode

    def getattr(self, caller: Caller, ino: int, handle: int | None) -> Outcome[Attributes]:
        return Attributes(ino, self.mode)


@pytest.fixture
def tree() -> FusePeer:
    peer = FusePeer(
        FuseSession(RootFileSystem({b"one": (ONE, Face(0o40700)), b"other": (OTHER, Face(0o40500))}))
    )
    peer.init()
    return peer


@pytest.mark.interpreted
def test_an_operation_goes_to_the_face_of_its_node(tree: FusePeer) -> None:
    for node, mode in ((ONE, 0o40700), (OTHER, 0o40500)):
        answer = tree.ask(Opcode.GETATTR, GetattrIn(0, 0).encode(), node)
        assert AttrOut.decode_untrusted(answer.body).attributes.mode == mode
    assert tree.ask(Opcode.LOOKUP, b"other\0").errno == 0
    assert tree.ask(Opcode.LOOKUP, b"neither\0").errno == errno.ENOENT


@pytest.mark.interpreted
def test_the_kernel_asks_for_the_folder_of_all_faces_once_a_second(tree: FusePeer) -> None:
    """A walk to any file passes it, and asks for its attributes where they are not valid any more."""
    found = [tree.ask(Opcode.GETATTR, GetattrIn(0, 0).encode(), node).body for node in (ROOT_INODE, ONE)]
    assert [AttrOut.decode_untrusted(body).head.valid for body in found] == [1, 0]


@pytest.mark.interpreted
def test_nothing_moves_between_faces(tree: FusePeer) -> None:
    for new, code in ((OTHER, errno.EXDEV), (1, errno.EXDEV), (ONE, errno.EPERM)):
        assert tree.ask(Opcode.RENAME, RenameIn(new).encode() + b"a\0b\0", ONE).errno == code
        assert tree.ask(Opcode.LINK, LinkIn(ONE).encode() + b"a\0", new).errno == code


@pytest.mark.interpreted
def test_a_node_of_no_face_is_not_there(tree: FusePeer) -> None:
    assert tree.ask(Opcode.GETATTR, GetattrIn(0, 0).encode(), NOBODYS).errno == errno.ENOENT
    assert tree.ask(Opcode.LOOKUP, b"a\0", NOBODYS).errno == errno.ENOENT
    assert tree.ask(Opcode.OPEN, OpenIn(0, 0).encode(), NOBODYS).errno != 0
