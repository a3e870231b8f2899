"""Which namespaces `g35 pool add` takes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.attach.inspect_namespaces import want_all
from agent.cli import pool_channel, pool_members
from agent.errors import G35Error, UserError
from agent.inline.secrets import RootKey, SecretKey
from agent.membership.join import newcomers_in, pool_of
from agent.pool.map.document import PoolMap, VolumeWish, plan_pool
from agent.pool.map.inspect import Content, Inspection
from agent.pool.map.superblock import Superblock
from agent.pool.map.tenant_changes import without_key
from agent.remote.fabric import Fabric
from nvmeof.wire.kv import KvFormat
from tests.support.pool.memory_pool import nguid_of

SIZE = 64 << 20
ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")


def test_blank_ones_join_and_what_carries_something_only_by_force() -> None:
    root = RootKey(SecretKey(b"\x11" * 32), "a test")
    pool_map = plan_pool([(nguid_of(0), SIZE)], [VolumeWish(name="v", share=0.5, value_bytes=65536)], root)
    seen = [
        (nguid_of(0), SIZE, Inspection(0, Content.POOL)),
        (nguid_of(1), SIZE, Inspection(1, Content.BLANK)),
        (nguid_of(2), SIZE, Inspection(2, Content.FOREIGN, detail="it is not blank")),
        (nguid_of(3), SIZE, Inspection(3, Content.BLANK, kv=KvFormat(16, 1 << 20, 0))),
        (nguid_of(4), SIZE, Inspection(4, Content.UNREADABLE, detail="late")),
    ]
    names = [nguid.hex() for nguid, _, _ in seen]
    assert newcomers_in(pool_map, seen, set(), False) == [(nguid_of(1), SIZE)]
    assert newcomers_in(pool_map, seen, {names[0]}, False) == [], "it is a member already"
    assert newcomers_in(pool_map, seen, {names[2]}, True) == [(nguid_of(2), SIZE)]
    for name, force, why in (
        (names[2], False, "it was not touched"),
        (names[3], True, "one of keys"),
        (names[4], True, "it was not touched"),
        ("ab" * 16, True, "no enclosure shows"),
    ):
        with pytest.raises(UserError, match=why):
            newcomers_in(pool_map, seen, {name}, force)


def test_of_a_name_with_a_slip_in_it_the_nearest_newcomer_is_told() -> None:
    pool_map = plan_pool([(nguid_of(0), SIZE)], [VolumeWish(name="kv", value_bytes=1 << 16, share=1.0)], ROOT)
    seen = [
        (nguid_of(1), SIZE, Inspection(1, Content.BLANK)),
        (nguid_of(2), SIZE, Inspection(2, Content.BLANK)),
    ]
    name = nguid_of(1).hex()
    with pytest.raises(UserError, match=rf"no enclosure shows .* \(did you mean {name}\?\)"):
        newcomers_in(pool_map, seen, {name[:10] + name[11:]}, False)


def test_a_member_that_is_named_still_says_what_the_pool_is() -> None:
    """An erased key must not come back because the one namespace with the newest map was named by force."""
    root = RootKey(SecretKey(b"\x11" * 32), "a test")
    drives = [(nguid_of(0), SIZE), (nguid_of(1), SIZE)]
    old, other = (
        plan_pool(drives, [VolumeWish(name="v", share=0.5, value_bytes=65536, tenant="blue")], root)
        for _ in range(2)
    )
    newer = without_key(old, "blue")

    def carrying(number: int, pool_map: PoolMap) -> tuple[bytes, int, Inspection]:
        block = Superblock(nguid_of(number), pool_map)
        return nguid_of(number), SIZE, Inspection(number, Content.POOL, block)

    seen = [carrying(0, newer), carrying(1, old)]
    for named in ({nguid_of(0).hex()}, {nguid_of(1).hex()}, {nguid.hex() for nguid, _ in drives}, set()):
        assert pool_of(seen, named) == newer
    stranger = carrying(2, other)
    assert pool_of([*seen, stranger], {nguid_of(0).hex(), nguid_of(2).hex()}) == newer
    with pytest.raises(G35Error, match="different pools"):
        pool_of([*seen, stranger])


def test_who_has_lost_a_namespace_is_told_that_only_a_format_helps() -> None:
    root = RootKey(SecretKey(b"\x11" * 32), "a test")
    drives = [(nguid_of(0), SIZE), (nguid_of(1), SIZE)]
    pool_map = plan_pool(drives, [VolumeWish(name="v", share=0.5, value_bytes=65536)], root)
    seen = [(nguid_of(0), SIZE, Inspection(0, Content.POOL))]
    with pytest.raises(G35Error, match="1 of the pool's 2 namespaces are not reached") as refused:
        want_all(pool_map, seen, Fabric([]))
    assert "lost one for good there is only a new format" in (refused.value.advice or "")
    want_all(pool_map, [*seen, (nguid_of(1), SIZE, Inspection(1, Content.BLANK))], Fabric([]))


def test_of_a_named_one_that_is_a_member_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = RootKey(SecretKey(b"\x11" * 32), "a test")
    pool_map = plan_pool([(nguid_of(0), SIZE)], [VolumeWish(name="v", share=0.5, value_bytes=65536)], root)
    agent = SimpleNamespace(key_file=Path("root.key"), state=Path("/nonexistent"))
    monkeypatch.setattr(pool_members, "load_configuration", lambda path: SimpleNamespace(agent=agent))
    monkeypatch.setattr(pool_channel, "root_key_in", lambda file: root)
    for joined in (set[str](), {nguid_of(1).hex()}):
        monkeypatch.setattr(
            pool_members, "with_channel", lambda *_, joined=joined, make: (pool_map, joined, 0)
        )
        pool_members.add(Path("c"), [nguid_of(0).hex().upper(), *joined], force=True)
        said = capsys.readouterr().out
        assert f"namespace {nguid_of(0).hex()} belongs to the pool already" in said
        assert nguid_of(1).hex() not in said
        assert ("1 namespace(s) more" if joined else "no namespace to add") in said
