"""What `g35 pool` says of a namespace, once and in words."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from agent.cli.pool_verb import _of_another_pool, carried, pool_in
from agent.host_os.presence import serving_processes, set_mark
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.map.document import PoolMap, VolumeWish, plan_pool
from agent.pool.map.inspect import Content, Inspection
from agent.pool.map.superblock import Superblock
from tests.support.pool.memory_pool import nguid_of


@pytest.mark.parametrize(
    ("content", "detail", "words"),
    [
        (Content.BLANK, "", "blank"),
        (Content.POOL, "ab12", "a pool (ab12)"),
        (Content.FOREIGN, "something that is not g35's", "something that is not g35's"),
        (Content.FOREIGN, "it is not blank", "something that is not g35's"),
        (Content.FOREIGN, "a damaged superblock", "a damaged superblock"),
        (Content.FOREIGN, "a superblock written for namespace 07", "a superblock written for namespace 07"),
        (Content.UNREADABLE, "late", "nothing that could be read (late)"),
    ],
)
def test_what_is_carried_is_said_once(content: Content, detail: str, words: str) -> None:
    assert carried(content, detail) == words


def test_a_mark_is_seen_for_as_long_as_it_is_set() -> None:
    import os

    pool, other = uuid.uuid4().hex, uuid.uuid4().hex
    assert serving_processes({pool}) == []
    with set_mark(pool), set_mark(other):
        assert serving_processes({pool}) == [os.getpid()]
        assert serving_processes({pool, other}) == [os.getpid()]
        assert serving_processes(set()) == []
    assert serving_processes({pool, other}) == []


def test_pools_that_cannot_be_gone_by_are_shown_before_they_are_refused() -> None:
    root = RootKey(SecretKey(bytes(32)), "a test")
    wish = VolumeWish(name="kv", value_bytes=1 << 16, share=1.0)
    one, other = (plan_pool([(nguid_of(0), 32 << 20)], [wish], root) for _ in range(2))

    def carrying(pool_map: PoolMap, **more: bool) -> Inspection:
        return Inspection(0, Content.POOL, Superblock(nguid_of(0), pool_map), **more)

    assert pool_in([]) == pool_in([Inspection(0, Content.BLANK)]) == (None, None)
    assert pool_in([carrying(one), carrying(other, stranger=True)]) == (one, None)
    for seen in ([carrying(one), carrying(other)], [carrying(other, stranger=True)]):
        found, refused = pool_in(seen)
        assert found is None
        assert other.pool_id in str(refused)


def test_after_a_new_format_all_that_names_what_is_gone_is_named() -> None:
    assert "remove /state/files.sqlite, and" in _of_another_pool(Path("/state/files.sqlite"))
    of_a_tenant = _of_another_pool(Path("/state/s3-ab12.files.sqlite"))
    assert "remove /state/s3-ab12.files.sqlite and /state/s3-ab12.sqlite, and" in of_a_tenant
