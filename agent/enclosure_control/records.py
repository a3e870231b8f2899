"""The state of an enclosure as records, and their decoding from answers of SPDK's RPC. No I/O.

Decoding ignores members that g35 does not use. A member in use that is missing or mistyped is RpcAnswerError
and nothing else. Names have one spelling: transports in capitals, NGUIDs as 32 lower-case digits, UUIDs as
`uuid` prints them.
"""

from __future__ import annotations

import ipaddress
import json
import re
import uuid
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Final, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
)

from agent.enclosure_control.rpc_errors import RpcAnswerError

T = TypeVar("T")

_PCI_SHORT: Final = re.compile(r"[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

DISCOVERY_NQN: Final = "nqn.2014-08.org.nvmexpress.discovery"

_NUMBER_MAX: Final = (1 << 64) - 1
"""The largest number in an answer: counters of an enclosure have 64 bits."""

_KINDS: Final = {
    "Malloc disk": "malloc", "Null disk": "null", "AIO disk": "aio", "NVMe disk": "nvme",
    "Logical Volume": "lvol",
}  # fmt: skip


def canonical_address(text: str) -> str:
    """An IP address in its shortest spelling; a PCI address (of domain 0000 by default) in lower case."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        lower = text.lower()
        return f"0000:{lower}" if _PCI_SHORT.fullmatch(lower) else lower


def canonical_uuid(text: str) -> str:
    """A UUID in the usual spelling; empty stays empty. Raises RpcAnswerError."""
    if not text:
        return ""
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise RpcAnswerError(f"{text!r} is no UUID") from None


def canonical_nguid(text: str) -> str:
    """An NGUID as 32 lower-case digits; empty for zeros."""
    digits = text.replace("-", "").lower()
    return "" if not digits.strip("0") else digits


def _users(references: int) -> int | None:
    # The keyring itself counts as one.
    return references - 1 if references > 0 else None


def _sum(errors: object) -> object:
    return sum(each for each in errors.values() if type(each) is int) if isinstance(errors, dict) else errors


_Number = Annotated[int, Field(ge=-_NUMBER_MAX, le=_NUMBER_MAX)]
_Ticks = Annotated[float, Field(ge=-_NUMBER_MAX, le=_NUMBER_MAX)]
_Capitals = Annotated[str, AfterValidator(str.upper)]
_Uuid = Annotated[str, AfterValidator(canonical_uuid)]
_NONE_IF_EMPTY = AfterValidator(lambda value: value or None)


@dataclass(frozen=True, slots=True)
class Bdev:
    """A block device. `kind` is malloc, null, aio, nvme, lvol or other; only aio has a `filename`."""

    name: str
    kind: Annotated[
        str,
        Field(validation_alias="product_name", default=""),
        AfterValidator(lambda name: _KINDS.get(name, "other")),
    ]
    block_size: _Number
    block_count: Annotated[_Number, Field(validation_alias="num_blocks")]
    uuid: _Uuid = ""
    aliases: tuple[str, ...] = ()
    filename: Annotated[
        str | None, Field(validation_alias=AliasPath("driver_specific", "aio", "filename")), _NONE_IF_EMPTY
    ] = None

    @property
    def size(self) -> int:
        """Bytes."""
        return self.block_size * self.block_count


@dataclass(frozen=True, slots=True)
class NvmeController:
    """A controller to which the enclosure is a host; its bdevs are `name` + n + nsid."""

    name: str
    address: Annotated[Address | None, Field(validation_alias=AliasPath("ctrlrs", 0, "trid"))] = None
    subnqn: Annotated[str, Field(validation_alias=AliasPath("ctrlrs", 0, "trid", "subnqn"))] = ""


@dataclass(frozen=True, slots=True)
class LvolStore:
    """A store of logical volumes on a bdev."""

    name: str
    base_bdev: str
    cluster_size: _Number
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the keyring. Not every version tells `path`. A `removed` key cannot be given to a host.

    `users`: the number of hosts (once for each subsystem) and NVMe controllers that have it; None: not told.
    A host or controller whose key was removed fails at its next authentication.
    """

    name: str
    path: Annotated[str | None, _NONE_IF_EMPTY] = None
    removed: bool = False
    users: Annotated[_Number | None, Field(validation_alias="refcnt"), AfterValidator(_users)] = None


@dataclass(frozen=True, slots=True)
class Transport:
    """A transport and its numeric options."""

    trtype: _Capitals
    options: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """The address of a listener or a controller: TCP, RDMA or PCIE; IPv4 or IPv6."""

    trtype: _Capitals
    traddr: Annotated[str, AfterValidator(canonical_address)]
    trsvcid: str = ""
    adrfam: Annotated[str, AfterValidator(lambda said: "IPv6" if said.lower() == "ipv6" else "IPv4")] = "IPv4"

    def __str__(self) -> str:
        host = f"[{self.traddr}]" if ":" in self.traddr and self.trsvcid else self.traddr
        return f"{self.trtype} {host}:{self.trsvcid}" if self.trsvcid else f"{self.trtype} {host}"

    def params(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace of a subsystem. `nguid` is 32 digits, `uuid` with dashes; empty where there is none."""

    nsid: _Number
    bdev: Annotated[str, Field(validation_alias=AliasChoices("bdev_name", "name"), default="")]
    nguid: Annotated[str, AfterValidator(canonical_nguid)] = ""
    uuid: _Uuid = ""


@dataclass(frozen=True, slots=True)
class Host:
    """A host that may connect, and the names of two keys: the host's own, and the controller's for it."""

    nqn: str
    key: Annotated[str | None, Field(validation_alias="dhchap_key"), _NONE_IF_EMPTY] = None
    controller_key: Annotated[str | None, Field(validation_alias="dhchap_ctrlr_key"), _NONE_IF_EMPTY] = None


@dataclass(frozen=True, slots=True)
class Subsystem:
    """An NVM subsystem. `max_namespaces` None: there is no such bound."""

    nqn: str
    serial: Annotated[str, Field(validation_alias="serial_number")] = ""
    model: Annotated[str, Field(validation_alias="model_number")] = ""
    max_namespaces: Annotated[_Number | None, _NONE_IF_EMPTY] = None
    allow_any_host: bool = False
    namespaces: tuple[Namespace, ...] = ()
    listeners: Annotated[tuple[Address, ...], Field(validation_alias="listen_addresses")] = ()
    hosts: tuple[Host, ...] = ()


@dataclass(frozen=True, slots=True)
class BdevStats:
    """Counters of a bdev since it was made. Latencies are sums, in seconds."""

    name: str
    read_commands: Annotated[_Number, Field(validation_alias="num_read_ops")]
    read_bytes: Annotated[_Number, Field(validation_alias="bytes_read")]
    write_commands: Annotated[_Number, Field(validation_alias="num_write_ops")]
    write_bytes: Annotated[_Number, Field(validation_alias="bytes_written")]
    read_latency_s: Annotated[_Ticks, Field(validation_alias="read_latency_ticks", default=0.0)]
    write_latency_s: Annotated[_Ticks, Field(validation_alias="write_latency_ticks", default=0.0)]
    failed_commands: Annotated[_Number, Field(validation_alias="io_error", default=0), BeforeValidator(_sum)]


@dataclass(frozen=True, slots=True)
class _Stats:
    tick_rate: _Number = 0
    bdevs: tuple[BdevStats, ...] = ()


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of one kind of enclosure that a plan depends on. The defaults are those of SPDK's RPC.

    `max_namespaces`: the largest namespace id of a subsystem without a bound of its own; None: no bound.
    `transports_are_made`: a listener needs an existing transport.
    `any_or_named`: a subsystem lets any host in or has named ones, never both.
    `hosts_are_shared`: a host has its keys for all subsystems, and keeps them while one of them names it.
    """

    max_namespaces: int | None = 32
    transports_are_made: bool = True
    any_or_named: bool = False
    hosts_are_shared: bool = False


@dataclass(frozen=True, slots=True)
class Present:
    """The state from which a plan starts. The discovery subsystem is not in `subsystems`."""

    transports: tuple[Transport, ...] = ()
    keys: tuple[Key, ...] = ()
    bdevs: tuple[Bdev, ...] = ()
    nvme: tuple[NvmeController, ...] = ()
    lvol_stores: tuple[LvolStore, ...] = ()
    subsystems: tuple[Subsystem, ...] = ()
    traits: Traits = Traits()

    def bdev(self, name: str) -> Bdev | None:
        """By its name, its UUID or an alias (`STORE/NAME` of a logical volume)."""
        for each in self.bdevs:
            if name == each.name or name in each.aliases:
                return each
        return next((each for each in self.bdevs if each.uuid and name.lower() == each.uuid), None)

    def bdev_names(self) -> list[str]:
        """All names and aliases that are no UUIDs."""
        return [name for each in self.bdevs for name in (each.name, *each.aliases) if name != each.uuid]

    def keys_of_hosts(self) -> list[str | None]:
        """Names of keys, once for each host of each subsystem that has one."""
        hosts = [host for each in self.subsystems for host in each.hosts]
        return [key for host in hosts for key in (host.key, host.controller_key)]

    def name_of(self, name: str) -> str:
        """The own name of a bdev that `name` may call by another; `name` itself where there is none."""
        found = self.bdev(name)
        return name if found is None else found.name


def decoded(method: str, answer: Any, record: type[T]) -> T:
    """An answer as `record` has it. Members that are null count as missing. Raises RpcAnswerError."""
    try:
        return TypeAdapter(record).validate_json(json.dumps(_without_nulls(answer)), strict=True)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "the answer"
        raise RpcAnswerError(f"{method}: {where} is missing, of another kind or out of range") from None
    except RecursionError:
        raise RpcAnswerError(f"{method}: the answer is nested too deeply") from None


def _without_nulls(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_without_nulls(each) for each in answer]
    if isinstance(answer, dict):
        return {name: _without_nulls(value) for name, value in answer.items() if value is not None}
    return answer


def transports(method: str, answer: Any) -> tuple[Transport, ...]:
    """The transports of an answer. Every member that is a number is an option."""
    found = decoded(method, answer, tuple[Transport, ...])
    options = [
        decoded(
            method, {name: value for name, value in said.items() if type(value) is int}, dict[str, _Number]
        )
        for said in answer
    ]
    return tuple(
        replace(each, options=tuple(sorted(of.items()))) for each, of in zip(found, options, strict=True)
    )


def bdev_stats(method: str, answer: Any) -> tuple[BdevStats, ...]:
    """The counters of an answer, which has its times in ticks."""
    found = decoded(method, answer, _Stats)
    rate = found.tick_rate or 1
    return tuple(
        replace(each, read_latency_s=each.read_latency_s / rate, write_latency_s=each.write_latency_s / rate)
        for each in found.bdevs
    )
