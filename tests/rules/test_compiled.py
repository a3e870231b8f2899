"""The modules that pyproject.toml wants compiled are there, with nothing that the translator gets wrong."""

from __future__ import annotations

import ast
import importlib

from nvmeof import compiled
from tests.support.rungs.tree import Program, programs

MODULES = compiled.wanted_modules()


def program_of(name: str) -> Program:
    return programs(compiled.CHECKOUT)[f"{name.replace('.', '/')}.py"]


def test_each_is_named_once_and_is_there() -> None:
    assert len(set(MODULES)) == len(MODULES)
    assert [name for name in MODULES if not compiled.source_of(name).exists()] == []


def test_none_has_what_the_translator_gets_wrong() -> None:
    """Coroutines are slower compiled; GeneratorType is not the type of a compiled generator; and an attribute
    `_thread` is a word of C's behind the underscore that the translator puts before it."""
    words = ("async def ", "GeneratorType", "self._thread ")
    assert [(name, word) for name in MODULES for word in words if word in program_of(name).text] == []


def test_constants_are_final() -> None:
    """Of these the translator makes C's; any other global is looked for by its name at each use."""
    assert [f"{name}: {each}" for name in MODULES for each in open_constants(program_of(name))] == []


def open_constants(program: Program) -> list[str]:
    lines = [line for line in program.body if isinstance(line, ast.Assign) and not makes_a_type(line)]
    targets = [line.targets[0] for line in lines]
    named = [name for each in targets for name in (each.elts if isinstance(each, ast.Tuple) else [each])]
    return [each.id for each in named if isinstance(each, ast.Name) and each.id.isupper()]


def test_no_constant_is_a_tuple_with_a_float_unless_it_is_called_a_sequence() -> None:
    """The translator keeps such a tuple unboxed, and takes it for one that was never set at each use."""
    wrong = [
        f"{name}: {line.target.id}"
        for name in MODULES
        for line in program_of(name).body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and isinstance(line.annotation, ast.Name)
        and isinstance(line.value, ast.Tuple)
        and any(isinstance(item, float) for item in getattr(importlib.import_module(name), line.target.id))
    ]
    assert wrong == [], "write Final[Sequence[float]]"


def makes_a_type(line: ast.Assign) -> bool:
    made = line.value.func if isinstance(line.value, ast.Call) else None
    return isinstance(made, ast.Name) and made.id in ("TypeVar", "ParamSpec")


PURE = {"len", "min", "max", "int", "abs"}


def test_no_bound_of_a_slice_is_worked_out_in_the_slice() -> None:
    """Of a memoryview or a bytearray the translator asks for such a bound twice: what it calls runs twice."""
    wrong = [
        f"{name}:{line.lineno}: {ast.unparse(line)}"
        for name in MODULES
        for line in ast.walk(ast.Module(program_of(name).body, []))
        if isinstance(line, ast.Subscript)
        and isinstance(line.slice, ast.Slice)
        and does_something(line.slice)
    ]
    assert wrong == [], "give the bound a name first"


def does_something(bounds: ast.Slice) -> bool:
    for each in ast.walk(bounds):
        if isinstance(each, ast.NamedExpr | ast.Yield | ast.YieldFrom):
            return True
        if isinstance(each, ast.Call) and not (isinstance(each.func, ast.Name) and each.func.id in PURE):
            return True
    return False
