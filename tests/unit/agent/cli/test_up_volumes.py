"""The volumes of a new pool of `g35 up`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from agent.cli.up.agent_toml import agent_toml, check_room
from agent.cli.up.layout import Layout
from agent.cli.up.up_arguments import UpOptions
from agent.config.configuration import parse_configuration

NOWHERE = {"address": "127.0.0.1", "port": 4420, "nqn": "nqn.2014-08.org.nvmexpress:none"}


def shares(**options: Any) -> dict[str, float]:
    """Of each volume, by its name and kind."""
    chosen = UpOptions(**options)
    check_room(chosen)
    text = agent_toml(Layout(Path("/nonexistent")), Path("/nonexistent"), [NOWHERE], chosen)
    volumes = parse_configuration(tomllib.loads(text), "the configuration").volumes
    return {f"{each.name}:{each.kind}": round(each.share, 3) for each in volumes}


def test_a_new_pool_has_room_for_each_face() -> None:
    files = {"files-small:files": 0.04, "files-large:files": 0.18}
    assert shares() == {"kv:kv": 0.55, **files, "shared:shared": 0.2}
    assert shares(files=False) == {"kv:kv": 1.0}


@pytest.mark.parametrize(
    ("drives", "drive_size", "value_size", "chunk_size", "has_one"),
    [
        (1, "315M", "64K", "1M", False),
        (3, "160M", "64K", "1M", True),
        (1, "1382M", "16M", "1M", False),
        (1, "2G", "16M", "1M", True),
        (1, "1400M", "64K", "4M", True),
        (1, "315M", "64K", "512K", True),
    ],
)
def test_a_small_pool_has_none_for_shared_files(
    drives: int, drive_size: str, value_size: str, chunk_size: str, has_one: bool
) -> None:
    """Its share would be less than a set of chunks, or leave no set to /kv."""
    sizes = {"drive_size": drive_size, "value_size": value_size, "chunk_size": chunk_size}
    found = shares(enclosures=1, drives=drives, **sizes)
    assert ("shared:shared" in found) is has_one
    assert found["kv:kv"] == (0.55 if has_one else 0.75)


@pytest.mark.parametrize(
    ("chunk_size", "chunk_bytes"), [("1M", 1 << 20), ("64K", 1 << 16), ("16M", 16 << 20)]
)
def test_shared_files_lie_in_chunks_of_the_size_that_is_asked_for(chunk_size: str, chunk_bytes: int) -> None:
    chosen = UpOptions(drive_size="8G", chunk_size=chunk_size)
    text = agent_toml(Layout(Path("/nonexistent")), Path("/nonexistent"), [NOWHERE], chosen)
    volumes = parse_configuration(tomllib.loads(text), "the configuration").volumes
    assert [each.value_size for each in volumes if each.kind == "shared"] == [chunk_bytes]
