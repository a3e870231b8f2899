"""An agent that cannot have other processes says why, and is one."""

from __future__ import annotations

from typing import Any

import pytest

from agent.config.configuration import AgentSection, parse_configuration
from agent.errors import ConfigError
from agent.service.why_alone import why_alone

ENCLOSURE = {"name": "one", "address": "127.0.0.1", "nqn": "nqn.2014-08.org.nvmexpress:one"}
AGENT = {"mount": "/mnt/g35", "state": "/nonexistent", "key_file": "/nonexistent", "processes": 2}


def why(agent: dict[str, Any] | None = None, **sections: Any) -> str:
    document = {"agent": AGENT | (agent or {}), "enclosures": [ENCLOSURE], **sections}
    return why_alone(parse_configuration(document, "a test's"))


def test_it_has_them_as_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: True)
    assert why() == ""
    assert why(policies=[{"volume": "kv", "write": "back"}]) == ""
    assert why(fabric={"local_address": "192.0.2.1"}) == ""


def test_a_guest_or_s3_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    guest = {"virtiofs": {"socket": "/run/g35.sock"}}
    assert why({"mount": None}, **guest) == ""
    assert why({"mount": None, "door": "pyfuse3"}, **guest) == ""
    assert why(**guest) == "/dev/fuse may not be opened"


@pytest.mark.parametrize(
    ("agent", "sections", "reason"),
    [
        ({"door": "pyfuse3"}, {}, 'agent.door is "pyfuse3"'),
        ({}, {"local": [{"path": "/nonexistent", "size": "1G"}]}, "there is a [[local]] table"),
        ({}, {"discovery": [{"name": "d", "address": "127.0.0.1"}]}, "there is a [[discovery]] table"),
        (
            {},
            {"spill": [{"folder": "/g4", "max_bytes": "1G", "volumes": ["kv"]}]},
            "there is a [[spill]] table",
        ),
        ({}, {"prestage": {"learn": True}}, "prestage.learn is set"),
        (
            {},
            {"fabric": {"local_address": "192.0.2.1", "verbs_provider": "emulator.roce.pyverbs"}},
            "fabric.local_address is that of an emulated device",
        ),
    ],
)
def test_what_keeps_it_alone(
    agent: dict[str, Any], sections: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: True)
    assert why(agent, **sections) == reason


def test_where_dev_fuse_may_not_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert why() == "/dev/fuse may not be opened"


@pytest.mark.parametrize("processes", [65, -1])
def test_processes_are_64_at_the_most(processes: int) -> None:
    with pytest.raises(ConfigError, match="processes"):
        why({"processes": processes})


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (7, 1), (8, 2), (16, 4), (128, 4)])
def test_without_a_number_the_cores_say_how_many(
    cores: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cores)))
    assert count() == processes
    assert count(processes=3) == 3


def test_without_a_number_the_cores_that_the_agent_is_given_count() -> None:
    assert count(cpus=list(range(8))) == 2


@pytest.mark.parametrize("cores", [1, 2, 7, 8, 16])
def test_readers_take_single_values_where_the_cores_are_for_several_processes(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cores)))
    assert section(processes=2).lends_single_slots == (count() > 1)


def count(**agent: Any) -> int:
    return section(**agent).process_count


def section(**agent: Any) -> AgentSection:
    document = {"agent": {**AGENT, "processes": 0, **agent}, "enclosures": [ENCLOSURE]}
    return parse_configuration(document, "a test's").agent
