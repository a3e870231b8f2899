"""Which namespaces `g35 pool add` takes, and what it refuses."""

from __future__ import annotations

import pytest

from agent.cli.pool_members import _newcomers
from agent.errors import UserError
from agent.inline.root_keys import HeldRootKey
from agent.inline.secrets import SecretKey
from agent.pool.opening import Content, Inspection
from agent.pool.pool_map import VolumeWish, plan_pool
from nvmeof.wire.kv import KvFormat
from tests.support.memory_pool import nguid_of

SIZE = 64 << 20


def test_blank_ones_join_and_what_carries_something_only_by_force() -> None:
    root = HeldRootKey(SecretKey(b"\x11" * 32), "a test")
    pool_map = plan_pool([(nguid_of(0), SIZE)], [VolumeWish(name="v", share=0.5, value_bytes=65536)], root)
    seen = [
        (nguid_of(0), SIZE, Inspection(0, Content.POOL)),
        (nguid_of(1), SIZE, Inspection(1, Content.BLANK)),
        (nguid_of(2), SIZE, Inspection(2, Content.FOREIGN, detail="it is not blank")),
        (nguid_of(3), SIZE, Inspection(3, Content.BLANK, kv=KvFormat(16, 1 << 20, 0))),
        (nguid_of(4), SIZE, Inspection(4, Content.UNREADABLE, detail="late")),
    ]
    names = [nguid.hex() for nguid, _, _ in seen]
    assert _newcomers(pool_map, seen, set(), False) == [(nguid_of(1), SIZE)]
    assert _newcomers(pool_map, seen, {names[0]}, False) == [], "it is a member already"
    assert _newcomers(pool_map, seen, {names[2]}, True) == [(nguid_of(2), SIZE)]
    for name, force, why in (
        (names[2], False, "it was not touched"),
        (names[3], True, "one of keys"),
        (names[4], True, "it was not touched"),
        ("ab" * 16, True, "no enclosure shows"),
    ):
        with pytest.raises(UserError, match=why):
            _newcomers(pool_map, seen, {name}, force)
