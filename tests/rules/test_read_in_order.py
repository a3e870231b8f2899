"""docs/a_read_in_order.md names functions with their files: each is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support.rungs.tree import Program, programs

PAGE = "docs/a_read_in_order.md"
PAIRS_AT_LEAST = 60
_PAIR = re.compile(r"`([\w.]+)`\s+\(`([\w/]+\.py)`\)")
_METHOD = re.compile(r"`([A-Z]\w*\.\w+)`")


def defined_in(program: Program) -> set[str]:
    """Its classes and functions, and those with the class around them: `Volume`, `Volume.load`, `load`; and
    what a class assigns to itself, `Volume.cache`."""
    names = {each.name for kind in (ast.FunctionDef, ast.AsyncFunctionDef) for each in program.nodes(kind)}
    for node in program.nodes(ast.ClassDef):
        names |= {node.name, *(f"{node.name}.{getattr(each, 'name', '')}" for each in node.body)}
        names |= {
            f"{node.name}.{each.attr}"
            for each in ast.walk(node)
            if isinstance(each, ast.Attribute)
            and isinstance(each.value, ast.Name)
            and each.value.id == "self"
        }
    return names


def dead_names(page: str, programs: dict[str, set[str]]) -> list[str]:
    """Pairs and methods of the page that no file has. A path may lack its first folders."""
    dead = [
        f"{name} ({path})"
        for name, path in _PAIR.findall(page)
        if not any(name in programs[each] for each in programs if f"/{each}".endswith(f"/{path}"))
    ]
    everywhere = set().union(*programs.values())
    return dead + [name for name in _METHOD.findall(page) if name not in everywhere]


def test_every_name_of_the_page_is_in_its_file(repository: Path) -> None:
    defined = {path: defined_in(program) for path, program in programs(repository).items()}
    page = (repository / PAGE).read_text(encoding="utf-8")
    assert len(_PAIR.findall(page)) >= PAIRS_AT_LEAST
    assert not dead_names(page, defined)


def test_a_name_that_moved_is_found() -> None:
    programs = {"agent/a.py": {"C", "C.run", "run"}, "agent/b.py": {"other"}}
    assert not dead_names("`C.run` (`a.py`) and `run`\n  (`agent/a.py`)", programs)
    assert dead_names("`other` (`a.py`)", programs) == ["other (a.py)"]
    assert dead_names("`C.gone` does it", programs) == ["C.gone"]
