"""Whether an engine has what it needs for the pool: run by the engine's own interpreter.

    python -m host_shim.engine_check vllm --mount /mnt/g35

`g35 doctor --engine vllm --python PATH` runs it and shows what it prints, a JSON list of findings. A check
imports the engine, loads our connector the way that the engine does, and moves a small value through the
mount; it starts no engine and needs no GPU. What it writes it deletes again, or it expires after a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import importlib
import importlib.metadata
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from host_shim.connector_jobs import within
from host_shim.engine_check_loads import lmcache_block, sglang_page
from host_shim.engine_options import options_of, read_document
from host_shim.named_values import NamedValues
from host_shim.pool import Pool

_VALUE_BYTES = 60_000
"""Fits with its label into the smallest slots that a volume can have, 64 KiB."""
MOUNT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where blocks are to go: the mount, and the volume of /kv that connectors use."""

    mount: str
    volume: str


@dataclass(frozen=True, slots=True)
class Found:
    """One thing looked at; `advice` says what to do where it is not good."""

    name: str
    good: bool
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """What there is to look at for one engine; `tried` is the version that the tests run with."""

    package: str
    tried: str
    module: str
    checks: tuple[Callable[[Place], Found], ...]


def blocks_by_key(place: Place) -> Found:
    """A value through /kv: stored, found, loaded, compared and deleted."""
    name, data = secrets.token_bytes(32), os.urandom(_VALUE_BYTES)
    what = f"volume {place.volume}"
    with Pool(place.mount) as pool:
        values = NamedValues(pool, place.volume)
        why = values.why_unusable(_VALUE_BYTES)
        if why is not None:
            return Found(what, False, why, "g35 status lists volumes; --volume names another")
        if not values.agent_seen:
            return Found(what, False, f"no agent behind {place.mount}", "g35 status; is --mount right?")
        if values.store([name], [[data]]) != [True]:
            return Found(
                what, False, "a block could not be stored", "g35 status names enclosures that are away"
            )
        room = bytearray(_VALUE_BYTES)
        loaded = values.load([name], [[room]])
        values.forget([name])
        if loaded != [_VALUE_BYTES] or room != data:
            return Found(what, False, "a block that was stored did not come back", "g35 status: miss causes")
    return Found(what, True, f"{_VALUE_BYTES} bytes stored, loaded and deleted")


def files_by_path(place: Place) -> Found:
    """A file on /fs, written and read with O_DIRECT as the engines' file tiers do, then removed."""
    path = os.path.join(place.mount, "fs", f".g35-check-{secrets.token_hex(8)}")
    page = memoryview(bytearray(3 * 4096))
    page = page[-_address_of(page) % 4096 :][:4096]
    page[:] = os.urandom(4096)
    expected = bytes(page)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            os.pwritev(descriptor, [page], 0)
            page[:] = bytes(4096)
            os.preadv(descriptor, [page], 0)
        finally:
            os.close(descriptor)
            os.unlink(path)
    except OSError as refused:
        return Found("/fs", False, str(refused), "a pool has /fs if it has a volume of kind files")
    if page != expected:
        return Found("/fs", False, "a page that was written did not come back", "g35 status")
    return Found("/fs", True, "a page written and read with O_DIRECT")


def _address_of(buffer: memoryview) -> int:
    """The address of a buffer's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def vllm_loads_the_tier(_place: Place) -> Found:
    """vLLM's own factory finds and accepts the tier."""
    factory = importlib.import_module("vllm.v1.kv_offload.tiering.factory").SecondaryTierFactory
    tier = factory.get_tier_class({"type": "G35Tier", "module_path": "host_shim.vllm_tier"})
    return Found("connector", True, f"vLLM's factory loads {tier.__module__}.{tier.__qualname__}")


def nixl_has_posix(_place: Place) -> Found:
    """NIXL's POSIX plug-in is there and starts."""
    api = importlib.import_module("nixl._api")
    agent = api.nixl_agent("g35-check", api.nixl_agent_config(backends=[]))
    if "POSIX" not in agent.get_plugin_list():
        return Found(
            "plug-in", False, "NIXL has no POSIX plug-in", "the wheel nixl-cu12 or nixl-cu13 brings it"
        )
    agent.create_backend("POSIX", {})
    return Found("plug-in", True, "NIXL's POSIX plug-in starts")


def lmcache_adapter(place: Place) -> Found:
    return Found("connector", True, lmcache_block(place.mount, place.volume))


def sglang_backend(place: Place) -> Found:
    return Found("connector", True, sglang_page(place.mount, place.volume))


ENGINES = {
    "lmcache": EngineCheck("lmcache", "0.5.6", "lmcache", (blocks_by_key, lmcache_adapter, files_by_path)),
    "nixl": EngineCheck("nixl", "1.5.1", "nixl._api", (nixl_has_posix, files_by_path)),
    "sglang": EngineCheck("sglang", "0.5.23", "sglang", (blocks_by_key, sglang_backend, files_by_path)),
    "vllm": EngineCheck("vllm", "0.33.0", "vllm", (vllm_loads_the_tier, blocks_by_key, files_by_path)),
}


def why_no_pool(mount: str) -> Found | None:
    """What is wrong with the folder itself; None where a pool is mounted there. Waits for MOUNT_SECONDS."""
    detail = f"{mount} does not answer within {MOUNT_SECONDS:g} s"
    hangs: Found | None = Found(
        "mount", False, detail, "the agent behind it hangs, or is stopped: its log, g35 status"
    )
    return within(MOUNT_SECONDS, lambda: _wrong_with(mount), hangs)


def _wrong_with(mount: str) -> Found | None:
    try:
        os.stat(mount)
        os.stat(os.path.join(mount, ".g35"))
    except OSError as failure:
        if failure.errno == errno.ENOTCONN:
            detail, advice = "is dead: its agent has ended", f"start the agent again, or umount -l {mount}"
        elif failure.errno in (errno.ENOENT, errno.ENOTDIR):
            detail, advice = "is not a g35 mount", "g35 status says where the pool is; --mount names it"
        else:
            detail, advice = f"cannot be used: {failure.strerror}", "try it as the engine's user"
        return Found("mount", False, f"{mount} {detail}", advice)
    with contextlib.suppress(OSError), Pool(mount) as pool:
        pool.alive()  # which hangs where only the session does
    return None


def options_taken(engine: str, given: str, place: Place) -> Found:
    """Our connector's options in the engine's own configuration: known, of the right kind, of this mount."""
    name, advice = "options", f"docs/engines/{engine}.md lists them"
    try:
        found = options_of(engine, read_document(given))
    except (ValueError, OSError) as wrong:
        return Found(name, False, str(wrong), advice)
    if not found:
        return Found(name, False, "nothing there names our connector", advice)
    for each in found:
        for what, named, looked_at in (
            ("mount", os.path.abspath(each.mount), os.path.abspath(place.mount)),
            ("volume", each.volume, place.volume),
        ):
            if named != looked_at:
                return Found(name, False, f"they name the {what} {named}", f"look at it: --{what} {named}")
    return Found(name, True, f"taken: mount {found[0].mount}, volume {found[0].volume}")


def examine(engine: str, place: Place, options: str | None = None) -> Iterator[Found]:
    """All findings on one engine; what goes wrong in a check is its finding."""
    wrong = why_no_pool(place.mount)
    if wrong is not None:
        yield wrong
    if options is not None:
        yield options_taken(engine, options, place)
    if wrong is not None:
        return
    known = ENGINES[engine]
    try:
        version = importlib.metadata.version(known.package)
        importlib.import_module(known.module)
    except Exception as error:
        yield Found(engine, False, f"{type(error).__name__}: {error}", f"an interpreter that has {engine}")
        return
    same = "" if version == known.tried else f"; tried with {known.tried}"
    yield Found(engine, True, f"{version} at {sys.executable}{same}")
    for check in known.checks:
        try:
            yield check(place)
        except Exception as error:
            yield Found(check.__name__.replace("_", " "), False, f"{type(error).__name__}: {error}")


def main(arguments: list[str] | None = None) -> int:
    """Print findings; 0 where all are good. What engines print goes to stderr."""
    parser = argparse.ArgumentParser("python -m host_shim.engine_check")
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("--mount", required=True)
    parser.add_argument("--volume", default="kv")
    parser.add_argument("--options", help="the engine's own configuration: a file, or its text")
    given = parser.parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr):
        findings = list(examine(given.engine, Place(given.mount, given.volume), given.options))
    print(json.dumps([asdict(found) for found in findings]))
    return 0 if all(found.good for found in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
