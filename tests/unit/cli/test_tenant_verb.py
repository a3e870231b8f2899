"""`g35 tenant`: what it asks about before it does it, and what it finds half done."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from agent.cli import tenant_verb
from agent.cli.tenant_verb import holds_earlier_key, refuse_to_shrink
from agent.errors import UserError
from agent.inline.root_keys import HeldRootKey
from agent.inline.secrets import SecretKey
from agent.pool.directory_cache import DirectoryCache
from agent.pool.key_epochs import rotating, with_new_data_keys, without_earlier_keys
from agent.pool.pool_map import VolumeWish, plan_pool
from agent.pool.tenants import with_limits, without_key
from agent.pool.volume import Timing, Volume
from agent.pool.writing import Writing
from agent.remote.lanes import WorkerLanes
from tests.support.memory_lanes import MemoryLanes, MemoryNamespace
from tests.support.memory_pool import key_of, nguid_of

ROOT = HeldRootKey(SecretKey(b"\x11" * 32), "a test")
SIZE = 32 << 20
NUMBERS = {nguid_of(number).hex(): number for number in range(2)}
POOL_MAP = plan_pool(
    [(nguid_of(number), SIZE) for number in range(2)],
    [VolumeWish(name=name, value_bytes=1 << 16, share=0.4, tenant=name) for name in ("blue", "red")],
    ROOT,
)


def test_who_no_longer_waits_is_told_that_the_rotation_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tenant_verb, "load_configuration", lambda _: None)
    monkeypatch.setattr(tenant_verb, "with_lanes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tenant_verb.rotate("blue", Path("agent.toml"), 60.0)
    assert "What was begun goes on" in capsys.readouterr().err


def test_less_than_a_tenant_holds_is_asked_about() -> None:
    memory = MemoryLanes([MemoryNamespace(SIZE) for _ in range(2)])
    entry = POOL_MAP.volumes[0]
    volume = Volume(POOL_MAP.settings(entry), POOL_MAP.secret(entry, ROOT), DirectoryCache(1 << 20), Timing())
    for number in range(10):
        writing = Writing(volume, key_of(number), length=5)
        assert memory.run(writing.write(memory, 0, memoryview(b"hello"), memory.now() + 5))
    lanes, slot = cast(WorkerLanes, memory), volume.settings.slot_bytes

    def ask(name: str = "blue", **limits: int) -> None:
        refuse_to_shrink(lanes, POOL_MAP, with_limits(POOL_MAP, name, **limits), name, NUMBERS)

    for refused in ({"quota_slots": 9}, {"quota_bytes": 10 * slot - 1}):
        with pytest.raises(UserError, match="holds 10 slots"):
            ask(**refused)
    ask(quota_slots=10, quota_bytes=10 * slot)
    ask("red", quota_slots=1)
    reads = sum(each.reads for each in memory.namespaces)
    ask(bandwidth=5)
    assert sum(each.reads for each in memory.namespaces) == reads, "bandwidth takes nothing from anybody"


def test_a_rotation_that_ended_on_some_namespaces_only_is_told_from_one_that_did_not_begin() -> None:
    begun = with_new_data_keys(POOL_MAP, "blue", ROOT)
    ended = without_earlier_keys(begun, {each.volume_id for each in rotating(begun, "blue")})
    assert holds_earlier_key(begun, ended, "blue")
    assert not holds_earlier_key(begun, ended, "red")
    assert not holds_earlier_key(POOL_MAP, ended, "blue"), "it may have been away all the time"
    assert not holds_earlier_key(ended, ended, "blue")
    again = with_new_data_keys(ended, "blue", ROOT)
    assert not holds_earlier_key(begun, again, "blue")
    assert not holds_earlier_key(without_key(begun, "blue"), without_key(ended, "blue"), "blue")
