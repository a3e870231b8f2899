"""What the translator takes for settled by an earlier test is not asked again.

mypy holds that an attribute which was None in a test is None until this function assigns to it, whatever is
called, waited for or done by other threads meanwhile, and mypyc makes a cast of that: where another thread
has put something there, reading it is a TypeError, in compiled code alone. A method that returns the
attribute reads it anew. The same with a name that two except clauses give to exceptions of different types.

A name that holds an int or a member of an IntEnum becomes a plain int where two ways meet, and `isinstance`
finds no member any more. So no annotation joins the two.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from nvmeof import compiled
from tests.support.rungs.tree import Program, programs

Known = dict[str, bool]
"""Attributes, as they are written, and whether a test has shown them to be None."""


def _nones(test: ast.expr, outcome: bool) -> Known:
    """What is known where `test` came out so."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is outcome:
        return {name: none for value in test.values for name, none in _nones(value, outcome).items()}
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _nones(test.operand, not outcome)
    if isinstance(test, ast.Compare) and isinstance(test.left, ast.Attribute):
        (operation, right) = (test.ops[0], test.comparators[0])
        if (
            isinstance(operation, ast.Is | ast.IsNot)
            and isinstance(right, ast.Constant)
            and right.value is None
        ):
            return {ast.unparse(test.left): isinstance(operation, ast.Is) is outcome}
    return {}


def _assigned(nodes: Sequence[ast.AST]) -> set[str]:
    return {
        ast.unparse(node)
        for root in nodes
        for node in ast.walk(root)
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store | ast.Del)
    }


def _without(known: Known, assigned: set[str]) -> Known:
    return {
        name: none
        for name, none in known.items()
        if not any(name == one or name.startswith(f"{one}.") for one in assigned)
    }


def _in_expression(expression: ast.AST, known: Known) -> Iterator[str]:
    asked = {
        name for node in ast.walk(expression) if isinstance(node, ast.Compare) for name in _nones(node, True)
    }
    for node in ast.walk(expression):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = ast.unparse(node)
            if name in known and (known[name] or name in asked):
                yield f"line {node.lineno}: {name}"


def _ends(block: Sequence[ast.stmt]) -> bool:
    return bool(block) and isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _in_block(block: Sequence[ast.stmt], known: Known) -> Iterator[str]:
    known = dict(known)
    for statement in block:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(statement, ast.If):
            yield from _in_expression(statement.test, known)
            yield from _in_block(statement.body, known | _nones(statement.test, True))
            yield from _in_block(statement.orelse, known | _nones(statement.test, False))
            known = _without(known, _assigned([statement]))
            if _ends(statement.body):
                known |= _without(_nones(statement.test, False), _assigned(statement.orelse))
        elif isinstance(statement, ast.While | ast.For):
            known = _without(known, _assigned([statement]))
            if isinstance(statement, ast.While):
                yield from _in_expression(statement.test, known)
                yield from _in_block(statement.body, known | _nones(statement.test, True))
            else:
                yield from _in_expression(statement.iter, known)
                yield from _in_block(statement.body, known)
            yield from _in_block(statement.orelse, known)
        elif isinstance(statement, ast.With):
            for item in statement.items:
                yield from _in_expression(item.context_expr, known)
            yield from _in_block(statement.body, known)
            known = _without(known, _assigned([statement]))
        elif isinstance(statement, ast.Try):
            yield from _in_block(statement.body, known)
            known = _without(known, _assigned([statement]))
            for part in [
                *(handler.body for handler in statement.handlers),
                statement.orelse,
                statement.finalbody,
            ]:
                yield from _in_block(part, known)
        else:
            yield from _in_expression(statement, known)
            known = _without(known, _assigned([statement]))


def asked_again(program: Program) -> list[str]:
    """Where a function reads an attribute that it has found to be None, or tests one anew."""
    return [found for function in program.nodes(ast.FunctionDef) for found in _in_block(function.body, {})]


def named_twice(program: Program) -> list[str]:
    """Names that except clauses of one function give to exceptions of different types."""
    found = []
    for function in program.nodes(ast.FunctionDef) if program.nodes(ast.ExceptHandler) else []:
        types: dict[str, set[str]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.ExceptHandler) and node.name and node.type is not None:
                types.setdefault(node.name, set()).add(ast.unparse(node.type))
        found += [f"{function.name}: {name}" for name, each in types.items() if len(each) > 1]
    return found


def joined_with_int(program: Program, enumerations: set[str]) -> list[str]:
    """Unions of int and an enumeration that is an int."""
    found = []
    for node in program.nodes(ast.BinOp):
        if isinstance(node.op, ast.BitOr):
            words = {word.strip() for word in ast.unparse(node).split("|")}
            found += [ast.unparse(node)] if "int" in words and words & enumerations else []
    return found


def int_enumerations(program: Program) -> set[str]:
    """Names of the classes of a module that derive from IntEnum or IntFlag."""
    return {
        node.name
        for node in program.nodes(ast.ClassDef)
        if any(ast.unparse(base).rpartition(".")[2] in ("IntEnum", "IntFlag") for base in node.bases)
    }


def hot_programs(repository: Path) -> dict[str, Program]:
    """Those that are compiled, by the name of the module."""
    return {name: programs(repository)[f"{name.replace('.', '/')}.py"] for name in compiled.wanted_modules()}


def test_no_union_of_int_and_an_enumeration_that_is_one(repository: Path) -> None:
    enumerations = set().union(*map(int_enumerations, programs(repository).values()))
    hot = hot_programs(repository)
    assert [(name, found) for name in hot for found in joined_with_int(hot[name], enumerations)] == []


def test_nothing_settled_is_asked_again(repository: Path) -> None:
    hot = hot_programs(repository)
    assert [(name, found) for name in hot for found in asked_again(hot[name])] == []


def test_a_name_is_for_exceptions_of_one_type(repository: Path) -> None:
    hot = hot_programs(repository)
    assert [(name, found) for name in hot for found in named_twice(hot[name])] == []


def test_the_rule_finds_what_it_is_for() -> None:
    found = asked_again(
        Program(
            """
def read(self):
    if self._open is None:
        with self._lock:
            if self._open is None:
                return 1
    return self._open

def begin(self):
    if self.cause is not None:
        return 0
    wait()
    return self.cause

def charge(self):
    if self._bucket is not None:
        with self._lock:
            if self._bucket is not None:
                self._bucket.charge()

def right(self):
    if self._open is None:
        self._open = make()
    if self._open is not None and self._open.length:
        return self._open
    if self.cause is None:
        return self._read()
    return self.cause
"""
        )
    )
    assert found == ["line 5: self._open", "line 13: self.cause", "line 18: self._bucket"]
    source = "def put():\n try:\n  pass\n except A as no:\n  pass\n except B as no:\n  pass\n"
    assert named_twice(Program(source)) == ["put: no"]
    program = Program(
        "class A(enum.IntEnum):\n ...\n\ndef read() -> Steps[int | A]: ...\ndef right() -> int | None: ...\n"
    )
    assert joined_with_int(program, int_enumerations(program)) == ["int | A"]
