"""The state of an enclosure as records, and their decoding from answers of SPDK's RPC. No I/O.

Decoding ignores members that g35 does not use. A member in use that is missing or mistyped is RpcAnswerError
and nothing else. Names have one spelling: transports in capitals, NGUIDs as 32 lower-case digits, UUIDs as
`uuid` prints them.
"""

from __future__ import annotations

import ipaddress
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

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


@dataclass(frozen=True, slots=True)
class Bdev:
    """A block device. `kind` is malloc, null, aio, nvme, lvol or other; only aio has a `filename`."""

    name: str
    kind: str
    block_size: int
    block_count: int
    uuid: str = ""
    aliases: tuple[str, ...] = ()
    filename: str | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return self.block_size * self.block_count


@dataclass(frozen=True, slots=True)
class NvmeController:
    """A controller to which the enclosure is a host; its bdevs are `name` + n + nsid."""

    name: str
    address: Address | None = None
    subnqn: str = ""


@dataclass(frozen=True, slots=True)
class LvolStore:
    """A store of logical volumes on a bdev."""

    name: str
    base_bdev: str
    cluster_size: int
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the keyring. Not every version tells `path`. A `removed` key cannot be given to a host.

    `users`: the number of hosts (once for each subsystem) and NVMe controllers that have it; None: not told.
    A host or controller whose key was removed fails at its next authentication.
    """

    name: str
    path: str | None = None
    removed: bool = False
    users: int | None = None


@dataclass(frozen=True, slots=True)
class Transport:
    """A transport and its numeric options."""

    trtype: str
    options: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """The address of a listener or a controller: TCP, RDMA or PCIE; IPv4 or IPv6."""

    trtype: str
    traddr: str
    trsvcid: str = ""
    adrfam: str = "IPv4"

    def __str__(self) -> str:
        host = f"[{self.traddr}]" if ":" in self.traddr and self.trsvcid else self.traddr
        return f"{self.trtype} {host}:{self.trsvcid}" if self.trsvcid else f"{self.trtype} {host}"

    def params(self) -> dict[str, str]:
        """As SPDK's RPC takes it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace of a subsystem. `nguid` is 32 digits, `uuid` with dashes; empty where there is none."""

    nsid: int
    bdev: str
    nguid: str = ""
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """A host that may connect, and the names of two keys: the host's own, and the controller's for it."""

    nqn: str
    key: str | None = None
    controller_key: str | None = None


@dataclass(frozen=True, slots=True)
class Subsystem:
    """An NVM subsystem. `max_namespaces` None: there is no such bound."""

    nqn: str
    serial: str = ""
    model: str = ""
    max_namespaces: int | None = None
    allow_any_host: bool = False
    namespaces: tuple[Namespace, ...] = ()
    listeners: tuple[Address, ...] = ()
    hosts: tuple[Host, ...] = ()


@dataclass(frozen=True, slots=True)
class BdevStats:
    """Counters of a bdev since it was made. Latencies are sums, in seconds."""

    name: str
    read_commands: int
    read_bytes: int
    write_commands: int
    write_bytes: int
    read_latency_s: float
    write_latency_s: float
    failed_commands: int


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


def decode_all(method: str, answer: Any, decode: Callable[[Members], T]) -> tuple[T, ...]:
    """The records of a list of objects. Raises RpcAnswerError."""
    if not isinstance(answer, list):
        raise RpcAnswerError(f"{method}: the answer is no list")
    return tuple(decode(Members(method, each)) for each in answer)


class Members:
    """The members of one object of an answer, each read with its required type."""

    def __init__(self, method: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise RpcAnswerError(f"{method}: an entry is no object")
        self._method = method
        self._value: dict[str, Any] = value

    def _get(self, name: str, kind: type[T], default: T | None) -> T:
        value = self._value.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise RpcAnswerError(f"{self._method}: {name} is missing or no {kind.__name__}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, str, default)
        if any("\ud800" <= each <= "\udfff" for each in value):
            raise RpcAnswerError(f"{self._method}: {name} has half a character")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        value = self._get(name, int, default)
        if not -_NUMBER_MAX <= value <= _NUMBER_MAX:
            raise RpcAnswerError(f"{self._method}: {name} is out of range")
        return value

    def truth(self, name: str) -> bool:
        return self._get(name, bool, False)

    def members(self, name: str) -> Members:
        return Members(self._method, self._value.get(name) or {})

    def each(self, name: str, decode: Callable[[Members], T]) -> tuple[T, ...]:
        return decode_all(self._method, self._value.get(name) or [], decode)

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._value.get(name) or []
        if not isinstance(value, list):
            raise RpcAnswerError(f"{self._method}: {name} is no list")
        members = (Members(self._method, {name: each}) for each in value if isinstance(each, str))
        return tuple(each.text(name) for each in members)

    def numbers(self) -> Iterable[tuple[str, int]]:
        return ((name, self.number(name)) for name, value in self._value.items() if type(value) is int)


def bdev(said: Members) -> Bdev:
    """An entry of bdev_get_bdevs."""
    return Bdev(
        name=said.text("name"),
        kind=_KINDS.get(said.text("product_name", ""), "other"),
        block_size=said.number("block_size"),
        block_count=said.number("num_blocks"),
        uuid=canonical_uuid(said.text("uuid", "")),
        aliases=said.texts("aliases"),
        filename=said.members("driver_specific").members("aio").text("filename", "") or None,
    )


def nvme_controller(said: Members) -> NvmeController:
    """An entry of bdev_nvme_get_controllers; the first path stands for all."""
    paths = said.each("ctrlrs", lambda path: path.members("trid"))
    if not paths:
        return NvmeController(said.text("name"))
    return NvmeController(said.text("name"), address(paths[0]), paths[0].text("subnqn", ""))


def lvol_store(said: Members) -> LvolStore:
    """An entry of bdev_lvol_get_lvstores."""
    return LvolStore(
        said.text("name"), said.text("base_bdev"), said.number("cluster_size"), said.text("uuid", "")
    )


def key(said: Members) -> Key:
    """An entry of keyring_get_keys."""
    # The keyring itself counts as one.
    references = said.number("refcnt", 0)
    users = references - 1 if references > 0 else None
    return Key(said.text("name"), said.text("path", "") or None, said.truth("removed"), users)


def transport(said: Members) -> Transport:
    """An entry of nvmf_get_transports."""
    return Transport(said.text("trtype").upper(), tuple(sorted(said.numbers())))


def address(said: Members) -> Address:
    """A listen_address, or a trid."""
    family = said.text("adrfam", "IPv4")
    return Address(
        said.text("trtype").upper(),
        canonical_address(said.text("traddr")),
        said.text("trsvcid", ""),
        "IPv6" if family.lower() == "ipv6" else "IPv4",
    )


def subsystem(said: Members) -> Subsystem:
    """An entry of nvmf_get_subsystems; the discovery subsystem's lacks the last fields."""
    return Subsystem(
        nqn=said.text("nqn"),
        serial=said.text("serial_number", ""),
        model=said.text("model_number", ""),
        max_namespaces=said.number("max_namespaces", 0) or None,
        allow_any_host=said.truth("allow_any_host"),
        namespaces=said.each("namespaces", _namespace),
        listeners=said.each("listen_addresses", address),
        hosts=said.each("hosts", _host),
    )


def _namespace(said: Members) -> Namespace:
    return Namespace(
        said.number("nsid"),
        said.text("bdev_name", said.text("name", "")),
        canonical_nguid(said.text("nguid", "")),
        canonical_uuid(said.text("uuid", "")),
    )


def _host(said: Members) -> Host:
    return Host(
        said.text("nqn"), said.text("dhchap_key", "") or None, said.text("dhchap_ctrlr_key", "") or None
    )


def bdev_stats(answer: Any) -> tuple[BdevStats, ...]:
    """The answer of bdev_get_iostat."""
    whole = Members("bdev_get_iostat", answer)
    rate = whole.number("tick_rate", 0) or 1

    def decode(said: Members) -> BdevStats:
        return BdevStats(
            name=said.text("name"),
            read_commands=said.number("num_read_ops"),
            read_bytes=said.number("bytes_read"),
            write_commands=said.number("num_write_ops"),
            write_bytes=said.number("bytes_written"),
            read_latency_s=said.number("read_latency_ticks", 0) / rate,
            write_latency_s=said.number("write_latency_ticks", 0) / rate,
            failed_commands=sum(count for _, count in said.members("io_error").numbers()),
        )

    return whole.each("bdevs", decode)


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
