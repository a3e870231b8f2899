"""`g35 status --bounds`: what others can raise, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent.cli import status_verb
from agent.fs.kv_face import OPEN_VALUES, WRITERS
from agent.host_os.per_user_bounds import Bounds


@pytest.fixture
def snapshot(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    bounds = Bounds()
    bound = bounds.of(OPEN_VALUES)
    for user in (1000, 1000, 1001):
        assert bound.take(user)
    bounds.of(WRITERS, 1).take(0)
    assert not bounds.of(WRITERS).take(1000)
    rows = bounds.snapshot()
    monkeypatch.setattr(status_verb, "read_status", lambda mount: {"bounds": rows})
    return rows


def asked(capsys: pytest.CaptureFixture[str], *, as_json: bool) -> str:
    status_verb.status(None, Path("/mnt"), as_json, True)
    return capsys.readouterr().out


def test_programs_get_a_list_of_bounds(
    snapshot: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(asked(capsys, as_json=True))
    assert found == snapshot
    assert [(row["name"], row["held"], row["most_of_one"], row["refusals"]) for row in found] == [
        ("kv-open", 3, 2, 0),
        ("kv-writers", 1, 1, 1),
    ]


@pytest.mark.usefixtures("snapshot")
def test_people_get_a_table_in_which_no_number_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    shown = asked(capsys, as_json=False)
    for each in ("kv-open", "kv-writers", "131072", "ENFILE"):
        assert each in shown
    meaning = next(line for line in shown.splitlines() if line.startswith("kv-open: "))
    assert meaning.endswith("beyond: ENFILE"), "in a pipe a row is a line"
