"""Which regular expressions can take more than linear time: those whose repeats can divide one run.

A pattern is unfolded into the sequences of characters that it can match (a loop as two turns of itself). Two
repeats of a sequence that match a common character, with nothing between them that must match another one,
divide a run of n such characters in n ways, and a matcher that goes back tries all of them. A repeat that is
possessive, or in an atomic group, is never gone back into.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MANY = 64
"""Repeats of so many at the most divide little."""
PATHS_MAX = 4096
_BEYOND = 256
"""Stands for every character outside of Latin-1."""
_ALL = frozenset(range(_BEYOND + 1))
_CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d", sre.CATEGORY_NOT_DIGIT: r"\D", sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S", sre.CATEGORY_WORD: r"\w", sre.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip


@dataclass(frozen=True)
class _Part:
    """One place of a sequence: what matches there, whether it must, and whether it can match many."""

    characters: frozenset[int]
    is_needed: bool
    is_many: bool = False
    goes_back: bool = True


_Path = tuple[_Part, ...]


def overlap(pattern: str | bytes, flags: int = 0, *, is_searched: bool = False) -> str:
    """What is wrong with a pattern, empty where it is linear.

    `is_searched`: it is tried at every place of a text, so a repeat at its beginning may begin anywhere.
    """
    parsed = parser.parse(pattern, flags)
    for items in (parsed, *_lookarounds(parsed)):
        for path in _paths(items, flags):
            why = _divided(path) or (_searched(path) if is_searched and items is parsed else "")
            if why:
                return why
    return _alternatives(parsed, flags, within=False)


def _divided(path: _Path) -> str:
    for at, first in enumerate(path):
        if not first.is_many or not first.goes_back:
            continue
        for second in path[at + 1 :]:
            common = first.characters & second.characters
            if common and second.is_many:
                return f"two repeats may divide a run of {_shown(common)}"
            if second.is_needed and not common:
                break
    return ""


def _lookarounds(items: Any) -> Iterator[Any]:
    """What is looked for ahead or behind; each is a pattern of its own."""
    for code, argument in items:
        if code in (sre.ASSERT, sre.ASSERT_NOT):
            yield argument[1]
        for inner in _inside(code, argument):
            yield from _lookarounds(inner)


def _inside(code: Any, argument: Any) -> Sequence[Any]:
    if code is sre.BRANCH:
        return list(argument[1])
    if code is sre.SUBPATTERN:
        return [argument[3]]
    if code in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        return [argument[2]]
    if code is sre.ATOMIC_GROUP:
        return [argument]
    return [argument[1]] if code in (sre.ASSERT, sre.ASSERT_NOT) else []


def _searched(path: _Path) -> str:
    """A repeat that begins a path, with something needed behind it that it cannot hold itself."""
    for at, part in enumerate(path):
        if part.is_many:
            if any(each.is_needed for each in path[at + 1 :]):
                return f"a search begins at each place of a run of {_shown(part.characters)}"
            return ""
        if part.is_needed:
            return ""
    return ""


def _shown(characters: Iterable[int]) -> str:
    return "".join(chr(each) for each in sorted(characters)[:8] if each < _BEYOND)


def _paths(items: Any, flags: int) -> list[_Path]:
    """The sequences that a parsed pattern can match."""
    paths: list[_Path] = [()]
    for code, argument in items:
        paths = [before + after for before, after in product(paths, _of_one(code, argument, flags))]
        if len(paths) > PATHS_MAX:
            raise ValueError("a pattern with too many ways to judge")
    return paths


def _of_one(code: Any, argument: Any, flags: int) -> list[_Path]:
    if code in (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY):
        return [(_Part(_characters(code, argument, flags), True),)]
    if code is sre.SUBPATTERN:
        return _paths(argument[3], flags)
    if code is sre.ATOMIC_GROUP:
        return [tuple(replace(part, goes_back=False) for part in path) for path in _paths(argument, flags)]
    if code is sre.BRANCH:
        return [path for each in argument[1] for path in _paths(each, flags)]
    if code in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        return _repeated(*argument, flags=flags, goes_back=code is not sre.POSSESSIVE_REPEAT)
    if code in (sre.AT, sre.GROUPREF, sre.ASSERT, sre.ASSERT_NOT):
        return [()]
    raise ValueError(f"a pattern with {code}, which is not known here")


def _repeated(least: int, most: int, body: Any, *, flags: int, goes_back: bool) -> list[_Path]:
    inner = _paths(body, flags)
    is_many = most == sre.MAXREPEAT or most > MANY
    if all(len(path) == 1 and path[0].is_needed and not path[0].is_many for path in inner):
        return [
            (_Part(path[0].characters, least > 0, is_many, goes_back and path[0].goes_back),)
            for path in inner
        ]
    if not goes_back:
        inner = [tuple(replace(part, goes_back=False) for part in path) for path in inner]
    found = list(inner)
    if is_many:
        # In a loop whatever varies can divide a run with its next turn.
        turns = [
            tuple(replace(each, is_many=each.is_many or not each.is_needed) for each in path)
            for path in inner
        ]
        found += [a + b for a, b in product(turns, turns)]
    elif most > 1:
        found += [a + b for a, b in product(inner, inner)]
    return [*found, ()] if not least else found


def _characters(code: Any, argument: Any, flags: int) -> frozenset[int]:
    if code is sre.ANY:
        return _ALL if flags & re.DOTALL else _ALL - {ord("\n")}
    if code is sre.LITERAL:
        found = {min(argument, _BEYOND)}
    elif code is sre.NOT_LITERAL:
        return _ALL - {argument}
    else:
        found = set()
        is_negated = argument[0][0] is sre.NEGATE
        for kind, each in argument:
            if kind is sre.LITERAL:
                found.add(min(each, _BEYOND))
            elif kind is sre.RANGE:
                found.update(range(min(each[0], _BEYOND), min(each[1], _BEYOND) + 1))
            elif kind is sre.CATEGORY:
                test = re.compile(_CATEGORIES[each])
                found.update(n for n in range(_BEYOND) if test.match(chr(n)))
                found |= {_BEYOND}
        if is_negated:
            return _ALL - (found - {_BEYOND})
    if flags & re.IGNORECASE:
        found |= {ord(chr(n).swapcase()[0]) for n in found if n < 128}
    return frozenset(found)


def _alternatives(items: Any, flags: int, *, within: bool) -> str:
    """Alternatives of a loop that can match the same: each turn has two ways."""
    for code, argument in items:
        loops = within
        if code is sre.BRANCH and within:
            ways = [_paths(each, flags) for each in argument[1]]
            pairs = [(x, y) for one, other in combinations(ways, 2) for x, y in product(one, other)]
            if any(not _differ(x, y) for x, y in pairs):
                return "alternatives of a loop may match the same"
        elif code in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            loops = within or argument[1] == sre.MAXREPEAT or argument[1] > MANY
        for each in _inside(code, argument):
            if why := _alternatives(each, flags, within=loops):
                return why
    return ""


def _differ(one: _Path, other: _Path) -> bool:
    """Whether two ways part at a place that both reach in one manner only."""
    for x, y in zip(one, other, strict=False):
        if not (x.characters & y.characters):
            return x.is_needed and y.is_needed
        if x.is_many or y.is_many or not (x.is_needed and y.is_needed):
            return False
    return False
