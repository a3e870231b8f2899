"""Names of the code that documents give are there: functions of docs/a_read_in_order.md with their files,
parts of classes in docs/concurrency.md, modules in every page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

from tests.support.rungs.tree import Program, programs, tracked_files

PAGE = "docs/a_read_in_order.md"
PAIRS_AT_LEAST = 60
_PAIR = re.compile(r"`([\w.]+)`\s+\(`([\w/]+\.py)`\)")
_METHOD = re.compile(r"`([A-Z]\w*\.\w+)`")
_MODULE = re.compile(r"`(\w+(?:/\w+)+\.py)`")
OF_OTHERS = {
    "agent/cli/echo_verb.py",  # of the recipe for a verb
    "tests/unit/agent/cli/test_echo_verb.py",
    "agent/pool/maintenance/NAME.py",
    "tests/v1/kv_offload/tiering/test_fs_tier.py",  # of vLLM
}
"""Modules that pages name and that this tree does not have."""


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


def _bases(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(each).partition("[")[0].rpartition(".")[2] for each in node.bases}


def parts_of_classes(programs: Iterable[Program]) -> set[str]:
    """`Class.part` for methods, declared parts and what methods assign, those of its bases among them."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for node in (each for program in programs for each in program.nodes(ast.ClassDef)):
        found = own.setdefault(node.name, set())
        bases.setdefault(node.name, set()).update(_bases(node) - {node.name})
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute):
                found.add(each.attr)
            elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                found.add(each.target.id)
            elif isinstance(each, ast.FunctionDef):
                found.add(each.name)
    order = TopologicalSorter(bases).static_order()
    for name in (each for each in order if each in own):
        own[name] = own[name].union(*(own.get(base, set()) for base in bases[name]))
    return {f"{name}.{part}" for name, parts in own.items() for part in parts}


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


def test_every_part_of_a_class_in_the_page_of_threads_is_there(repository: Path) -> None:
    page = (repository / "docs/concurrency.md").read_text(encoding="utf-8")
    named = set(_METHOD.findall(page))
    assert len(named) >= 60
    dead = named - parts_of_classes(programs(repository).values())
    assert not dead


def test_every_module_that_a_page_names_is_there(repository: Path) -> None:
    tracked = tracked_files(repository)
    ends = {f"/{path.relative_to(repository)}" for path in tracked}
    dead = [
        f"{page.relative_to(repository)}: {name}"
        for page in tracked
        if page.suffix == ".md" and "decisions" not in page.parts
        for name in _MODULE.findall(page.read_text(encoding="utf-8"))
        if name not in OF_OTHERS and not any(each.endswith(f"/{name}") for each in ends)
    ]
    assert not dead


def test_a_name_that_moved_is_found() -> None:
    programs = {"agent/a.py": {"C", "C.run", "run"}, "agent/b.py": {"other"}}
    assert not dead_names("`C.run` (`a.py`) and `run`\n  (`agent/a.py`)", programs)
    assert dead_names("`other` (`a.py`)", programs) == ["other (a.py)"]
    assert dead_names("`C.gone` does it", programs) == ["C.gone"]
