"""What Debian's pyverbs 44 is, found by looking at it: names, calls, values. The stand-in is held to it.

    python -m tests.support.roce.pyverbs_inventory > tests/vectors/pyverbs_44.json

The compiled module shows no signatures, so they are found by calling wrongly: too many arguments, or one that
cannot exist, are refused with words that tell how many there are, before anything is done. Names of arguments
are those of the stand-in, confirmed one by one. Run as a file this is the program that does so: it needs
python3-pyverbs, reads the candidates from standard input and imports nothing of ours.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULES = (
    "addr", "base", "cm_enums", "cmid", "cq", "device", "enums", "flow", "fork", "mem_alloc", "mr", "pd",
    "pyverbs_error", "qp", "spec", "srq", "utils", "wq", "wr", "xrcd",
)  # fmt: skip
"""All but `dmabuf`, of which nothing can be made here."""

RECORDS = (
    "AHAttr", "AsyncEvent", "CQModerationCaps", "ConnParam", "CqInitAttrEx", "DeviceAttr", "ECE", "EthSpec",
    "FlowAttr", "GID", "GIDEntry", "Ipv4ExtSpec", "OpsWr", "PCIAtomicCaps", "PacketPacingCaps", "PollCqAttr",
    "PortAttr", "QPAttr", "QPCap", "QPInitAttr", "QPInitAttrEx", "RSSCaps", "RxHashConf", "SrqAttr",
    "SrqInitAttr", "SrqInitAttrEx", "TMCaps", "TSOCaps", "WC", "WQAttr", "WQInitAttr", "WcTmInfo",
)  # fmt: skip
"""Classes that are nothing but values, and can be made without any."""

WORDS = (
    "cqe_flags_to_str", "cqe_opcode_to_str", "cqe_status_to_str", "guid_format", "guid_to_hex", "inc_rkey",
    "mig_state_to_str", "mtu_to_str", "phys_state_to_str", "port_state_to_str", "qp_type_to_str",
    "rereg_error_to_str", "speed_to_str", "translate_gid_type", "translate_link_layer", "translate_mtu",
    "translate_node_type", "translate_transport_type", "width_to_str",
)  # fmt: skip
"""Functions from a number to words (or a number), shown for the first 140 numbers."""

SYSTEM_PYTHON = Path("/usr/bin/python3")
IMPOSSIBLE = "no_such_argument"
MANY = 40

Json = dict[str, Any]


def arity(call: Callable[..., Any], words: list[str], own: int) -> list[int]:
    """The least and the greatest number of arguments, less `own`, from what `call` says of wrong calls."""
    least, most = 0, MANY
    for arguments, keywords in (((), {IMPOSSIBLE: None}), ((None,) * MANY, {})):
        try:
            call(*arguments, **keywords)
        except TypeError as error:
            said = str(error)
            words.append(said)
            if "takes no arguments" in said:
                return [0, 0]
            if "takes exactly one argument" in said:
                return [1, 1]
            found = re.search(r"takes (at least|at most|exactly) (\d+)", said)
            if found:
                number = int(found[2]) - own
                least = number if found[1] != "at most" else least
                most = number if found[1] != "at least" else most
        except Exception:
            continue
    return [least, most]


def confirmed(call: Callable[..., Any], names: list[str]) -> bool:
    """Whether these are its arguments in this order, as far as it can be told by keywords."""
    probes: list[tuple[int, list[str], str]] = [(0, [*names, IMPOSSIBLE], IMPOSSIBLE)]
    for place, name in enumerate(names):
        # Given by its place and by its name it is given twice; any other name there is not.
        probes.append((place + 1, [*names[place:], IMPOSSIBLE], name))
    for given, keywords, culprit in probes:
        try:
            call(*(None,) * given, **dict.fromkeys(keywords))
        except TypeError as error:
            if f"'{culprit}'" not in str(error) and "must not be None" not in str(error):
                return False
        except Exception:
            continue
    return True


def described(call: Callable[..., Any], candidates: list[str] | None, own: int = 0) -> list[Any]:
    """[least, most, names]; names are null where no keyword is taken, so that they cannot be told."""
    said: list[str] = []
    least, most = arity(call, said, own)
    if any("takes no keyword arguments" in words for words in said) or candidates is None:
        return [least, most, None]
    names = candidates[:most]
    return [least, most, names if confirmed(call, names) else f"not {names}"]


def plain(value: object) -> bool:
    return value is None or isinstance(value, (int, str))


def inventory_of_class(kind: type, candidates: Json) -> Json:
    entry: Json = {"bases": [base.__name__ for base in kind.__mro__[1:-1]], "attributes": [], "calls": {}}
    for name, member in sorted(vars(kind).items()):
        if name == "__init__" or (not name.startswith("__") and callable(member)):
            bound = getattr(kind.__new__(kind), name)
            own = 1 if type(member).__name__ == "cython_function_or_method" else 0
            entry["calls"][name] = described(bound, candidates.get(name), own)
        elif not name.startswith("__") and type(member).__name__ in ("getset_descriptor", "property"):
            entry["attributes"].append(name)
    if kind.__name__ in RECORDS:
        entry["defaults"] = {}
        made = kind()
        for name in entry["attributes"]:
            try:
                value = getattr(made, name)
            except AttributeError:
                continue
            if plain(value):
                entry["defaults"][name] = value
    return entry


def inventory_of_module(module: Any, candidates: Json) -> Json:
    entry: Json = {"enums": {}, "numbers": {}, "classes": {}, "functions": {}, "words": {}}
    for name, value in sorted(vars(module).items()):
        if name.startswith("__"):
            continue
        if isinstance(value, type):
            if hasattr(value, "__members__"):
                entry["enums"][name] = {key: int(member) for key, member in value.__members__.items()}
            elif value.__module__ != module.__name__:
                continue
            elif not issubclass(value, Exception):
                entry["classes"][name] = inventory_of_class(value, candidates.get(name, {}))
            else:
                entry["classes"][name] = {"bases": [base.__name__ for base in value.__mro__[1:]]}
        elif type(value) is int or type(value) is str:
            entry["numbers"][name] = value
        elif callable(value) and getattr(value, "__module__", module.__name__) == module.__name__:
            if type(value).__name__ == "function":
                names = list(inspect.signature(value).parameters)
                entry["functions"][name] = [len(names), len(names), names]
            else:
                entry["functions"][name] = described(value, candidates.get(name))
        if name in WORDS and value.__module__ == module.__name__:
            entry["words"][name] = [value(number) for number in range(140)]
    return {part: names for part, names in entry.items() if names}


def candidates_of(package: str) -> Json:
    """The names of arguments of every call of a pyverbs that is written in Python."""
    result: Json = {}
    for name in MODULES:
        entry = result[name] = {}
        for key, value in vars(importlib.import_module(f"{package}.{name}")).items():
            if isinstance(value, type):
                entry[key] = {
                    call: _names(member)[1:]
                    for base in reversed(value.__mro__)
                    for call, member in vars(base).items()
                    if inspect.isfunction(member)
                }
            elif inspect.isfunction(value):
                entry[key] = _names(value)
    return result


def _names(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind not in kinds]


def debian_has_pyverbs() -> bool:
    """Whether python3-pyverbs is installed for the system's Python."""
    if not SYSTEM_PYTHON.exists():
        return False
    tried = subprocess.run(
        [SYSTEM_PYTHON, "-I", "-c", "import pyverbs.device, pyverbs.cmid"],
        capture_output=True,
        check=False,
        timeout=60,
    )
    return tried.returncode == 0


def inventory() -> Json:
    """The inventory of the installed pyverbs, taken in another process: a wrong guess could end it."""
    taken = subprocess.run(
        [SYSTEM_PYTHON, "-I", __file__],
        input=json.dumps(candidates_of("emulator.roce.pyverbs")),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    result: Json = json.loads(taken.stdout)
    return result


def show(entry: Json) -> str:
    """Readable JSON: one line for a call, an enumeration or a class's small parts."""
    text = json.dumps(entry, indent=1, sort_keys=True)
    for flat in (r"\[[^\[\]{}]*\]", r"\[\s+\d+,\s+\d+,\s+\[[^\[\]]*\]\s+\]"):
        text = re.sub(flat, lambda found: " ".join(found[0].split()), text)
    return text + "\n"


if __name__ == "__main__":
    if sys.flags.isolated:
        given = json.load(sys.stdin)
        json.dump(
            {
                name: inventory_of_module(importlib.import_module(f"pyverbs.{name}"), given[name])
                for name in MODULES
            },
            sys.stdout,
        )
    else:
        sys.stdout.write(show(inventory()))
