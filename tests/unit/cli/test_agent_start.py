"""What the agent's program does once everything is up."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest

from agent.cli import agent_verb


def test_what_the_start_has_made_is_left_out_of_collections(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def started(main: functools.partial[Any]) -> None:
        assert done == []
        main.args[1]()

    monkeypatch.setattr(agent_verb, "check_limits", lambda need: None)
    monkeypatch.setattr(agent_verb, "agent_need", lambda configuration: None)
    monkeypatch.setattr(agent_verb, "served", lambda configuration: "nothing")
    monkeypatch.setattr(agent_verb, "run_unwrapped", started)
    monkeypatch.setattr(gc, "collect", lambda: done.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    configuration: Any = None
    agent_verb.run(configuration, None)
    assert done == ["collect", "freeze"]
    assert capsys.readouterr().out == "ready\n"
