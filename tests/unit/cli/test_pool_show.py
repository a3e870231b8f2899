"""What `g35 pool show` says and how it ends, where it has seen no pool, or not all of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from agent.cli import pool_verb
from agent.cli.pool_verb import not_looked_at
from agent.errors import G35Error
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.maintenance.bad_slots import Quarantined
from agent.pool.map.document import VolumeWish, plan_pool
from agent.pool.map.inspect import Content, Inspection
from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from tests.support.pool.memory_channel import MemoryChannel
from tests.support.pool.memory_pool import nguid_of

BLANK = Inspection(0, Content.BLANK)
UNREAD = Inspection(1, Content.UNREADABLE, detail="late")


@pytest.mark.parametrize(
    ("inspections", "away", "said", "advice"),
    [
        ([], "shelf (connection refused)", "no namespace was reached", "shelf (connection refused)"),
        ([], "none", "no namespace was reached", "add drives"),
        ([BLANK], "shelf (it did not prove itself)", "not all was looked at", "did not prove itself"),
        ([BLANK, UNREAD], "none", "not all was looked at", "1 namespace could not be read (late)"),
    ],
    ids=["nothing reached", "nothing there", "one away", "one unread"],
)
def test_what_was_not_looked_at_is_not_called_no_pool(
    inspections: list[Inspection], away: str, said: str, advice: str
) -> None:
    error = not_looked_at(inspections, away)
    assert error is not None
    assert said in str(error)
    assert advice in (error.advice or "")


def test_where_all_was_looked_at_there_is_none() -> None:
    assert not_looked_at([BLANK], "none") is None


def test_the_only_enclosure_away_is_an_error_and_no_hint_to_format(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_a_fabric(_: object, work: Callable[[Fabric, Any], Any]) -> Any:
        return work(Fabric([Enclosure("shelf")]), MemoryChannel([]))

    monkeypatch.setattr(pool_verb, "load_configuration", lambda path: None)
    monkeypatch.setattr(pool_verb, "with_channel", without_a_fabric)
    for as_json in (False, True):
        with pytest.raises(G35Error, match="no namespace was reached"):
            pool_verb.show(Path("c"), as_json=as_json)
        said = capsys.readouterr().out
        assert "shelf" in said, "who was not reached"
        assert "format" not in said


@pytest.mark.parametrize("as_json", [False, True])
def test_directories_that_were_not_read_end_it_with_1_after_what_was_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    """As `g35 pool quarantine` ends."""
    root = RootKey(SecretKey(b"\x11" * 32), "a test")
    wish = VolumeWish(name="vol", value_bytes=65536, share=1.0)
    pool_map = plan_pool([(nguid_of(0), 64 << 20)], [wish], root)
    slot = Quarantined("vol", "ab" * 16, 0, 1, 0.0)
    shown = {"namespaces": [], "pool": pool_map.model_dump(mode="json"), "not_connected": "none"}
    monkeypatch.setattr(pool_verb, "load_configuration", lambda path: None)
    monkeypatch.setattr(pool_verb, "with_channel", lambda _, work: (shown, None))
    pool_verb.show(Path("c"), as_json=as_json)
    shown["quarantined"] = {"slots": [slot._asdict()], "directories_unread": 0}
    pool_verb.show(Path("c"), as_json=as_json, quarantined=True)
    capsys.readouterr()
    shown["quarantined"] = {"slots": [slot._asdict()], "directories_unread": 3}
    with pytest.raises(typer.Exit) as ended:
        pool_verb.show(Path("c"), as_json=as_json, quarantined=True)
    assert ended.value.exit_code == 1
    assert "ab" * 16 in capsys.readouterr().out
