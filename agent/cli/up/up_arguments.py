"""What the words of `g35 up` may be. Everything is checked before anything is made.

A word that is wrong raises `typer.BadParameter` (exit code 2), which names the option and what is allowed.
"""

from __future__ import annotations

import os
import tomllib
import uuid
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import typer

from agent.cli.up.layout import AgentOptions, Layout, agent_toml
from agent.config.configuration import parse_configuration, parse_size
from agent.errors import ConfigError
from agent.inline.root_keys import RootKey
from agent.inline.secrets import SecretKey
from agent.pool.map.document import VALUE_BYTES_MAX, VALUE_BYTES_MIN, PoolMap, plan_pool
from agent.pool.map.superblock import MAP_BYTES_MAX
from agent.sizes import typed_size
from agent.telemetry.listen_address import parse_listen_address

NAMESPACES_MAX = 4096
"""In one pool; docs/limits.md."""
DRIVE_BYTES_MAX = 1 << 50
_MIB = 1 << 20
_NO_FOLDER = Path("/nonexistent")
"""For a configuration that is only planned with."""


class TransportName(StrEnum):
    """The transports that an enclosure here can serve: NVMe/TCP, or NVMe/RDMA over emulated NICs."""

    TCP = "tcp"
    RDMA = "rdma"


def check_captures(transport: TransportName) -> None:
    """Refuse `--pcap` where there is no emulated NIC whose packets could be captured."""
    if transport is not TransportName.RDMA:
        raise typer.BadParameter(
            "captures are of emulated RDMA NICs: it wants --transport rdma", param_hint="--pcap"
        )


class Suite(StrEnum):
    """Cipher suites of a new pool; the names are those of `agent.inline.suites`."""

    GCM = "aes-256-gcm"
    XTS = "aes-256-xts+crc64"
    PLAIN = "plain+crc64"


class StayAwakeName(StrEnum):
    """Which requests keep processors from sleeping (agent/host_os/cpu_idle.py)."""

    NEVER = "never"
    SHORT = "short"
    AUTO = "auto"
    ALWAYS = "always"


class DoorName(StrEnum):
    """How the kernel's FUSE requests are served."""

    FUSE = "fuse"
    PYFUSE3 = "pyfuse3"


class Write(StrEnum):
    """When a put into `kv` is acknowledged."""

    THROUGH = "through"
    BACK = "back"
    SECOND_USE = "second-use"


class Media(StrEnum):
    """Where the drives of the enclosures keep their bytes."""

    FILES = "files"
    MEMORY = "memory"


def _size_between(least: int, most: int) -> Callable[[str], str]:
    def check(text: str) -> str:
        try:
            size = int(cast(int, parse_size(text)))
        except (ValueError, OverflowError):
            size = -1
        if not least <= size <= most:
            raise typer.BadParameter(
                f"{text!r} is no size from {typed_size(least)} to {typed_size(most)}; "
                "write for example 64K, 1M or 2.5G"
            )
        if size % 4096:
            raise typer.BadParameter(f"{text!r} is no multiple of 4K")
        return text

    return check


value_size_option = _size_between(VALUE_BYTES_MIN, VALUE_BYTES_MAX)
drive_size_option = _size_between(_MIB, DRIVE_BYTES_MAX)
memory_option = _size_between(0, 1 << 44)


def token_option(text: str) -> str:
    """What a token weighs; no multiple of anything."""
    try:
        size = int(cast(int, parse_size(text)))
    except (ValueError, OverflowError):
        size = -1
    if not 0 <= size <= VALUE_BYTES_MAX:
        raise typer.BadParameter(
            f"{text!r} is no size up to {typed_size(VALUE_BYTES_MAX)}; write for example 128K"
        )
    return text


def metrics_option(text: str) -> str:
    """Empty for none, or a loopback address and a port."""
    if text:
        try:
            parse_listen_address(text)
        except ConfigError as error:
            raise typer.BadParameter(f"{error}; {error.advice}") from None
    return text


def check_gate(prefill_tokens_per_s: float, bytes_per_token: str) -> None:
    """Refuse one of the gate's two figures without the other."""
    if (prefill_tokens_per_s > 0) != (parse_size(bytes_per_token) != 0):
        raise typer.BadParameter(
            "--prefill-tokens-per-s and --bytes-per-token go together", param_hint="--bytes-per-token"
        )


def check_room(enclosures: int, drives: int, drive_size: str, options: AgentOptions) -> None:
    """Refuse drives on which the pool of `options` could not be laid out."""
    count = enclosures * drives
    if count > NAMESPACES_MAX:
        raise typer.BadParameter(
            f"{enclosures} enclosures of {drives} drives are {count} namespaces; "
            f"{NAMESPACES_MAX} is the most",
            param_hint="--drives",
        )
    size = int(cast(int, parse_size(drive_size)))
    try:
        planned = _planned(count, size, options)
    except ConfigError as error:
        least = _least_size(count, options)
        raise typer.BadParameter(
            f"drives of {drive_size} have no room for the volumes: {error}; with these options the least is "
            f"{typed_size(least)}",
            param_hint="--drive-size",
        ) from None
    if len(planned.encode()) > MAP_BYTES_MAX:
        raise typer.BadParameter(
            f"the pool map of {count} namespaces would be longer than {MAP_BYTES_MAX} bytes; take fewer",
            param_hint="--drives",
        )


def _planned(count: int, size: int, options: AgentOptions) -> PoolMap:
    """The map of the pool that a format would make; thrown away."""
    nowhere: dict[str, Any] = {"address": "127.0.0.1", "port": 4420, "nqn": "nqn.2014-08.org.nvmexpress:none"}
    text = agent_toml(Layout(_NO_FOLDER), _NO_FOLDER, [nowhere], options)
    configuration = parse_configuration(tomllib.loads(text), "the configuration")
    wishes = [each.wish() for each in configuration.volumes]
    nobodys = RootKey(SecretKey(bytes(32)), "no key")
    return plan_pool([(uuid.uuid4().bytes, size) for _ in range(count)], wishes, nobodys)


def _least_size(count: int, options: AgentOptions) -> int:
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


def _fits(count: int, size: int, options: AgentOptions) -> bool:
    try:
        _planned(count, size, options)
    except ConfigError:
        return False
    return True


def agent_cpus(transport: str) -> tuple[int, ...]:
    """One of two where the agent's NIC is emulated; empty, which is all, everywhere else.

    The work of an emulated NIC is done under one interpreter lock, so the agent's threads gain little from a
    second processor, and hand that lock to each other sooner on one. And on two processors that are busy
    Linux looks for an idle one no more when it wakes a thread: it waited half a millisecond behind
    the enclosure while the other processor had nothing to do (docs/decisions/0036-processors-of-an-agent.md).
    """
    allowed = sorted(os.sched_getaffinity(0))
    return tuple(allowed[:1]) if transport == "rdma" and len(allowed) == 2 else ()
