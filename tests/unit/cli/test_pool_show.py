"""What `g35 pool show` says where it has seen no pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.cli import pool_verb
from agent.cli.pool_verb import not_looked_at
from agent.errors import G35Error
from agent.pool.map.inspect import Content, Inspection
from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from tests.support.pool.memory_channel import MemoryChannel

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
