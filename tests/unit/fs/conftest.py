"""A FUSE session over a tree in memory, and a kernel that has said INIT to it."""

from __future__ import annotations

import pytest

from agent.fs.fuse.session import FuseSession
from tests.support.fs.fuse_peer import FusePeer
from tests.support.fs.memory_filesystem import MemoryFileSystem


@pytest.fixture
def filesystem() -> MemoryFileSystem:
    return MemoryFileSystem()


@pytest.fixture
def peer(filesystem: MemoryFileSystem) -> FusePeer:
    peer = FusePeer(FuseSession(filesystem))
    assert peer.init().errno == 0
    return peer
