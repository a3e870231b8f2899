"""The modules that pyproject.toml wants compiled are there; where they were compiled, those are what runs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys

import pytest

from nvmeof import compiled

MODULES = compiled.wanted_modules()


def test_each_is_named_once_and_is_there() -> None:
    assert len(set(MODULES)) == len(MODULES)
    assert [name for name in MODULES if not compiled.source_of(name).exists()] == []


@pytest.mark.parametrize("name", MODULES)
def test_none_has_what_the_translator_gets_wrong(name: str) -> None:
    """Coroutines are slower compiled; GeneratorType is not the type of a compiled generator; and an attribute
    `_thread` is a word of C's behind the underscore that the translator puts before it."""
    text = compiled.source_of(name).read_text()
    assert "async def " not in text
    assert "GeneratorType" not in text
    assert "self._thread " not in text


@pytest.mark.parametrize("name", MODULES)
def test_constants_are_final(name: str) -> None:
    """Of these the translator makes C's; any other global is looked for by its name at each use."""
    body = ast.parse(compiled.source_of(name).read_text()).body
    targets = [line.targets[0] for line in body if isinstance(line, ast.Assign) and not makes_a_type(line)]
    named = [name for each in targets for name in (each.elts if isinstance(each, ast.Tuple) else [each])]
    assert [each.id for each in named if isinstance(each, ast.Name) and each.id.isupper()] == []


@pytest.mark.parametrize("name", MODULES)
def test_no_constant_is_a_tuple_with_a_float_unless_it_is_called_a_sequence(name: str) -> None:
    """The translator keeps such a tuple unboxed, and takes it for one that was never set at each use."""
    body = ast.parse(compiled.source_of(name).read_text()).body
    named = [
        line.target.id
        for line in body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and isinstance(line.annotation, ast.Name)
        and isinstance(line.value, ast.Tuple)
    ]
    module = importlib.import_module(name)
    wrong = [each for each in named if any(isinstance(item, float) for item in getattr(module, each))]
    assert wrong == [], "write Final[Sequence[float]]"


def makes_a_type(line: ast.Assign) -> bool:
    made = line.value.func if isinstance(line.value, ast.Call) else None
    return isinstance(made, ast.Name) and made.id in ("TypeVar", "ParamSpec")


def test_a_program_runs_what_was_compiled() -> None:
    ask = [sys.executable, compiled.CHECKOUT / ".ci" / "compile", "--check"]
    if subprocess.run(ask, stderr=subprocess.PIPE, check=False).returncode:
        pytest.skip("nothing was compiled of these sources (make compiled)")
    script = (
        "import importlib, sys; from nvmeof import compiled; assert compiled.state == 'compiled';"
        "files = [importlib.import_module(name).__file__ for name in sys.argv[1:]];"
        "assert all(file.endswith('.so') for file in files), files"
    )
    subprocess.run([sys.executable, "-c", script, *MODULES], check=True, cwd=compiled.CHECKOUT)
