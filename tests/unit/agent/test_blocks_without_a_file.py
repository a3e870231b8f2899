"""Which blocks have no file of this agent: it says so only where all names of files are open."""

from __future__ import annotations

import pytest

from agent.service.agent import PROCESSES, Agent

BLOCKS = (b"a" * 16, b"b" * 16)


def unnamed(*not_served: str) -> object:
    """Of an agent without /fs and without the S3 door."""
    agent = object.__new__(Agent)
    agent.not_served = dict.fromkeys(not_served, "a reason")
    agent.files, agent.doors = None, {}
    return agent._unnamed(BLOCKS)


@pytest.mark.parametrize("part", ["/fs", "S3 of tenant blue"])
def test_none_where_names_are_not_open(part: str) -> None:
    assert unnamed(part) == ()
    assert unnamed(PROCESSES, part) == ()


def test_all_where_the_agent_has_no_files() -> None:
    assert unnamed() == BLOCKS


def test_an_agent_that_is_one_process_has_all_its_names() -> None:
    """`processes = 4` beside `[[local]]` is not served; a rotation of its keys ends all the same."""
    assert unnamed(PROCESSES) == BLOCKS
