"""No regular expression of the product takes more than linear time, whatever it is given."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.telemetry.http_connection import LINEAR
from tests.support.rungs.pattern_overlap import overlap
from tests.support.rungs.tree import Program, programs

_SEARCHES = {"search", "sub", "subn", "split", "findall", "finditer"}
_FUNCTIONS = {"compile", "match", "fullmatch", *_SEARCHES}
ENGINES = (
    "host_shim/vllm_tier.py",
    "host_shim/lmcache_l2.py",
    "host_shim/lmcache_storage.py",
    "host_shim/sglang_hicache.py",
)
"""They import an engine, which is not here."""


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+", r"(a*)*b", r"(a|a)*b", r"(?:ab|[a-c]b)*d", r"(a?b?)*c", r"a+a+b", r"a*[ab]*c", r".*a.*b",
        r"[a-z]+(?:-?[a-z]+)*x", r"x:[ \t]*([!-~ ]*?)[ \t]*", r"[ \t]*(?:v+)?[ \t]*", r"5(?:;.*)?[ \t]*\r\n",
        r"^\s*(\d+)\s*([KMG]?)\s*$", r"(?:aa?)*b", r"a{0,200}a{0,200}b", r"(?=a*a*b)x", r"\s*\d*\s*x",
        r"(?i:[a-z]+)[A-Z]*!",
    ],
)  # fmt: skip
def test_a_pattern_that_is_not_linear_is_found(pattern: str) -> None:
    assert overlap(pattern, re.IGNORECASE if "?i" in pattern else 0)


@pytest.mark.parametrize(
    "pattern",
    [
        r"a+b+", r"[a-z]+(?:-[a-z]+)*", r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?", r"\d{1,15}-\d{0,15}", r"a*+a*b",
        r"[ \t]*(?:text|html)[ \t]*(?:;[ \t]*(?:q=[01]|v=\d)[ \t]*)*", r"(?:[^ ]+ )*x", r"(?>a*)a",
        r"a+ba+",
    ],
)  # fmt: skip
def test_a_pattern_that_is_linear_is_let_through(pattern: str) -> None:
    assert not overlap(pattern)


def test_a_search_for_a_run_with_something_behind_it_is_found() -> None:
    assert overlap(r"[ \t]+$x", is_searched=True)
    assert not overlap(r"[ \t]+", is_searched=True)
    assert not overlap(r"%(?![0-9])", is_searched=True)


def _used(name: str, program: Program) -> Iterator[tuple[str | bytes, int, bool]]:
    """The patterns of a module: each with its flags, and whether it is searched for."""
    calls = [each for each in program.nodes(ast.Call) if isinstance(each.func, ast.Attribute)]
    searched = {
        ast.unparse(each.func.value)
        for each in calls
        if isinstance(each.func, ast.Attribute) and each.func.attr in _SEARCHES
    }
    names: dict[ast.expr | None, str] = {
        **{each.value: ast.unparse(each.targets[0]) for each in program.nodes(ast.Assign)},
        **{each.value: ast.unparse(each.target) for each in program.nodes(ast.AnnAssign)},
    }
    calls = [each for each in calls if ast.unparse(each.func) in {f"re.{name}" for name in _FUNCTIONS}]
    if calls:
        known = vars(importlib.import_module(name.removesuffix(".py").replace("/", ".")))
    for call in calls:
        flags = [eval(ast.unparse(each), dict(known)) for each in call.args[1:] if "re." in ast.unparse(each)]
        function = ast.unparse(call.func).removeprefix("re.")
        is_searched = function in _SEARCHES or names.get(call, "") in searched
        yield _said(call.args[0], known), int(flags[0]) if flags else 0, is_searched


def _said(argument: ast.expr, known: dict[str, Any]) -> str | bytes:
    """A pattern's text; what is put into it only when it runs stands as the letter `x`."""
    if isinstance(argument, ast.JoinedStr):
        parts = []
        for each in argument.values:
            if isinstance(each, ast.Constant):
                parts.append(str(each.value))
            else:
                assert isinstance(each, ast.FormattedValue)
                name = ast.unparse(each.value)
                parts.append(str(known.get(name, "x")))
        return "".join(parts)
    found = eval(ast.unparse(argument), dict(known))
    assert isinstance(found, str | bytes)
    return found


def test_every_pattern_of_the_product_is_linear(repository: Path) -> None:
    wrong, count = [], 0
    for name, program in programs(repository).items():
        if "re." not in program.text or name in ENGINES:
            continue
        for pattern, flags, is_searched in _used(name, program):
            count += 1
            if why := overlap(pattern, flags, is_searched=is_searched):
                wrong.append(f"{name}: {pattern!r}: {why}")
    assert count > 30
    assert not wrong, "\n".join(wrong)


def test_what_h11_reads_lines_with_is_linear() -> None:
    from h11 import _readers

    for name in dir(_readers):
        pattern = getattr(_readers, name)
        if isinstance(pattern, re.Pattern) and name != "status_line_re":  # a client's
            assert not overlap(pattern.pattern.decode()), name
    assert all(getattr(_readers, name) is pattern for name, pattern in LINEAR.items())
