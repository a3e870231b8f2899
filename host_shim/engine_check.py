"""Whether an engine has what it needs for the pool: run by the engine's own interpreter.

    python -m host_shim.engine_check vllm --mount /mnt/g35

`g35 doctor --engine vllm --python PATH` runs it and shows its findings (JSON). A check imports the engine,
loads our connector as the engine does, and moves a small value through the mount. It starts no engine and
needs no GPU. It deletes what it writes, which also expires after a minute.

With `--options` it also looks at the configuration that the user gives the engine, JSON, or YAML where the
interpreter has PyYAML. It finds our part by the name of our connector:

    LMCache   {"module_path": "host_shim.lmcache_l2", "adapter_params": {...}}, or keys `g35.NAME`
    SGLang    {"module_path": "host_shim.sglang_hicache", "g35": {...}}
    vLLM      {"type": "G35Tier", ...}
"""

import argparse
import contextlib
import errno
import importlib
import importlib.metadata
import json
import os
import secrets
import select
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from host_shim.connector_jobs import within
from host_shim.connector_options import ConnectorOptions, HiCacheOptions, PublisherOptions, TierOptions
from host_shim.engine_folders import (
    Found,
    are_flags,
    folders_of,
    judge_folder,
    judge_memory,
    judge_page,
    memory_of,
    read_flags,
    room_of,
    shared_volumes,
)
from host_shim.named_values import NamedValues
from host_shim.pool import Pool

_VALUE_BYTES = 60_000
"""Fits with its label into the smallest slots that a volume can have, 64 KiB."""
MOUNT_SECONDS = 5.0
"""As long as every verb waits for an agent (agent/host_os/hung_agent.py)."""
TTL_SECONDS = 60
WAIT_SECONDS = 30.0
_PREFIX = "g35."
_VLLM_OWN = frozenset({"type", "module_path", "backpressure"})
"""Keys of a secondary tier that vLLM takes for itself."""
FILES_ALONE = frozenset({"llama-cpp", "nixl"})
"""Engines without a connector of ours."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where blocks are to go: the mount, and the volume of /kv that connectors use."""

    mount: str
    volume: str


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """What there is to look at for one engine; `tried` is the version that the tests run with. `package` is
    empty for a program without an interpreter."""

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
    folder = os.path.join(place.mount, "fs")
    if not os.path.isdir(folder):
        return Found("/fs", False, f"no {folder}", "a pool has /fs if it has a volume of kind files")
    return judge_page("/fs", folder, is_direct=True)


def shared_by_path(place: Place) -> Found:
    """A file on /shared, written, read and removed."""
    volumes = shared_volumes(place.mount)
    if not volumes:
        return Found("/shared", False, "no shared volume", 'make one with kind = "shared" (docs/shared.md)')
    return judge_page("/shared", os.path.join(place.mount, "shared", volumes[0]), is_direct=False)


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


class _CheckFailed(Exception):
    """What is wrong, for a person."""


class _Block:
    """What LMCache's adapters touch of a memory object: its bytes."""

    def __init__(self, data: bytes) -> None:
        self.byte_array = memoryview(bytearray(data))

    def get_size(self) -> int:
        return len(self.byte_array)


def lmcache_adapter(place: Place) -> Found:
    """LMCache's plug-in loader makes the L2 adapter; store, look up, load, delete."""
    key = importlib.import_module("lmcache.v1.distributed.api").ObjectKey
    adapters = importlib.import_module("lmcache.v1.distributed.l2_adapters")
    configs = importlib.import_module("lmcache.v1.distributed.l2_adapters.config")
    spec = {
        "type": "plugin",
        "module_path": "host_shim.lmcache_l2",
        "class_name": "G35L2Adapter",
        "adapter_params": {"mount": place.mount, "volume": place.volume, "ttl": TTL_SECONDS},
    }
    given = argparse.Namespace(l2_adapter=[json.dumps(spec)])
    (config,) = configs.parse_args_to_l2_adapters_config(given).adapters
    adapter = adapters.create_l2_adapter(config, l1_memory_desc=None)
    try:
        adapter.set_backend_identity("plugin")
        data, room = os.urandom(_VALUE_BYTES), _Block(bytes(_VALUE_BYTES))
        keys = [key(os.urandom(32), "g35-check", 0)]
        task = adapter.submit_store_task(keys, [_Block(data)])
        _wait(adapter.get_store_event_fd())
        _must(adapter.pop_completed_store_tasks()[task].is_successful(), "a block could not be stored")
        task = adapter.submit_lookup_and_lock_task(keys, {})
        _wait(adapter.get_lookup_and_lock_event_fd())
        _must(adapter.query_lookup_and_lock_result(task).test(0), "a block was stored and is not found")
        adapter.submit_unlock(keys)
        task = adapter.submit_load_task(keys, [room])
        _wait(adapter.get_load_event_fd())
        _must(adapter.query_load_result(task).test(0), "a block is found and cannot be loaded")
        _must(room.byte_array == data, "a WRONG block was loaded")
        adapter.delete(keys)
    finally:
        adapter.close()
    return Found(
        "connector",
        True,
        f"LMCache's loader; {_VALUE_BYTES} bytes stored, found and loaded by the L2 adapter",
    )


def sglang_backend(place: Place) -> Found:
    """SGLang's `dynamic` loader makes the HiCache back-end; set, exists, get."""
    torch = importlib.import_module("torch")
    storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    factory = importlib.import_module("sglang.srt.mem_cache.storage.backend_factory").StorageBackendFactory
    extra = {
        "backend_name": "g35",
        "module_path": "host_shim.sglang_hicache",
        "class_name": "G35HiCache",
        "interface_v1": 1,
        "g35": {"mount": place.mount, "volume": place.volume, "ttl": TTL_SECONDS},
    }
    config = storage.HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="g35-check",
        extra_config=extra,
    )
    backend = factory.create_backend("dynamic", config, None)
    try:
        key = os.urandom(32).hex()
        page = torch.frombuffer(bytearray(os.urandom(_VALUE_BYTES)), dtype=torch.uint8)
        _must(backend.set(key, page), "a page could not be stored")
        _must(backend.batch_exists([key]) == 1, "a page was stored and is not found")
        found = backend.get(key, torch.zeros_like(page))
        _must(found is not None, "a page is found and cannot be loaded")
        _must(torch.equal(found, page), "a WRONG page was loaded")
    finally:
        backend.close()
    return Found(
        "connector",
        True,
        f"SGLang's loader; a page of {_VALUE_BYTES} bytes stored, found and loaded by the back-end",
    )


def _must(well: Any, otherwise: str) -> None:
    if not well:
        raise _CheckFailed(otherwise)


def _wait(event: int) -> None:
    waiting = select.poll()
    waiting.register(event, select.POLLIN)
    _must(waiting.poll(int(WAIT_SECONDS * 1e3)), f"no answer within {WAIT_SECONDS:g} s")
    os.eventfd_read(event)


ENGINES = {
    "llama-cpp": EngineCheck("", "", "", (shared_by_path,)),
    "lmcache": EngineCheck("lmcache", "0.5.6", "lmcache", (blocks_by_key, lmcache_adapter, files_by_path)),
    "nixl": EngineCheck("nixl", "1.5.1", "nixl._api", (nixl_has_posix, files_by_path)),
    "sglang": EngineCheck("sglang", "0.5.23", "sglang", (blocks_by_key, sglang_backend, files_by_path)),
    "vllm": EngineCheck("vllm", "0.33.0", "vllm", (vllm_loads_the_tier, blocks_by_key, files_by_path)),
}


def why_no_pool(mount: str) -> Found | None:
    """What is wrong with the folder itself; None where a pool is mounted there. Waits for MOUNT_SECONDS."""
    detail = f"the agent behind {mount} has not answered for {MOUNT_SECONDS:g} s: it is stopped or it hangs"
    hangs: Found | None = Found(
        "mount", False, detail, "`kill -CONT` its process (`pgrep -af 'agent --config'` names it), or kill it"
    )
    return within(MOUNT_SECONDS, lambda: _wrong_with(mount), hangs)


def _wrong_with(mount: str) -> Found | None:
    try:
        os.stat(os.path.join(mount, ".g35"))
        os.statvfs(mount)  # stats may be answered by what the kernel remembers of an agent that is dead
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


def read_document(given: str) -> Any:
    """The configuration: `given` is the name of a file, or the text itself, JSON or a command line.

    Raises ValueError."""
    if are_flags(given) and not os.path.exists(given):
        return read_flags(given)
    text = given if given.lstrip().startswith(("{", "[")) else _text_in(given)
    try:
        return json.loads(text)
    except ValueError as no_json:
        try:
            yaml = importlib.import_module("yaml")
        except ImportError:
            raise ValueError(f"no JSON ({no_json}), and this interpreter has no PyYAML for YAML") from None
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as no_yaml:
            raise ValueError(f"neither JSON nor YAML: {no_yaml}") from None


def _text_in(file: str) -> str:
    if os.path.isdir(file):
        raise ValueError(f"{file} is a folder; name the file in it that has the configuration")
    try:
        return Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(
            f"there is no file {file}, and a configuration's own text begins with one of {{, [ and --"
        ) from None
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no text in UTF-8") from None


_OPTIONS: dict[str, type[ConnectorOptions]] = {
    "vllm": TierOptions,
    "lmcache": PublisherOptions,
    "sglang": HiCacheOptions,
}


def options_of(engine: str, document: Any) -> list[ConnectorOptions]:
    """The options of each place that names our connector. Raises ValueError for those it does not take."""
    takes = _OPTIONS.get(engine, ConnectorOptions)
    return [takes.from_dict(each) for each in _sections(engine, document)]


def _sections(engine: str, document: Any) -> Iterator[dict[str, Any]]:
    if isinstance(document, list):
        for each in document:
            yield from _sections(engine, each)
        return
    if not isinstance(document, dict):
        return
    found = {str(key): each for key, each in document.items()}
    own = _own_options(engine, found)
    if own is not None:
        yield own
        return
    for each in found.values():
        yield from _sections(engine, each)


def _own_options(engine: str, found: dict[str, Any]) -> dict[str, Any] | None:
    module = str(found.get("module_path", ""))
    if engine == "vllm":
        if found.get("type") != "G35Tier":
            return None
        return {key: each for key, each in found.items() if key not in _VLLM_OWN}
    if engine == "sglang":
        return _mapping(found.get("g35"), "g35") if module == "host_shim.sglang_hicache" else None
    if module == "host_shim.lmcache_l2":
        return _mapping(found.get("adapter_params"), "adapter_params")
    dotted = {key.removeprefix(_PREFIX): each for key, each in found.items() if key.startswith(_PREFIX)}
    return dotted or None


def _mapping(found: Any, name: str) -> dict[str, Any]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f'g35: "{name}" is an object with options, and not {found!r}')
    return found


def options_taken(engine: str, given: str, place: Place) -> Found:
    """Our connector's options in the engine's own configuration: known, of the right kind, of this mount."""
    name, advice = "options", f"docs/engines/{engine}.md lists them"
    try:
        found = options_of(engine, read_document(given))
    except ValueError as wrong:
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


def configuration_findings(engine: str, given: str, place: Place, *, is_mounted: bool) -> Iterator[Found]:
    """Our connector's options, the folders of the engine's own file tiers, and the sizes before both."""
    advice = f"docs/engines/{engine}.md has both ways"
    try:
        document = read_document(given)
    except ValueError as wrong:
        yield Found("options", False, str(wrong), advice)
        return
    folders = folders_of(engine, document)
    if engine in FILES_ALONE and not folders:
        yield Found("options", False, "nothing there names a folder of files", advice)
    ours = engine not in FILES_ALONE and _names_ours(engine, document)
    if engine not in FILES_ALONE and (ours or not folders):
        yield options_taken(engine, given, place)
    if not is_mounted:
        return
    for folder in folders:
        yield from judge_folder(engine, folder, place.mount)
    inside = [each.path for each in folders if _is_within(each.path, place.mount)]
    if inside and ours:
        detail = f"our connector and the files in {inside[0]} store the same blocks in one pool, twice"
        yield Found("tiers", False, detail, "keep one of them", minor=True)
    if inside:
        room, where = room_of(inside[0]), inside[0]
    else:
        room, where = _volume_room(place), f"volume {place.volume}"
    for name, held in memory_of(engine, document):
        if (found := judge_memory(name, held, room, where)) is not None:
            yield found


def _names_ours(engine: str, document: Any) -> bool:
    try:
        return any(True for _ in _sections(engine, document))
    except ValueError:  # which `options_taken` tells
        return True


def stores_files_alone(engine: str, given: str | None) -> bool:
    """Whether a configuration names a folder of files, and no connector of ours."""
    try:
        document = read_document(given or "")
    except ValueError:
        return False
    return bool(folders_of(engine, document)) and not _names_ours(engine, document)


def _is_within(path: str, mount: str) -> bool:
    mount = os.path.abspath(mount)
    return os.path.isabs(path) and os.path.commonpath((os.path.abspath(path), mount)) == mount


def _volume_room(place: Place) -> int:
    """Bytes of the volume of our connector; 0 where nobody says."""
    with contextlib.suppress(OSError, KeyError, TypeError, ValueError), Pool(place.mount) as pool:
        for volume in pool.stats()["volumes"]:
            if volume["name"] == place.volume:
                return int(volume["slots"]) * int(volume["value_bytes"])
    return 0


def examine(engine: str, place: Place, options: str | None = None) -> Iterator[Found]:
    """All findings on one engine; what goes wrong in a check is its finding."""
    wrong = why_no_pool(place.mount)
    if wrong is not None:
        yield wrong
    if options is not None:
        yield from configuration_findings(engine, options, place, is_mounted=wrong is None)
    if wrong is not None:
        return
    known = ENGINES[engine]
    if known.package:
        version = _installed(engine, known)
        yield version
        if not version.good:
            return
    for check in known.checks:
        try:
            yield check(place)
        except Exception as error:
            yield Found(check.__name__.replace("_", " "), False, f"{type(error).__name__}: {error}")


def _installed(engine: str, known: EngineCheck) -> Found:
    """The engine's version in this interpreter, or why there is none."""
    advice = f"--python names an interpreter that has {engine}; `make engines ENGINES={engine}` makes one"
    try:
        version = importlib.metadata.version(known.package)
        importlib.import_module(known.module)
    except importlib.metadata.PackageNotFoundError:
        return Found(engine, False, f"{engine} is not installed for {sys.executable}", advice)
    except Exception as error:
        return Found(engine, False, f"{type(error).__name__}: {error}", advice)
    same = "" if version == known.tried else f"; tried with {known.tried}"
    return Found(engine, True, f"{version} at {sys.executable}{same}")


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
    return 0 if all(found.good or found.minor for found in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
