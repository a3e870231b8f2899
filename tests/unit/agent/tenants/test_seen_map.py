"""An agent does not serve a map that is older than one it has seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.errors import ConfigError, G35Error
from agent.inline.root_keys import HeldRootKey
from agent.inline.secrets import SecretKey
from agent.pool.pool_map import PoolMap, VolumeWish, plan_pool
from agent.pool.tenants import without_key
from agent.seen_map import FILE, refuse_older_map, remember_map, remembered_pool
from tests.support.memory_pool import nguid_of


def planned() -> PoolMap:
    wish = VolumeWish(name="kv", value_bytes=1 << 16, share=1.0, tenant="blue")
    return plan_pool([(nguid_of(0), 32 << 20)], [wish], HeldRootKey(SecretKey(bytes(32)), "a test"))


def test_a_map_older_than_one_that_was_seen_is_not_served(tmp_path: Path) -> None:
    old, other = planned(), planned()
    erased = without_key(old, "blue")
    refuse_older_map(tmp_path, old)
    for seen in (old, erased):
        remember_map(tmp_path, seen)
        refuse_older_map(tmp_path, erased)
    assert remembered_pool(tmp_path) == old.pool_id
    with pytest.raises(G35Error, match="version 1, and this agent has seen 2"):
        refuse_older_map(tmp_path, old)
    refuse_older_map(tmp_path, other)
    remember_map(tmp_path, other)
    refuse_older_map(tmp_path, old)
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"pool": "a", "version": "x"}', '{"pool": 1}'])
def test_a_damaged_file_is_said(tmp_path: Path, text: str) -> None:
    assert remembered_pool(tmp_path) == ""
    (tmp_path / FILE).write_text(text)
    assert remembered_pool(tmp_path) in ("", "a", "1"), "who only wants a hint is not kept up"
    with pytest.raises(ConfigError, match="says nothing of a pool"):
        refuse_older_map(tmp_path, planned())
