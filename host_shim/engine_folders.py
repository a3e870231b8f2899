"""Whether an engine's own file tier is pointed at a folder of the pool that serves it.

A configuration is looked at, JSON or YAML of the engine or its command line, for what these engines call the
folder of their files, and the size of the tiers before it:

    vLLM      {"type": "fs", "root_dir": FOLDER}; "cpu_bytes_to_use"
    LMCache   {"type": "fs", "base_path": FOLDER}, remote_storage_plugin.fs.base_path: FOLDER,FOLDER,
              remote_url: fs://HOST:PORT/FOLDER, local_disk: FOLDER; --l1-size-gb, max_local_cpu_size
    SGLang    SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=FOLDER; --hicache-size
    NIXL      DYN_KVBM_DISK_CACHE_DIR=FOLDER, SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR=FOLDER
    llama.cpp --slot-save-path FOLDER

A folder is judged by its place in the mount: /shared is for what hosts share, /fs is one agent's own, and /kv
has no folders. KVBM's is the exception: one file of one process, which it writes over at random. Nothing is
imported of an engine.
"""

import contextlib
import errno
import json
import math
import mmap
import os
import re
import secrets
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

PAGE: Final = 4096
_GIB: Final = 1 << 30
_ENDS: Final = ";&|"
"""Ends of a shell's command."""
_ASSIGNED: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_PLUGIN: Final = re.compile(r"remote_storage_plugin\.fs(\.[^.]+)?\.base_path")
"""LMCache's fs connector, which may have several instances: `fs.NAME`."""
_KVBM: Final = "DYN_KVBM_DISK_CACHE_DIR"
_ENVIRONMENT: Final = {
    "sglang": ("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"),
    "nixl": (_KVBM, "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"),
}
_SIZES: Final[dict[str, dict[str, int]]] = {
    "vllm": {"cpu_bytes_to_use": 1},
    "lmcache": {"l1_size_gb": _GIB, "max_local_cpu_size": _GIB},
    "sglang": {"hicache_size": 10**9},
}
"""By engine: what it calls the size of its tier in memory, and the bytes of one."""


@dataclass(frozen=True, slots=True)
class Found:
    """One thing looked at; `advice` says what to do where it is not good. `minor`: it works all the same."""

    name: str
    good: bool
    detail: str
    advice: str = ""
    minor: bool = False


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of files: as the configuration calls it, and where it is."""

    key: str
    path: str
    is_direct: bool = False
    """O_DIRECT is asked for, or tried."""
    keeps_count: bool = False
    """The engine lists it, and deletes files by itself."""
    is_undirected: bool = False
    """O_DIRECT is asked for, and another option keeps it off."""
    is_own: bool = False
    """One file of one process, without a name, which is written over at random places."""


def are_flags(text: str) -> bool:
    """Whether a text is a command line, and no name of a file."""
    words = text.split()
    if text.lstrip().startswith(("{", "[")):
        return False
    begins = bool(words) and (words[0].startswith("--") or words[0] in ("export", "env"))
    return begins or " --" in text or (bool(words) and bool(_ASSIGNED.match(words[0])))


def read_flags(text: str) -> dict[str, Any]:
    """The flags of a command line, and the variables that are set before it. JSON is read, and a flag that is
    given again makes a list.

    Raises ValueError."""
    found: dict[str, list[Any]] = {}
    waits: list[Any] | None = None
    words = shlex.shlex(text, posix=True, punctuation_chars=_ENDS)
    words.whitespace_split = True
    words.commenters = ""
    for word in words:
        if word and not word.strip(_ENDS):
            waits = None
        elif word.startswith("--"):
            name, is_set, value = word[2:].partition("=")
            values = found.setdefault(name.replace("-", "_"), [])
            values.append(_read(value) if is_set else True)
            waits = None if is_set else values
        elif waits is not None:
            waits[-1] = _read(word)
            waits = None
        elif _ASSIGNED.match(word):
            name, _, value = word.partition("=")
            found[name] = [value]
            with contextlib.suppress(ValueError):
                found[name] = [_read(value)]
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def _read(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        return json.loads(value)
    return value


def _tables(document: Any) -> Iterator[dict[str, Any]]:
    """Every table of a document."""
    if isinstance(document, dict):
        yield {str(key): each for key, each in document.items()}
    if isinstance(document, dict | list):
        for each in document.values() if isinstance(document, dict) else document:
            yield from _tables(each)


def folders_of(engine: str, document: Any) -> list[Folder]:
    found = []
    for table in _tables(document):
        for name in _ENVIRONMENT.get(engine, ()):
            found += [Folder(name, each, is_own=name == _KVBM) for each in _texts(table, name)]
        if engine == "llama-cpp":
            found += [Folder("slot_save_path", each) for each in _texts(table, "slot_save_path")]
        is_fs = table.get("type") == "fs"
        if engine == "vllm" and is_fs:
            found += [Folder("root_dir", each, True) for each in _texts(table, "root_dir")]
        if engine == "lmcache":
            counts = bool(_number(table.get("max_capacity_gb")))
            if is_fs:
                direct = table.get("use_odirect") is True
                found += [Folder("base_path", each, direct, counts) for each in _texts(table, "base_path")]
            found += _of_plugins(table)
            for each in _texts(table, "remote_url"):
                if each.startswith("fs://"):
                    found.append(Folder("remote_url", "/" + each[5:].partition("/")[2]))
            for each in _texts(table, "local_disk"):
                found.append(Folder("local_disk", each.removeprefix("file://")))
    return found


def _of_plugins(table: dict[str, Any]) -> list[Folder]:
    """Those of LMCache's fs connector: several each, where commas are between them."""
    wanted = table.get("fs_connector_use_odirect") is True
    has_effect = wanted and table.get("save_chunk_meta") is False
    names = [name for name in table if _PLUGIN.fullmatch(name)] or ["fs_base_path"]
    return [
        Folder(name, path.strip(), has_effect, is_undirected=wanted and not has_effect)
        for name in names
        for each in _texts(table, name)
        for path in each.split(",")
        if path.strip()
    ]


def _texts(table: dict[str, Any], name: str) -> list[str]:
    value = table.get(name)
    return [value] if isinstance(value, str) and value else []


def _number(value: Any) -> float:
    """0 for what is none."""
    try:
        number = 0.0 if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return number if math.isfinite(number) else 0.0


def memory_of(engine: str, document: Any) -> list[tuple[str, int]]:
    """The tiers in memory that are asked before the pool: the name of each, and its bytes."""
    sizes = _SIZES.get(engine, {})
    return [
        (name, int(_number(table[name]) * unit))
        for table in _tables(document)
        for name, unit in sizes.items()
        if _number(table.get(name)) > 0
    ]


def judge_folder(engine: str, folder: Folder, mount: str) -> Iterator[Found]:
    """What is wrong with a folder of a mount that answers; or that nothing is."""
    what, mount = folder.key, os.path.abspath(mount)
    shared = shared_volumes(mount)
    if folder.is_own:
        shared, instead = [], "a pool has /fs if it has a volume of kind files (docs/engines/nixl.md)"
        if os.path.isdir(os.path.join(mount, "fs")):
            instead = f"{what}: {os.path.join(mount, 'fs')}"
    elif shared:
        instead = f"{what}: {os.path.join(mount, 'shared', shared[0], engine)}"
    else:
        instead = 'make a volume with kind = "shared" (docs/shared.md)'
    if not os.path.isabs(folder.path):
        detail = f"{folder.path} is relative: it begins wherever the engine is started"
        yield Found(what, False, detail, f"for the pool, {instead}")
        return
    path = os.path.abspath(folder.path)
    parts = os.path.relpath(path, mount).split(os.sep)
    if parts[0] == os.pardir:
        yield Found(what, False, f"{path} is not in the mount {mount}", f"for the pool, {instead}")
        return
    face = parts[0]
    if face == "fs" and engine != "nixl" and shared:
        detail = f"{path} is on /fs, which is one agent's own: other hosts do not see it, and it fills up"
        yield Found(what, False, detail, instead)
        return
    if face == "shared" and folder.is_own:
        detail = (
            f"{path} is on /shared, for files that hosts share. This engine's file is one process's own, and "
            "written over at random: parts of it may be evicted, and too many make EFBIG"
        )
        yield Found(what, False, detail, instead)
        return
    if face == "shared" and (len(parts) < 2 or parts[1] not in shared):
        named = f"the shared volume {parts[1]} is not there" if len(parts) > 1 else "no volume is named"
        yield Found(what, False, f"{path}: {named}", instead)
        return
    if face not in ("fs", "shared"):
        where = "the mount itself" if face == os.curdir else f"/{face}, which has no folders"
        yield Found(what, False, f"{path} is on {where}", instead)
        return
    if folder.keeps_count:
        advice = "leave max_capacity_gb at 0: the pool evicts by itself"
        yield Found(what, False, f"LMCache lists {path} and evicts there", advice, minor=True)
    if folder.is_undirected:
        advice = "save_chunk_meta: false, or no fs_connector_use_odirect"
        yield Found(what, False, "save_chunk_meta keeps O_DIRECT off", advice, minor=True)
    yield judge_page(what, path, is_direct=folder.is_direct)


def shared_volumes(mount: str) -> list[str]:
    """Names of the volumes of /shared of a mount."""
    try:
        return sorted(os.listdir(os.path.join(mount, "shared")))
    except OSError:
        return []


def judge_page(what: str, path: str, *, is_direct: bool) -> Found:
    """A page written and read in the folder, or in the nearest one above it that is there."""
    there = path
    while not os.path.isdir(there):
        there = os.path.dirname(there)
    name = os.path.join(there, f".g35-check-{secrets.token_hex(8)}")
    page = memoryview(mmap.mmap(-1, PAGE))
    page[:] = expected = os.urandom(PAGE)
    flags = os.O_DIRECT if is_direct else 0
    try:
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600)
            try:
                os.pwritev(descriptor, [page], 0)
            finally:
                os.close(descriptor)
            page[:] = bytes(PAGE)
            descriptor = os.open(name, os.O_RDONLY | flags)
            try:
                os.preadv(descriptor, [page], 0)
            finally:
                os.close(descriptor)
        finally:
            if os.path.exists(name):
                os.unlink(name)
        sizes = os.statvfs(there).f_bsize
    except OSError as refused:
        advice = "g35 status: is an enclosure away, or is the volume full?"
        if refused.errno in (errno.EACCES, errno.EPERM):
            advice = f"run this as the engine's user, and give it the folder: chown USER {there}"
        return Found(what, False, f"{there}: {refused.strerror}", advice)
    if bytes(page) != expected:
        return Found(what, False, f"a page written to {there} did not come back", "g35 status: miss causes")
    how = ""
    if is_direct:
        how = (
            f" with O_DIRECT. Blocks want a multiple of {sizes} bytes; what a block has follows from the "
            "model, and these options do not tell it"
        )
    return Found(what, True, f"a page written and read in {there}{how}")


def judge_memory(name: str, held: int, room: int, where: str) -> Found | None:
    """A tier in memory that holds more than the pool has room for answers all that the pool could."""
    if held < room or not room:
        return None
    return Found(
        name,
        False,
        f"{held >> 20} MiB in memory, {room >> 20} MiB in {where}: this host never asks the pool for what it "
        "stored itself",
        f"a smaller {name}, or a larger volume; other hosts still read what this one stores",
        minor=True,
    )


def room_of(path: str) -> int:
    """Bytes of the volume behind a folder, or 0."""
    there = os.path.abspath(path)
    while not os.path.isdir(there):
        there = os.path.dirname(there)
    try:
        told = os.statvfs(there)
    except OSError:
        return 0
    return told.f_blocks * told.f_frsize
