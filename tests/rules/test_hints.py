"""Every error that a verb raises says what to do about it."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.rungs.tree import programs

ERRORS = {"G35Error", "UserError", "ConfigError"}
WITHOUT_A_READER = ("agent/bench/", "agent/remote/path_prober.py", "agent/cli/main.py")
"""The bench is for its developers, errors of the prober reach no user, and `main` passes on what it gets."""


def test_an_error_of_a_verb_has_a_hint(repository: Path) -> None:
    bare = []
    for name, program in programs(repository).items():
        if not name.startswith("agent/") or name.startswith(WITHOUT_A_READER):
            continue
        for node in program.nodes(ast.Call):
            if getattr(node.func, "id", "") not in ERRORS:
                continue
            starred = any(isinstance(each, ast.Starred) for each in node.args)
            told = len(node.args) >= 2 or starred or any(each.arg == "advice" for each in node.keywords)
            if not told:
                bare.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not bare, "an error says what to do about it, in its second argument:\n" + "\n".join(bare)
