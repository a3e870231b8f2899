"""An agent does not serve a map that is older than one it has seen, nor a key that is over, whatever the map
says of its own version; and what it has seen it does not forget."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from agent.attach import map_history
from agent.attach.map_history import AGAIN_SECONDS, FILE, MapHistory, remembered_pool
from agent.errors import ConfigError, G35Error
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.map.document import PoolMap, VolumeWish, plan_pool
from agent.pool.map.key_epochs import with_new_data_keys, without_earlier_keys
from agent.pool.map.tenant_changes import with_tenant, without_key
from tests.support.pool.memory_pool import nguid_of

ROOT = RootKey(SecretKey(bytes(32)), "a test")


def planned(root: RootKey = ROOT) -> PoolMap:
    wish = VolumeWish(name="kv", value_bytes=1 << 16, share=1.0, tenant="blue")
    return plan_pool([(nguid_of(0), 32 << 20)], [wish], root)


def ids(pool_map: PoolMap) -> set[str]:
    return {each.volume_id for each in pool_map.volumes if not pool_map.is_erased(each)}


def noted(state: Path, *maps: PoolMap) -> None:
    """As an agent that served each of them."""
    seen = MapHistory(state)
    for each in maps:
        seen.note(each, ids(each))


def forged(old: PoolMap, newest: PoolMap) -> PoolMap:
    """An old map under a version that nobody has seen; it takes no key."""
    return old.model_copy(update={"version": newest.version + 1})


def test_a_map_older_than_one_that_was_seen_is_not_served(tmp_path: Path) -> None:
    old, other = planned(), planned()
    erased = without_key(old, "blue")
    MapHistory(tmp_path).refuse(old)
    noted(tmp_path, old, erased)
    MapHistory(tmp_path).refuse(erased)
    assert remembered_pool(tmp_path) == old.pool_id
    with pytest.raises(G35Error, match="version 1, and this agent has seen 2"):
        MapHistory(tmp_path).refuse(old)
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    noted(tmp_path, other)
    assert remembered_pool(tmp_path) == other.pool_id
    MapHistory(tmp_path).refuse(other)
    with pytest.raises(G35Error, match="version 1, and this agent has seen 2"):
        MapHistory(tmp_path).refuse(old)


def test_a_pool_of_which_nothing_opened_takes_nothing_out_of_the_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A superblock of somebody's own making."""
    monkeypatch.setattr(map_history, "POOLS_MAX", 1)
    old = planned()
    noted(tmp_path, without_key(old, "blue"))
    seen = MapHistory(tmp_path)
    bogus = planned(RootKey(SecretKey(b"\x66" * 32), "somebody's"))
    seen.note(bogus, ())
    assert remembered_pool(tmp_path) == old.pool_id
    assert list(json.loads((tmp_path / FILE).read_text())["pools"]) == [old.pool_id]
    with pytest.raises(G35Error, match="has seen 2"):
        MapHistory(tmp_path).refuse(old)


def test_an_erased_tenant_does_not_come_back_under_a_greater_version(tmp_path: Path) -> None:
    old = planned()
    erased = without_key(old, "blue")
    noted(tmp_path, old, erased)
    with pytest.raises(G35Error, match="brings back a key of volume kv"):
        MapHistory(tmp_path).refuse(forged(old, erased))
    again, _ = with_tenant(erased, "blue", [], ROOT)
    MapHistory(tmp_path).refuse(again)
    noted(tmp_path, again)
    assert MapHistory(tmp_path).over(forged(old, again)) == [old.volumes[0].volume_id]


def test_an_agent_that_slept_through_the_erasure_knows_it_by_the_tenants_next_key(tmp_path: Path) -> None:
    old = planned()
    again, _ = with_tenant(without_key(old, "blue"), "blue", [], ROOT)
    noted(tmp_path, old, again)
    assert MapHistory(tmp_path).over(forged(old, again)) == [old.volumes[0].volume_id]
    assert MapHistory(tmp_path).over(again) == []


def test_a_data_key_that_was_rotated_away_does_not_come_back(tmp_path: Path) -> None:
    old = planned()
    begun = with_new_data_keys(old, "blue", ROOT)
    ended = without_earlier_keys(begun, ids(old))
    volume_id = [old.volumes[0].volume_id]
    noted(tmp_path, begun)
    assert MapHistory(tmp_path).over(forged(old, ended)) == volume_id
    assert MapHistory(tmp_path).over(ended) == []
    noted(tmp_path, ended)
    assert MapHistory(tmp_path).over(forged(old, ended)) == volume_id
    assert MapHistory(tmp_path).over(forged(begun, ended)) == volume_id, "the earlier key opens no more"
    assert MapHistory(tmp_path).over(with_new_data_keys(ended, "blue", ROOT)) == []


def test_numbers_that_no_key_vouches_for_are_not_noted(tmp_path: Path) -> None:
    """Or whoever writes a great epoch into a map would keep this agent from serving for ever."""
    true = planned()
    noted(tmp_path, true)
    tenants = [each.model_copy(update={"key_epoch": 1 << 30}) for each in true.tenants]
    volumes = [each.model_copy(update={"key_epoch": 1 << 30}) for each in true.volumes]
    seen = MapHistory(tmp_path)
    seen.note(true.model_copy(update={"tenants": tuple(tenants), "volumes": tuple(volumes)}), ())
    seen.refuse(true)
    MapHistory(tmp_path).refuse(true)


@pytest.mark.expects_log("cannot be written")
def test_a_full_disk_is_said_once_and_what_is_in_memory_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = planned()
    erased = without_key(old, "blue")
    noted(tmp_path, old)
    seen = MapHistory(tmp_path)
    (tmp_path / f"{FILE}.part").mkdir()  # nothing can be written under that name
    with caplog.at_level(logging.WARNING):
        seen.note(erased, ())
        for second in range(100):
            seen.write_again(float(second))
    assert len(caplog.records) == 1
    with pytest.raises(G35Error, match="has seen 2"):
        seen.refuse(old)
    MapHistory(tmp_path).refuse(old)
    (tmp_path / f"{FILE}.part").rmdir()
    seen.write_again(100.0 + AGAIN_SECONDS)
    with pytest.raises(G35Error, match="has seen 2"):
        MapHistory(tmp_path).refuse(old)


def test_what_another_program_noted_meanwhile_stays(tmp_path: Path) -> None:
    mine, other = planned(), planned()
    seen = MapHistory(tmp_path)
    seen.note(mine, ids(mine))
    noted(tmp_path, without_key(other, "blue"))
    seen.note(mine, ids(mine))
    with pytest.raises(G35Error, match="has seen 2"):
        MapHistory(tmp_path).refuse(other)


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[1]", '{"pools": {}}', '{"served": 1, "pools": {}}', '{"served": "a", "pools": []}',
        '{"served": "a", "pools": {"a": {"version": "x", "tenants": {}, "volumes": {}}}}',
        '{"served": "a", "pools": {"a": {"version": 1, "tenants": {"b": [1]}, "volumes": {}}}}',
        '{"served": "a", "pools": {"a": {"version": 1, "tenants": {}, "volumes": {"b": 1}}}}',
        '{"pool": "a", "version": 1}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_said(tmp_path: Path, text: str) -> None:
    assert remembered_pool(tmp_path) == ""
    (tmp_path / FILE).write_text(text)
    assert remembered_pool(tmp_path) == "", "who only wants a hint is not kept up"
    with pytest.raises(ConfigError, match="says nothing of a pool"):
        MapHistory(tmp_path)
