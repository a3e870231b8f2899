"""The files behind `/.g35` and `/kv`: who may do what, by the modes that the kernel checks."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from agent.fs.control.face import CONTROL_ROOT, ControlFace
from agent.fs.doors.mounting import MountOptions, _common
from agent.fs.interface import Caller, FsError, SetAttributes
from agent.fs.kv_face import KV_ROOT, KvFace
from agent.pool.steps import settle
from host_shim.control_wire import Outcome
from tests.support.pool.memory_pool import MemoryPool

OWNER = (1234, 567)


def test_sessions_are_for_their_owner_and_status_is_for_reading() -> None:
    agent = MemoryPool().agent()
    channel, caller = agent.channel, Caller(99, 99)
    face = ControlFace([agent.served], lambda: channel, dict, lambda *_: Outcome.STARTED, None, OWNER)
    modes = {}
    for name in (b"session", b"status.json"):
        attributes = settle(face.lookup(caller, CONTROL_ROOT, name), channel).attributes
        assert (attributes.uid, attributes.gid) == OWNER
        modes[name] = stat.S_IMODE(attributes.mode)
    assert modes == {b"session": 0o600, b"status.json": 0o444}
    ino = settle(face.lookup(caller, CONTROL_ROOT, b"status.json"), channel).attributes.ino
    handle = settle(face.open(caller, ino, os.O_RDWR), channel).handle
    with pytest.raises(FsError) as refused:
        settle(face.write(ino, handle, 0, memoryview(b"x")), channel)
    assert refused.value.errno == errno.EBADF
    session = settle(face.lookup(caller, CONTROL_ROOT, b"session"), channel).attributes.ino
    for changes in (SetAttributes(mode=0o666), SetAttributes(uid=99)):
        with pytest.raises(FsError) as refused:
            settle(face.setattr(caller, session, changes, None), channel)
        assert refused.value.errno == errno.EPERM, "nobody opens it to others"

    values = KvFace([agent.served], lambda: channel, None, OWNER)
    folder = settle(values.lookup(caller, KV_ROOT, b"v"), channel).attributes
    assert (folder.uid, stat.S_IMODE(folder.mode)) == (OWNER[0], 0o755), "others store nothing there"
    listed = settle(values.readdir(folder.ino, 0, 2), channel)
    assert list(listed) == []
    assert "default_permissions" in _common(MountOptions(allow_other=True)).split(",")
