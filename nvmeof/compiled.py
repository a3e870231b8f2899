"""The hot modules as machine code, where that was made of exactly these sources.

`.ci/compile` translates the modules that pyproject.toml names (`[tool.g35] compiled`) to C with mypyc,
compiles them into a folder in `.cache/compiled`, and names it in a manifest. `use` has Python import those
modules from there. It is all or nothing, because the translation lays out the classes of all those modules
together. Where one source or the interpreter differs, the sources are run: slower, with the same outcome.

A file is unchanged where its size and time of change are, or else its SHA-256. G35_COMPILED=no leaves
everything interpreted; G35_COMPILED=FOLDER looks there.
"""

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

CHECKOUT = Path(__file__).parents[1]
FOLDER = CHECKOUT / ".cache" / "compiled"
MANIFEST = "manifest.json"
SWITCH = "G35_COMPILED"
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
"""How the name of an extension ends: it tells interpreter, version, processor and C library."""

COMPILED = "compiled"
state = "not asked for"
"""The outcome of `use`, for a person: COMPILED, or why not."""


class CompiledFinder(importlib.abc.MetaPathFinder):
    """Finds the compiled modules, and the library that has the code of them all."""

    def __init__(self, folder: Path, library: str, modules: Sequence[str]) -> None:
        self._paths = {name: folder / made_file(name) for name in (library, *modules)}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        found = self._paths.get(fullname)
        return None if found is None else importlib.util.spec_from_file_location(fullname, found)


def made_file(name: str) -> str:
    """Where in the folder the extension of that name is: a compiled module, or the library of them all."""
    return name.replace(".", "/") + SUFFIX


def fingerprint(file: Path) -> dict[str, int | str]:
    """The note of a file in the manifest. Raises OSError."""
    facts = file.stat()
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"size": facts.st_size, "mtime_ns": facts.st_mtime_ns, "sha256": digest}


def is_unchanged(file: Path, noted: Mapping[str, object]) -> bool:
    try:
        facts = file.stat()
        if facts.st_size != noted["size"]:
            return False
        if facts.st_mtime_ns == noted["mtime_ns"]:
            return True
        return hashlib.sha256(file.read_bytes()).hexdigest() == noted["sha256"]
    except OSError:
        return False


def source_of(module: str) -> Path:
    return CHECKOUT / (module.replace(".", "/") + ".py")


def wanted_modules() -> list[str]:
    """The modules that pyproject.toml of the checkout names, in its order. For who compiles them."""
    rooms: dict[str, list[str]] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["g35"][
        "compiled"
    ]
    return [f"{room}.{name}" for room, names in rooms.items() for name in names]


def use() -> None:
    """Import the hot modules compiled from now on, where that can be; `state` has the outcome."""
    global state
    state = _use(os.environ.get(SWITCH, ""))


def _use(wanted: str) -> str:
    if wanted in ("no", "0"):
        return f"interpreted, as {SWITCH} says"
    folder = FOLDER if wanted in ("", "yes", "1") else Path(wanted)
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        build = folder / manifest["build"]
        library, sources = str(manifest["library"]), dict(manifest["sources"])
        made = {name: dict(manifest["made"][name]) for name in (library, *sources)}
        if manifest["suffix"] != SUFFIX:
            return "interpreted: what was compiled is for another Python"
    except FileNotFoundError:
        return "interpreted: nothing was compiled (make compiled)"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"interpreted: {folder / MANIFEST} cannot be read ({type(error).__name__})"
    for module, noted in sources.items():
        if not is_unchanged(source_of(module), noted):
            return f"interpreted: {module} is not what was compiled (make compiled)"
    if already := [module for module in sources if module in sys.modules]:
        return f"interpreted: {already[0]} was imported before"
    for name, noted in made.items():
        if not is_unchanged(build / made_file(name), noted):
            return f"interpreted: {build / made_file(name)} is damaged (make compiled)"
    sys.meta_path.insert(0, CompiledFinder(build, library, list(sources)))
    return COMPILED
