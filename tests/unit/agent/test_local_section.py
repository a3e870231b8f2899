"""The section for local namespaces: what is taken and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from agent.cli.agent_verb import agent_need
from agent.config.configuration import Configuration, parse_configuration
from agent.errors import ConfigError

AGENT = {"mount": "/mnt/g35", "state": "/nonexistent", "key_file": "/nonexistent", "workers": 2}


def configuration(*local: dict[str, Any], **sections: Any) -> Configuration:
    return parse_configuration({"agent": AGENT, "local": list(local), **sections}, "a test's")


def test_a_path_is_enough() -> None:
    (found,) = configuration({"path": "/dev/nvme1n1"}).local
    assert (found.shown_name, found.address, found.size) == ("local:nvme1n1", ("127.0.0.1", 4421), 0)


def test_one_table_may_be_written_once() -> None:
    found = parse_configuration({"agent": AGENT, "local": {"path": "/ssd", "size": "1T"}}, "a test's")
    assert found.local[0].size == 1 << 40


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({}, "path: is required"),
        ({"path": "ssd"}, "no absolute path"),
        ({"path": "/ssd", "export": "somewhere:4421"}, "listens at an IP address"),
        ({"path": "/ssd", "export": "127.0.0.1:0"}, "a port that stays"),
        ({"path": "/ssd", "export": "127.0.0.1"}, "no ADDRESS:PORT"),
        ({"path": "/ssd", "export": "10.0.0.5:4421"}, "without a hosts_file"),
        ({"path": "/ssd", "export": "[::]:4421"}, "without a hosts_file"),
        ({"path": "/ssd", "size": "lots"}, "size"),
        ({"path": "/ssd", "sise": "1G"}, "did you mean size"),
    ],
)
def test_what_cannot_be_is_refused(section: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        configuration(section)


def test_beyond_loopback_it_has_a_hosts_file() -> None:
    section = {"path": "/ssd", "export": "[fd00::5]:4421", "hosts_file": "/etc/g35/hosts"}
    (found,) = configuration(section).local
    assert found.address == ("fd00::5", 4421)


def test_names_are_told_apart() -> None:
    twins = {"path": "/one/ssd"}, {"path": "/two/ssd"}
    with pytest.raises(ConfigError, match="have one name"):
        configuration(*twins)
    found = configuration(twins[0], {**twins[1], "name": "second"})
    assert [each.shown_name for each in found.local] == ["local:ssd", "second"]


def test_its_threads_and_buffers_count_among_what_an_agent_needs() -> None:
    nothing = {"discovery": {"name": "pod", "address": "127.0.0.1"}}
    without = agent_need(configuration(**nothing))
    one = agent_need(configuration({"path": "/ssd"}, **nothing))
    assert one.threads - without.threads == 9
    assert one.memory_bytes - without.memory_bytes == 16 << 20
