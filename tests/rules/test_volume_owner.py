"""A volume changes by `change` alone (agent/pool/volume/volume.py): nobody else assigns a part of it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from agent.pool.volume.volume import PoolVolume, Volume
from tests.support.rungs.tree import text_files

REPOSITORY = Path(__file__).parents[2]
PARTS = {
    "settings", "placement", "old_placement", "codec", "key_transition", "quota", "bandwidth", "siblings",
    "erased", "files_elsewhere", "newest_map", "map_age",
}  # fmt: skip
IS_A_VOLUME = {"volume", "served", "other", "each", "visitor"}
"""How variables and attributes that hold a volume are named."""


def assigned_parts(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in (each for one in targets if one is not None for each in ast.walk(one)):
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                holder = target.value
                name = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")
                if target.attr in PARTS and name in IS_A_VOLUME:
                    found.append(f"{name}.{target.attr}")
    return found


def test_nobody_assigns_a_part_of_a_volume_from_outside() -> None:
    found = {
        path: parts
        for path, text in text_files(REPOSITORY)
        if path.endswith(".py") and (parts := assigned_parts(text))
    }
    assert not found


@pytest.mark.parametrize("made", [PoolVolume, Volume])
def test_a_volume_has_one_method_for_changes(made: type) -> None:
    assert "change" in vars(made)


def test_the_rule_sees_an_assignment() -> None:
    assert assigned_parts("self.volume.codec, x = 1, 2") == ["volume.codec"]
    assert assigned_parts("other.erased = True") == ["other.erased"]
    assert not assigned_parts("self.codec = 1")
