"""Compiled modules are imported where they fit their sources, and only there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvmeof import compiled

MODULE, LIBRARY = "agent.pool.a_hot_one", "a1__mypyc"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout with one hot module, compiled; what a test puts before the finders is gone afterwards."""
    monkeypatch.setattr(compiled, "CHECKOUT", tmp_path)
    monkeypatch.setattr(compiled, "FOLDER", tmp_path / ".cache" / "compiled")
    source = compiled.source_of(MODULE)
    source.parent.mkdir(parents=True)
    source.write_text("COLOUR = 'red'\n")
    made = {}
    for name in (LIBRARY, MODULE):
        file = made_file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"code")
        made[name] = compiled.fingerprint(file)
    manifest(sources={MODULE: compiled.fingerprint(source)}, made=made)
    finders = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = finders


def made_file(name: str) -> Path:
    return compiled.FOLDER / "build.1" / compiled.made_file(name)


def manifest(**changes: object) -> None:
    standard = {"suffix": compiled.SUFFIX, "build": "build.1", "library": LIBRARY, "sources": {}, "made": {}}
    (compiled.FOLDER / compiled.MANIFEST).write_text(json.dumps(standard | changes))


def outcome(wanted: str = "") -> str:
    before = len(sys.meta_path)
    said = compiled._use(wanted)
    assert (len(sys.meta_path) > before) == (said == compiled.COMPILED)
    return said


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("wanted", ["", "yes", "1"])
def test_the_same_sources_are_compiled_ones(wanted: str) -> None:
    assert outcome(wanted) == compiled.COMPILED
    spec = compiled.CompiledFinder(compiled.FOLDER, LIBRARY, [MODULE]).find_spec(MODULE, None)
    assert spec is not None
    assert spec.origin == f"{compiled.FOLDER}/agent/pool/a_hot_one{compiled.SUFFIX}"
    finder = sys.meta_path[0]
    assert isinstance(finder, compiled.CompiledFinder)
    assert finder.find_spec(LIBRARY, None) is not None
    assert finder.find_spec("agent.pool.another", None) is None


@pytest.mark.usefixtures("checkout")
def test_other_times_do_not_matter_where_the_text_is_the_same() -> None:
    os.utime(compiled.source_of(MODULE), (1, 1))
    assert outcome() == compiled.COMPILED


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("text", ["COLOUR = 'tan'\n", "COLOUR = 'blue'\n", ""])
def test_another_source_is_interpreted(text: str) -> None:
    compiled.source_of(MODULE).write_text(text)
    os.utime(compiled.source_of(MODULE), (1, 1))
    assert outcome() == f"interpreted: {MODULE} is not what was compiled (make compiled)"


@pytest.mark.usefixtures("checkout")
def test_a_source_that_is_gone_is_no_error() -> None:
    compiled.source_of(MODULE).unlink()
    assert outcome().startswith("interpreted: ")


@pytest.mark.usefixtures("checkout")
def test_another_python_gets_the_sources() -> None:
    said = json.loads((compiled.FOLDER / compiled.MANIFEST).read_text())
    manifest(**said | {"suffix": ".cpython-39-x86_64-linux-gnu.so"})
    assert outcome() == "interpreted: what was compiled is for another Python"


@pytest.mark.usefixtures("checkout")
def test_what_was_imported_before_cannot_be_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, compiled)
    assert outcome() == f"interpreted: {MODULE} was imported before"


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"library": 1, "sources": 2}', '{"suffix'])
def test_a_manifest_that_says_nothing_is_no_error(text: str) -> None:
    (compiled.FOLDER / compiled.MANIFEST).write_text(text)
    assert outcome().startswith("interpreted: ")


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("name", [LIBRARY, MODULE])
@pytest.mark.parametrize("damage", [b"", b"cod", b"mode", None])
def test_what_was_damaged_is_not_used(name: str, damage: bytes | None) -> None:
    file = made_file(name)
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage)
        os.utime(file, (1, 1))
    assert outcome() == f"interpreted: {file} is damaged (make compiled)"


def test_nothing_there_and_not_wanted(tmp_path: Path) -> None:
    assert outcome(str(tmp_path)) == "interpreted: nothing was compiled (make compiled)"
    assert outcome("no") == "interpreted, as G35_COMPILED says"
