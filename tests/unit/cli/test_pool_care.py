"""What the verbs that look after a pool say, and what a format says of second copies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from agent.cli import pool_care, pool_channel
from agent.cli.pool_care import told
from agent.cli.pool_verb import short_of_second_copies
from agent.config.configuration import ScrubSection
from agent.errors import ConfigError
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.maintenance.bad_slots import Quarantined
from agent.pool.maintenance.scrub import ScrubCounters
from agent.pool.map.document import VolumeWish, plan_pool
from agent.remote.channel import WorkerChannel
from agent.service.repair import Repair
from tests.support.pool.memory_pool import MemoryPool, nguid_of

ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")
WISH = VolumeWish(name="v", share=1.0, value_bytes=65536, copies=2)
SIZE = 64 << 20


def test_two_copies_want_two_namespaces() -> None:
    with pytest.raises(ConfigError, match="fewer than two namespaces"):
        plan_pool([(nguid_of(0), SIZE)], [WISH], ROOT)
    [volume] = plan_pool([(nguid_of(0), SIZE), (nguid_of(1), SIZE)], [WISH], ROOT).volumes
    assert short_of_second_copies(volume) == ""


def test_a_format_says_for_how_many_values_there_is_room_twice() -> None:
    [volume] = plan_pool([(nguid_of(0), 6 * SIZE), (nguid_of(1), SIZE)], [WISH], ROOT).volumes
    smaller = min(extent.sets for extent in volume.extents)
    assert f"two copies of {64 * smaller} values only" in short_of_second_copies(volume)
    assert short_of_second_copies(volume.model_copy(update={"copies": 1})) == ""


def test_a_scrub_tells_what_it_left_out() -> None:
    told_little = told(ScrubCounters(slots_checked=3))
    assert told_little == "3 slots read (0 MiB): 0 bad, 0 stale, 0 set aside; 0 sets skipped"
    told_all = told(ScrubCounters(slots_young=5, slots_left=2, copies_missing=7, sets_skipped=1))
    for part in ("5 too young", "2 bad of files", "7 values with one copy", "1 set skipped"):
        assert part in told_all


@pytest.mark.parametrize("as_json", [False, True])
def test_the_verbs_end_with_1_where_not_all_was_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    agent = SimpleNamespace(key_file=Path("root.key"), state=Path("/nonexistent"))
    monkeypatch.setattr(pool_care, "load_configuration", lambda path: SimpleNamespace(agent=agent))
    monkeypatch.setattr(pool_channel, "root_key_in", lambda file: ROOT)
    results: list[Any] = [ScrubCounters(), ScrubCounters(sets_skipped=1)]
    monkeypatch.setattr(pool_care, "with_channel", lambda configuration, work: results.pop(0))
    pool_care.scrub(Path("x"), "0", as_json)
    with pytest.raises(typer.Exit) as ended:
        pool_care.scrub(Path("x"), "0", as_json)
    assert ended.value.exit_code == 1
    slot = Quarantined("v", "ab" * 16, 0, 1, 0.0)
    results += [
        {"slots": [slot], "directories_unread": 0, "released": 0},
        {"slots": [], "directories_unread": 3, "released": 0},
        {"slots": [slot], "directories_unread": 0, "released": 0},
    ]
    pool_care.quarantine(Path("x"), False, as_json)
    for give_back in (False, True):
        with pytest.raises(typer.Exit) as ended:
            pool_care.quarantine(Path("x"), give_back, as_json)
        assert ended.value.exit_code == 1
    assert "set" in capsys.readouterr().out


def test_blocks_of_files_are_an_agents_own_once_its_fs_holds_something() -> None:
    pool = MemoryPool((1,), value_bytes=65536)
    pool.settings = replace(pool.settings, kind="files")
    agent, in_use = pool.agent(), False

    def no_channel() -> WorkerChannel:
        raise AssertionError("there is nothing to scrub")

    keeping = Repair(
        ScrubSection.model_validate({}), [agent.volume], no_channel, lambda: [], lambda _: in_use
    )
    agent.channel.run(keeping.look(agent.channel))
    assert agent.volume.files_elsewhere
    in_use = True
    agent.channel.run(keeping.look(agent.channel))
    assert not agent.volume.files_elsewhere
