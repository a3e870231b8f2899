"""`g35 tenant`: what it asks about before it does it, and what it finds half done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.cli import tenant_verb
from agent.cli.tenant_verb import holds_earlier_key, refuse_to_shrink
from agent.errors import ConfigError, G35Error, UserError
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.map.commit import replace_map
from agent.pool.map.document import PoolMap, VolumeWish, plan_pool
from agent.pool.map.inspect import inspect, newest_map
from agent.pool.map.key_epochs import rotating, with_new_data_keys, without_earlier_keys
from agent.pool.map.map_seal import MapSeal
from agent.pool.map.tenant_changes import find_tenant, with_limits, without_key
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.key_transition import QUIET_SECONDS
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Volume
from agent.pool.write.put import SlotWriter
from agent.remote.channel import WorkerChannel
from agent.sizes import parse_size, size_text
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import key_of, nguid_of

ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")
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
    monkeypatch.setattr(tenant_verb, "keys_of", lambda _: (ROOT, MapSeal(ROOT)))
    monkeypatch.setattr(tenant_verb, "with_channel", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tenant_verb.rotate("blue", Path("agent.toml"), 60.0)
    assert "What was begun goes on" in capsys.readouterr().err


def stored_by_blue(memory: MemoryChannel, count: int) -> Volume:
    """The volume of tenant blue, with some values in it."""
    entry = POOL_MAP.volumes[0]
    volume = Volume(POOL_MAP.settings(entry), POOL_MAP.secret(entry, ROOT), DirectoryCache(1 << 20), Timing())
    for number in range(count):
        writing = SlotWriter(volume, key_of(number), length=5)
        assert memory.run(writing.write(memory, 0, memoryview(b"hello"), memory.now() + 5))
    return volume


def test_less_than_a_tenant_holds_is_asked_about() -> None:
    memory = MemoryChannel([MemoryNamespace(SIZE) for _ in range(2)])
    volume = stored_by_blue(memory, 10)
    channel, slot = cast(WorkerChannel, memory), volume.settings.slot_bytes

    def ask(name: str = "blue", **limits: int) -> None:
        refuse_to_shrink(channel, POOL_MAP, with_limits(POOL_MAP, name, **limits), name, NUMBERS)

    for refused in ({"quota_slots": 9}, {"quota_bytes": 10 * slot - 1}):
        with pytest.raises(UserError, match="holds 10 slots, 680 KiB of slots, may have"):
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


def test_a_tenant_comes_back_only_after_agents_have_dropped_what_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Directories that were cleared at once were filled again by an agent that had yet to see the erasure."""
    memory = MemoryChannel([MemoryNamespace(SIZE) for _ in range(2)])
    channel, erased = cast(WorkerChannel, memory), without_key(POOL_MAP, "blue")
    for pool_map in (POOL_MAP, erased):
        assert not memory.run(replace_map(memory, pool_map, NUMBERS))
    configuration = SimpleNamespace(volumes=[])
    events: list[object] = []
    clear = tenant_verb.clear_directories

    def cleared(*arguments: Any) -> Any:
        events.append("cleared")
        return clear(*arguments)

    for name, stand_in in {
        "load_configuration": lambda _: configuration,
        "keys_of": lambda _: (ROOT, MapSeal(ROOT)),
        "with_channel": lambda _, work: work(None, channel),
        "_look_at_maps": lambda *_: (erased, NUMBERS, []),
        "clear_directories": cleared,
    }.items():
        monkeypatch.setattr(tenant_verb, name, stand_in)
    monkeypatch.setattr(tenant_verb.time, "sleep", events.append)
    tenant_verb.add("blue", Path("agent.toml"))
    assert events == [QUIET_SECONDS, "cleared"]
    assert "in which agents drop what was erased" in capsys.readouterr().err
    events.clear()
    monkeypatch.setattr(tenant_verb, "_look_at_maps", lambda *_: (POOL_MAP, NUMBERS, []))
    assert not memory.run(replace_map(memory, erased, NUMBERS))
    with pytest.raises(G35Error, match="erased just now"):
        tenant_verb.add("blue", Path("agent.toml"))
    assert events == []


class Verbs:
    """The verbs over memory, for a pool of the tenants blue and red."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory = MemoryChannel([MemoryNamespace(SIZE) for _ in range(2)])
        channel = cast(WorkerChannel, self.memory)
        self.write(POOL_MAP)
        for name, stand_in in {
            "load_configuration": lambda _: None,
            "keys_of": lambda _: (ROOT, MapSeal(ROOT)),
            "with_channel": lambda _, work: work(None, channel),
            "_look_at_maps": lambda *_, **_all: (self.found(), NUMBERS, []),
        }.items():
            monkeypatch.setattr(tenant_verb, name, stand_in)

    def write(self, pool_map: PoolMap) -> None:
        assert not self.memory.run(replace_map(self.memory, pool_map, NUMBERS))

    def found(self) -> PoolMap:
        looks = [inspect(self.memory, number, nguid_of(number), SIZE) for number in range(2)]
        return newest_map([self.memory.run(each) for each in looks])


@pytest.mark.parametrize("yes", [False, True])
def test_a_tenant_that_there_is_not_is_told_of_before_yes_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, yes: bool
) -> None:
    verbs, config = Verbs(monkeypatch), Path("agent.toml")
    with pytest.raises(ConfigError, match=r"no tenant NOBODY$") as refused:
        tenant_verb.erase("NOBODY", config, yes)
    assert refused.value.advice == "it has blue, red"
    for wrong, meant in (("bleu", "blue"), ("RED", "red"), ("blue ", "blue")):
        with pytest.raises(ConfigError, match=rf"no tenant {wrong} \(did you mean {meant}\?\)"):
            tenant_verb.erase(wrong, config, yes)
    with pytest.raises(ConfigError, match="no tenant bleu"):
        tenant_verb.set_limits("bleu", config, quota_bytes="10G", yes=yes)
    with pytest.raises(ConfigError, match="no tenant bleu"):
        tenant_verb.rotate("bleu", config)
    assert verbs.found() == POOL_MAP


def test_what_would_be_lost_is_told_with_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    verbs, config = Verbs(monkeypatch), Path("agent.toml")
    with pytest.raises(UserError, match=r"in 1 volume\(s\) \(blue\) would be lost") as refused:
        tenant_verb.erase("blue", config)
    assert "--yes" in refused.value.advice
    assert verbs.found() == POOL_MAP
    verbs.write(without_key(POOL_MAP, "blue"))
    with pytest.raises(UserError, match="tenant blue was erased; --yes"):
        tenant_verb.erase("blue", config)


def test_the_advice_is_one_that_the_user_of_the_verb_can_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """`add` has no --yes."""
    verbs, config = Verbs(monkeypatch), Path("agent.toml")
    monkeypatch.setattr(tenant_verb, "load_configuration", lambda _: SimpleNamespace(volumes=[]))
    stored_by_blue(verbs.memory, 10)
    with pytest.raises(UserError, match="holds 10 slots") as refused:
        tenant_verb.set_limits("blue", config, quota_slots=9)
    assert refused.value.advice == "say --yes if that is meant"
    with pytest.raises(UserError, match="holds 10 slots") as refused:
        tenant_verb.add("blue", config, quota_slots=9)
    assert "g35 tenant set blue --yes" in refused.value.advice
    tenant_verb.set_limits("blue", config, quota_slots=9, yes=True)
    assert find_tenant(verbs.found(), "blue").quota_slots == 9


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("10GiB", "10 GiB"),
        ("10G", "10 GiB"),
        ("10240M", "10240 MiB"),
        ("1.5T", "1.5 TiB"),
        ("10737418240", "10737418240 bytes"),
        ("0", "any bytes"),
    ],
)
def test_limits_are_told_in_the_unit_in_which_they_were_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, told: str
) -> None:
    Verbs(monkeypatch)
    tenant_verb.set_limits("blue", Path("agent.toml"), quota_bytes=typed, bandwidth="500M", yes=True)
    said = capsys.readouterr().out
    assert said == f"tenant blue: any slots, {told} of slots, 500 MiB a second through each agent\n"
    tenant_verb.set_limits("blue", Path("agent.toml"), quota_slots=7, yes=True)
    assert "7 slots, " in capsys.readouterr().out
    with pytest.raises(ConfigError, match="4 KiB is less than a slot of tenant blue, of 68 KiB"):
        tenant_verb.set_limits("blue", Path("agent.toml"), quota_bytes="4K")


def test_sizes_for_people_are_exact() -> None:
    for size in (0, 1, 1023, 4096, 69632, (10 << 30) + 1, 3 << 29, 5 << 40, (1 << 63) - 1):
        for unit in (None, "", "K", "M", "G", "T"):
            text = size_text(size, unit)
            number = text.removesuffix(" bytes")
            assert parse_size(number) == size, text


class Rotating:
    """The verb without a fabric: maps as they come, and how much is left at each count."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, maps: list[PoolMap], left: list[int]) -> None:
        self.in_force, self.maps, self.left, self.clock = maps[0], maps, left, 0.0
        self.is_first = True
        for name, stand_in in {
            "load_configuration": lambda _: None,
            "keys_of": lambda _: (ROOT, MapSeal(ROOT)),
            "with_channel": lambda _, work: work(None, None),
            "_look_at_maps": lambda *_: (self.look(), NUMBERS, []),
            "_replace": lambda *_: self.in_force,
            "_left_under_earlier": lambda *_: left.pop(0) if len(left) > 1 else left[0],
        }.items():
            monkeypatch.setattr(tenant_verb, name, stand_in)
        monkeypatch.setattr(tenant_verb.time, "monotonic", lambda: self.clock)
        monkeypatch.setattr(tenant_verb.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.clock += seconds

    def look(self) -> PoolMap:
        if self.is_first:
            self.is_first = False
            return self.maps[0]
        self.in_force = self.maps.pop(0) if len(self.maps) > 1 else self.maps[0]
        return self.in_force

    def rotate(self, wait: float) -> None:
        self.is_first = True
        tenant_verb.rotate("blue", Path("agent.toml"), wait)


def test_a_rotation_that_was_waited_for_and_is_not_over_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = with_new_data_keys(POOL_MAP, "blue", ROOT)
    verb = Rotating(monkeypatch, [begun], [60])
    with pytest.raises(G35Error, match="60 values are under the earlier keys still") as refused:
        verb.rotate(5.0)
    assert verb.clock == 5.0
    assert "files" not in refused.value.advice
    assert capsys.readouterr().out == ""
    # Asked how much is left, it has said so.
    verb.rotate(0.0)
    assert "60 values" in capsys.readouterr().out
    verb = Rotating(monkeypatch, [begun], [60, 7, 0])
    verb.rotate(5.0)
    assert "nothing is left" in capsys.readouterr().out


def test_blocks_of_files_are_said_to_wait_for_the_agent_that_has_the_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wish = VolumeWish(name="f", value_bytes=1 << 16, share=0.4, tenant="blue", kind="files")
    pool_map = plan_pool([(nguid_of(number), SIZE) for number in range(2)], [wish], ROOT)
    verb = Rotating(monkeypatch, [with_new_data_keys(pool_map, "blue", ROOT)], [3])
    with pytest.raises(G35Error) as refused:
        verb.rotate(1.0)
    assert "the one that has the files" in refused.value.advice


def test_a_tenant_that_is_erased_while_its_rotation_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = with_new_data_keys(POOL_MAP, "blue", ROOT)
    erased = without_key(begun, "blue")
    verb = Rotating(monkeypatch, [begun, begun, erased], [60])
    with pytest.raises(G35Error, match="was erased meanwhile"):
        verb.rotate(60.0)
    assert verb.clock < 5
    # Also where it is erased between the last count and the end.
    verb = Rotating(monkeypatch, [begun], [0])
    verb.in_force = erased
    monkeypatch.setattr(tenant_verb, "rotating", lambda pool_map, name: rotating(begun, name))
    with pytest.raises(G35Error, match="was erased meanwhile"):
        verb.rotate(60.0)
    monkeypatch.undo()
    ended = without_earlier_keys(begun, {each.volume_id for each in rotating(begun, "blue")})
    Rotating(monkeypatch, [begun, ended], [5, 5, 0]).rotate(60.0)
    assert "somebody else" in capsys.readouterr().out
