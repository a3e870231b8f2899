"""The processors of an agent: those that it is told, and one of two where its NIC is emulated."""

from __future__ import annotations

import os
import threading

import pytest

from agent.cli.agent_verb import stay_on
from agent.cli.up.agent_toml import agent_cpus
from agent.errors import ConfigError


def _allow(monkeypatch: pytest.MonkeyPatch, cpus: set[int]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus))


def test_an_agent_with_an_emulated_nic_has_one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    _allow(monkeypatch, {5, 3})
    assert agent_cpus("rdma") == (3,)
    assert agent_cpus("tcp") == ()


@pytest.mark.parametrize("cpus", [{0}, {0, 1, 2}, set(range(64))])
def test_with_any_other_number_it_has_all(monkeypatch: pytest.MonkeyPatch, cpus: set[int]) -> None:
    _allow(monkeypatch, cpus)
    assert agent_cpus("rdma") == ()


def test_threads_that_are_started_afterwards_run_there_too() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    seen: list[set[int]] = []

    def play() -> None:
        stay_on((one,))
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()

    # Affinity is a thread's own: in a thread that ends, it is nobody else's.
    thread = threading.Thread(target=play)
    thread.start()
    thread.join()
    assert seen == [{one}]
    assert os.sched_getaffinity(0) == before


def test_none_named_leaves_it_as_it_is() -> None:
    before = os.sched_getaffinity(0)
    stay_on(())
    assert os.sched_getaffinity(0) == before


def test_what_may_not_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _allow(monkeypatch, {0, 1})
    with pytest.raises(ConfigError, match=r"agent\.cpus: 7, 9 may not be used here, only 0, 1"):
        stay_on((0, 9, 7))


def test_who_may_not_choose_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    _allow(monkeypatch, {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with pytest.raises(ConfigError, match="Linux refuses it: Operation not permitted") as refused:
        stay_on((1,))
    assert "CPUAffinity" in str(refused.value.advice)
