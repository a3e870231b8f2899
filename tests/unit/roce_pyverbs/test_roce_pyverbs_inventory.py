"""The stand-in has the modules, classes, names, calls and values of Debian's pyverbs 44."""

from __future__ import annotations

import enum
import importlib
import inspect
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.roce import pyverbs_inventory

VECTORS = Path(__file__).parents[2] / "vectors" / "pyverbs_44.json"


@cache
def inventory() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(VECTORS.read_text())
    return loaded


def module(name: str) -> Any:
    return importlib.import_module(f"emulator.roce.pyverbs.{name}")


def classes() -> Iterator[tuple[str, str]]:
    for name, entry in inventory().items():
        for kind in entry.get("classes", ()):
            yield name, kind


def signature(call: Any, *, own: int) -> list[Any]:
    """[least, most, names] of a call of ours, as the inventory has them."""
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = [p for p in inspect.signature(call).parameters.values() if p.kind not in variadic][own:]
    least = sum(p.default is inspect.Parameter.empty for p in parameters)
    return [least, len(parameters), [p.name for p in parameters]]


def signature_of_method(kind: type, name: str) -> list[Any]:
    """`signature` of a method, without the object that it is called with."""
    return signature(
        getattr(kind, name), own=not isinstance(inspect.getattr_static(kind, name), staticmethod)
    )


def same_call(ours: list[Any], theirs: list[Any]) -> bool:
    return ours[:2] == theirs[:2] and theirs[2] in (None, ours[2])


@pytest.mark.parametrize("name", pyverbs_inventory.MODULES)
def test_enumerations_and_numbers_are_theirs(name: str) -> None:
    entry, ours = inventory()[name], module(name)
    enums = {
        key: {member: int(value) for member, value in kind.__members__.items()}
        for key, kind in vars(ours).items()
        if isinstance(kind, type) and issubclass(kind, enum.IntEnum) and kind is not enum.IntEnum
    }
    if name in ("enums", "cm_enums"):
        assert enums == entry["enums"]
    for members in entry.get("enums", {}).values():
        for member, value in members.items():
            assert getattr(ours, member) == value
    for key, value in entry.get("numbers", {}).items():
        assert getattr(ours, key) == value


@pytest.mark.parametrize("name", pyverbs_inventory.MODULES)
def test_functions_are_theirs(name: str) -> None:
    entry, ours = inventory()[name], module(name)
    wrong = {
        key: (theirs, signature(getattr(ours, key), own=0))
        for key, theirs in entry.get("functions", {}).items()
        if not same_call(signature(getattr(ours, key), own=0), theirs)
    }
    assert not wrong


@pytest.mark.parametrize("name", pyverbs_inventory.MODULES)
def test_words_are_theirs(name: str) -> None:
    ours = module(name)
    for key, theirs in inventory()[name].get("words", {}).items():
        assert [getattr(ours, key)(number) for number in range(len(theirs))] == theirs, key


@pytest.mark.parametrize(("name", "kind"), list(classes()))
def test_a_class_has_their_bases_attributes_and_calls(name: str, kind: str) -> None:
    entry, ours = inventory()[name]["classes"][kind], getattr(module(name), kind)
    assert set(entry["bases"]) <= {base.__name__ for base in ours.__mro__} | {"BaseException"}
    missing = [key for key in entry.get("attributes", ()) if not hasattr(ours, key)]
    assert not missing
    wrong = {
        key: (theirs, signature_of_method(ours, key))
        for key, theirs in entry.get("calls", {}).items()
        if key != "__init__" and not same_call(signature_of_method(ours, key), theirs)
    }
    assert not wrong
    made = entry.get("calls", {}).get("__init__")
    if made is not None:
        assert same_call(signature(ours.__init__, own=1), made), signature(ours.__init__, own=1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name, kind in classes() if "defaults" in inventory()[name]["classes"][kind]],
)
def test_a_record_begins_with_their_values(name: str, kind: str) -> None:
    made = getattr(module(name), kind)()
    for key, value in inventory()[name]["classes"][kind]["defaults"].items():
        assert getattr(made, key) == value, key


def test_attributes_that_do_not_exist_cannot_be_set() -> None:
    """A typing error is found, as with pyverbs' compiled classes."""
    for made in (module("qp").QPCap(), module("cq").WC(), module("device").PortAttr(), module("wr").RecvWR()):
        with pytest.raises(AttributeError):
            made.no_such_attribute = 1


@pytest.mark.skipif(
    not pyverbs_inventory.debian_has_pyverbs(),
    reason="no pyverbs: apt-get install python3-pyverbs",
)
def test_the_inventory_is_that_of_the_installed_pyverbs() -> None:
    assert pyverbs_inventory.inventory() == inventory(), (
        "make it anew: python -m tests.support.roce.pyverbs_inventory > tests/vectors/pyverbs_44.json"
    )
