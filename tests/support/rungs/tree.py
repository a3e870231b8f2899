"""The files of the checkout, for the tests that judge the tree itself."""

from __future__ import annotations

import ast
import gc
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar, cast

ROOMS = ("agent", "emulator", "host_shim", "nvmeof")
Kind = TypeVar("Kind", bound=ast.AST)


def tracked_files(repository: Path) -> list[Path]:
    """Every file that belongs to the repository: committed, or new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=repository,
        capture_output=True,
        check=True,
        timeout=60,
    )
    names = sorted(set(listed.stdout.decode().split("\0")) - {""})
    return [repository / name for name in names if (repository / name).is_file()]


def text_files(repository: Path) -> Iterator[tuple[str, str]]:
    """(path from the root, text) of every file that is text."""
    for path in tracked_files(repository):
        try:
            yield str(path.relative_to(repository)), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


class Program:
    """A file of the four rooms, parsed once for all tests: its text and its nodes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._nodes: dict[type[ast.AST], list[ast.AST]] = {}
        for node in ast.walk(ast.parse(text)):
            self._nodes.setdefault(type(node), []).append(node)

    def nodes(self, kind: type[Kind]) -> list[Kind]:
        """Those of one type, in the order of `ast.walk`."""
        return cast(list[Kind], self._nodes.get(kind, []))

    @property
    def body(self) -> list[ast.stmt]:
        """The statements of the module itself."""
        return self.nodes(ast.Module)[0].body


@contextmanager
def no_collections() -> Iterator[None]:
    """Keep the garbage collector off: its walks through new trees take longer than the parser."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def programs(repository: Path) -> dict[str, Program]:
    """Every Python file of the four rooms by its path from the root."""
    with no_collections():
        found = {
            name: Program(text)
            for name, text in text_files(repository)
            if name.endswith(".py") and name.split("/")[0] in ROOMS
        }
        gc.collect()
        gc.freeze()  # they stay, so that no later collection need walk through them
    return found
