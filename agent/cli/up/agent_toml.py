"""The configuration that `g35 up` writes for its agent, and whether its pool has room on the drives."""

import json
import os
import tomllib
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import typer

from agent.cli.up.layout import Layout
from agent.cli.up.up_arguments import Transport, UpOptions
from agent.config.configuration import parse_configuration, parse_size
from agent.errors import ConfigError
from agent.fs.doors.mounting import may_mount
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.map.document import PoolMap, plan_pool, set_size
from agent.pool.map.superblock import MAP_BYTES_MAX
from agent.sizes import typed_size

NAMESPACES_MAX = 4096
"""In one pool; docs/limits.md."""
_MIB = 1 << 20
_NO_FOLDER = Path("/nonexistent")
"""For a configuration that is only planned with."""
REBALANCE = "64M"
"""Bytes a second that move to drives which `g35 pool add` took in: no other agent would move them."""
SHARED_SHARE = 0.2
"""Of a new pool's room, for /shared; /kv has so much less."""
S3_BUCKET = "kvcache"
SPILL_BYTES = "64G"
"""What `--spill` allows in its folder."""
S3_BUCKET_ADDRESS = "127.0.0.2"
"""A second address on loopback, at which clients that want the bucket in the host find that bucket."""
DIRECTORY_FRESH_MS = 1000
"""With one agent on the pool, what it remembers of a directory is what is there; another one that somebody
sets on it all the same is seen as late as this."""


def _bracketed(enclosure: dict[str, Any]) -> str:
    address = str(enclosure["address"])
    return f"[{address}]" if ":" in address else address


def agent_toml(
    layout: Layout,
    mount: Path,
    ready: Sequence[dict[str, Any]],
    options: UpOptions,
    s3_port: int = 0,
    query_port: int = 0,
    local_port: int = 0,
    s3_address: str = "",
) -> str:
    """The agent's configuration for the enclosures that announced themselves in `ready`. `s3_address`: of the
    S3 door's RDMA device."""
    sections: list[tuple[str, dict[str, Any]]] = [
        ("[agent]", {
            "mount": str(mount),
            "state": str(layout.agent_state),
            "key_file": str(layout.key),
            "door": options.door,
            # Others may enter a mount of root's; anybody else's takes a permission of the machine's for that.
            "allow_other": may_mount(),
            "workers": options.workers,
            "processes": options.processes,
            "read_deadline_ms": options.deadline_ms,
            "directory_fresh_ms": 0 if options.shared else DIRECTORY_FRESH_MS,
            "metrics": options.metrics,
            "cpus": agent_cpus(options.transport),
            "stay_awake": options.stay_awake,
        }),
        ("[prestage]", {"memory": options.prestage_memory, "learn": options.learn}),
        ("[fabric]", {"verbs_provider": "emulator.roce.pyverbs"}),
        ("[pool]", {"allow_plain": options.suite == "plain+crc64", "rebalance": REBALANCE}),
    ]  # fmt: skip
    if options.virtiofs:
        sections.append(("[virtiofs]", {"socket": str(layout.virtiofs_socket)}))
    if options.s3:
        listen = [f"127.0.0.1:{s3_port}", f"{S3_BUCKET_ADDRESS}:{s3_port}"]
        credentials = str(layout.s3_credentials)
        tenant = {"tenant": "default", "credentials": credentials, "buckets": [S3_BUCKET]}
        door = {"listen": listen, "hosts": [f"{S3_BUCKET_ADDRESS}={S3_BUCKET}"]}
        # Clients here come from an address of loopback, and their emulated devices have others.
        rdma = {"rdma": s3_address, "rdma_clients": ["127.0.0.0/8"]} if s3_address else {}
        sections.append(("[s3]", door | rdma))
        sections.append(("[[s3.tenants]]", tenant))
    if options.query:
        sections.append(("[query]", {"listen": [f"127.0.0.1:{query_port}"]}))
        sections.append(("[[query.tenants]]", {"tenant": "default", "tokens": str(layout.query_tokens)}))
    if options.spill is not None:
        place = {"folder": str(options.spill.absolute()), "max_bytes": SPILL_BYTES, "volumes": ["kv"]}
        sections.append(("[[spill]]", place))
    if options.write != "through" or options.prefill_tokens_per_s:
        names = ("write", "prefill_tokens_per_s", "bytes_per_token")
        policy = {name: getattr(options, name) for name in names}
        sections.append(("[[policies]]", {"volume": "kv", **policy}))
    for number, enclosure in enumerate(ready):
        others = [f"{_bracketed(enclosure)}:{port}" for port in enclosure.get("ports", [])[1:]]
        where = {name: enclosure[name] for name in ("address", "port", "nqn")}
        section = {"name": f"jbof-{number}", "transport": options.transport, **where}
        sections.append(("[[enclosures]]", section | ({"paths": others} if others else {})))
    if options.local is not None and local_port:
        path = options.local.absolute()
        is_made = path.exists() and not (path.is_file() and path.stat().st_size == 0)
        size = "0" if is_made else options.drive_size
        local = {"path": str(path), "size": size, "export": f"127.0.0.1:{local_port}"}
        sections.append(("[[local]]", local))
    volumes = [("kv", "kv", options.value_size, 0.75 if options.files else 1.0)]
    if options.files:
        volumes += [("files-small", "files", "64K", 0.04), ("files-large", "files", "1M", 0.18)]
        if has_shared(options):
            volumes[0] = ("kv", "kv", options.value_size, 0.75 - SHARED_SHARE)
            volumes.append(("shared", "shared", options.chunk_size, SHARED_SHARE))
    for name, kind, value_size, share in volumes:
        section = {"name": name, "kind": kind, "value_size": value_size}
        if kind == "kv" and options.spill is not None:
            section |= {"marks": 340}
        sections.append(("[[volumes]]", section | {"suite": options.suite, "share": share}))
    # A string, a number, a truth value and a list of them are written in TOML as they are in JSON.
    written = [
        "\n".join([header, *(f"{name} = {json.dumps(value)}" for name, value in section.items())])
        for header, section in sections
    ]
    return "\n\n".join(["# Written by `g35 up` at every start; edit nothing here.", *written]) + "\n"


def has_shared(options: UpOptions) -> bool:
    """Whether a new pool gets a volume for /shared: with /fs, where its share is a set of chunks or more, and
    what is left to /kv is a set of each drive."""
    drive, value_bytes, chunk_bytes = (
        int(cast(int, parse_size(each)))
        for each in (options.drive_size, options.value_size, options.chunk_size)
    )
    has_room = options.namespaces * drive * SHARED_SHARE >= set_size(chunk_bytes)
    return options.files and has_room and drive * (0.75 - SHARED_SHARE) >= set_size(value_bytes)


def agent_cpus(transport: Transport) -> tuple[int, ...]:
    """One of two where the agent's NIC is emulated; empty, which is all, everywhere else.

    The work of an emulated NIC is done under one interpreter lock, so the agent's threads gain little from a
    second processor, and hand that lock to each other sooner on one. And on two processors that are busy
    Linux looks for an idle one no more when it wakes a thread: it waited half a millisecond behind
    the enclosure while the other processor had nothing to do (docs/decisions/0036-processors-of-an-agent.md).
    """
    allowed = sorted(os.sched_getaffinity(0))
    return tuple(allowed[:1]) if transport == "rdma" and len(allowed) == 2 else ()


def check_room(options: UpOptions) -> None:
    """Refuse drives on which the pool of `options` could not be laid out."""
    count = options.namespaces
    if count > NAMESPACES_MAX:
        raise typer.BadParameter(
            f"{options.enclosures} enclosures of {options.drives} drives are {count} namespaces; "
            f"{NAMESPACES_MAX} is the most",
            param_hint="--drives",
        )
    size = int(cast(int, parse_size(options.drive_size)))
    try:
        planned = _planned(count, size, options)
    except ConfigError as error:
        least = _least_size(count, options)
        raise typer.BadParameter(
            f"drives of {options.drive_size} have no room for the volumes: {error}; with these options the "
            f"least is {typed_size(least)}",
            param_hint="--drive-size",
        ) from None
    if options.chunk_size != UpOptions.chunk_size and options.files and not has_shared(options):
        raise typer.BadParameter(
            f"{count} drives of {options.drive_size} have no room for /shared in chunks of "
            f"{options.chunk_size}: take smaller chunks, or larger drives",
            param_hint="--chunk-size",
        )
    if len(planned.encode()) > MAP_BYTES_MAX:
        raise typer.BadParameter(
            f"the pool map of {count} namespaces would be longer than {MAP_BYTES_MAX} bytes; take fewer",
            param_hint="--drives",
        )


def _planned(count: int, size: int, options: UpOptions) -> PoolMap:
    """The map of the pool that a format would make; thrown away."""
    nowhere: dict[str, Any] = {"address": "127.0.0.1", "port": 4420, "nqn": "nqn.2014-08.org.nvmexpress:none"}
    text = agent_toml(Layout(_NO_FOLDER), _NO_FOLDER, [nowhere], options)
    configuration = parse_configuration(tomllib.loads(text), "the configuration")
    wishes = [each.wish() for each in configuration.volumes]
    nobodys = RootKey(SecretKey(bytes(32)), "no key")
    return plan_pool([(uuid.uuid4().bytes, size) for _ in range(count)], wishes, nobodys)


def _least_size(count: int, options: UpOptions) -> int:
    """The smallest drives, in whole MiB, that the pool fits on: found by trying, for it depends on all."""
    too_small, enough = 0, 1
    while not _fits(count, enough * _MIB, options):
        too_small, enough = enough, 2 * enough
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        if _fits(count, middle * _MIB, options):
            enough = middle
        else:
            too_small = middle
    return enough * _MIB


def _fits(count: int, size: int, options: UpOptions) -> bool:
    try:
        _planned(count, size, options)
    except ConfigError:
        return False
    return True
