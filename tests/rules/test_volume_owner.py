"""A volume changes by `change` alone (agent/pool/volume/volume.py): nobody else assigns a part of it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.pool.volume.volume import PoolVolume, Volume
from tests.support.rungs.tree import Program, no_collections, text_files

REPOSITORY = Path(__file__).parents[2]
OWNER = "agent/pool/volume/volume.py"
MARK = "# From here on `change` alone writes."


def _stored(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def _is_own(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id == "self"


def _parts(made: type) -> set[str]:
    """What `__init__` assigns behind `MARK`, and what the other methods assign."""
    source = inspect.getsource(made)
    mark = source[: source.index(MARK)].count("\n")
    (defined,) = ast.parse(source).body
    assert isinstance(defined, ast.ClassDef)
    return {
        target.attr
        for method in defined.body
        for target in _stored(method)
        if _is_own(target) and (getattr(method, "name", "") != "__init__" or target.lineno > mark)
    }


PARTS = _parts(PoolVolume) | _parts(Volume)
SETTERS = ("setattr", "delattr", "__setattr__", "__delattr__")
NO_VOLUMES = {
    "target.settings": "emulator/jbof/",  # an emulated target
    "ours.placement": "tests/unit/claims/",  # a record of a hit curve
    "pool.settings": "tests/unit/",  # a `MemoryPool`, before it opens its volumes
    "self.pool.settings": "tests/unit/",
    "others.settings": "tests/unit/agent/guests/",
    "blocks.settings": "tests/unit/agent/guests/",
    "TestVerbs.settings": "tests/pair/roce/",  # of hypothesis
    "FilesMachine.TestCase.settings": "tests/unit/files/",
}
"""Holders of another class, with an attribute that has the name of a part, and where they are."""


def _is_a_volume(defined: ast.ClassDef) -> bool:
    return not {"PoolVolume", "Volume"}.isdisjoint(map(ast.unparse, defined.bases))


_NAMES_A_PART = re.compile(rf"[.'\"]\s*(?:{'|'.join(sorted(PARTS))})\b")
"""In a file without this there is no change, so it is not parsed."""


def changed_parts(source: str, path: str = "") -> list[str]:
    """Stores and deletions of a part on another holder than `self`, or by a subclass in another file."""
    if not _NAMES_A_PART.search(source):
        return []
    program = Program(source)
    found = [
        target
        for target in program.nodes(ast.Attribute)
        if isinstance(target.ctx, ast.Store | ast.Del) and not _is_own(target)
    ]
    for defined in program.nodes(ast.ClassDef):
        if path != OWNER and _is_a_volume(defined):
            found += [target for target in _stored(defined) if _is_own(target)]
    said = [ast.unparse(target) for target in found if target.attr in PARTS]
    quoted = {repr(part) for part in PARTS}
    for call in program.nodes(ast.Call):
        name = getattr(call.func, "attr", "") or getattr(call.func, "id", "")
        if name.endswith(SETTERS):
            said += [ast.unparse(call)] if quoted.intersection(map(ast.unparse, call.args)) else []
    return [each for each in said if each not in NO_VOLUMES or not path.startswith(NO_VOLUMES[each])]


def test_nobody_assigns_a_part_of_a_volume_from_outside() -> None:
    with no_collections():
        found = {
            path: parts
            for path, text in text_files(REPOSITORY)
            if path.endswith(".py") and (parts := changed_parts(text, path))
        }
    assert not found


@pytest.mark.parametrize("made", [PoolVolume, Volume])
def test_a_volume_has_one_method_for_changes(made: type) -> None:
    assert "change" in vars(made)


def test_the_parts_are_those_of_the_class() -> None:
    assert {"codec", "placement", "old_placement", "settings", "quota", "below", "erased"} <= PARTS
    assert not PARTS & {"cache", "timing", "key_locks", "holds"}, "made once, and shared"


@pytest.mark.parametrize(
    "change",
    [
        "self.volume.codec, x = (1, 2)", "self._volume.codec = 1", "v.erased = True",
        "volumes[0].erased = True", "volume.below = None", "volume.siblings += (1,)",
        "volume.erased: bool = True", "del volume.quota", "setattr(volume, 'codec', 1)",
        "object.__setattr__(volume, 'codec', 1)", "monkeypatch.setattr(v, 'codec', 1)",
        "class Mine(Volume):\n    def run(self):\n        self.codec = 1",
    ],
)  # fmt: skip
def test_the_rule_sees_a_change(change: str) -> None:
    assert changed_parts(change)


@pytest.mark.parametrize("other", ["self.codec = 1", "volume.cache = 1", "getattr(volume, 'codec')"])
def test_the_rule_leaves_the_rest_alone(other: str) -> None:
    assert not changed_parts(other)
