"""The description of an enclosure: one TOML file, checked as a whole before the enclosure is asked anything.

The same file serves an SPDK target, the kernel's nvmet and `g35 jbof`. Unknown keys are refused. Paths are
those of the enclosure's machine. A key is the name of a file; there are no secrets in the description.
"""

import ipaddress
import os
import re
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    model_validator,
)

from agent.config.document_problems import Section, checked, matching, name_of_letters, toml_in
from agent.enclosure_control import records
from agent.enclosure_control.steps import MIB
from agent.sizes import Size, size_text

_PRINTABLE = re.compile(r"[\x20-\x7e]+")


def _nguid(text: str) -> str:
    digits = records.canonical_nguid(text)
    if len(digits) != 32 or set(digits) - set("0123456789abcdef"):
        raise ValueError("an NGUID is 32 hexadecimal digits, not all of them zero")
    return digits


def _uuid(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        found = uuid.UUID(value)
    except ValueError:
        raise ValueError(f"{value!r} is no UUID: 32 hexadecimal digits, with or without hyphens") from None
    if not found.int:
        raise ValueError("a UUID of zeros names nothing; leave it out")
    return str(found)


def _printable(most: int) -> AfterValidator:
    return matching(_PRINTABLE, most, f"should have 1 to {most} printable ASCII characters")


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("an absolute path is needed: the enclosure has a working directory of its own")
    return path


_Name = Annotated[str, name_of_letters(64)]
_BdevName = Annotated[str, name_of_letters(128, "'.', '_', '/' and '-'")]
_Nqn = Annotated[
    str,
    matching(
        re.compile(r"nqn\.[\x21-\x7e]+"),
        223,
        "should begin with 'nqn.' and have at most 223 ASCII characters, no spaces",
    ),
]
_BlockSize = Literal[512, 4096]
_Nguid = Annotated[str, AfterValidator(_nguid)]
_Uuid = Annotated[str, BeforeValidator(_uuid)]
_Path = Annotated[str, AfterValidator(_absolute)]


class TransportSection(Section):
    """A transport of the target. Options that are left out stay as they are."""

    type: Literal["tcp", "rdma"] = Field(description="The transport.")
    max_queue_depth: int | None = Field(None, ge=2, le=65535, description="Entries of a queue.")
    max_io_qpairs_per_ctrlr: int | None = Field(None, ge=1, description="I/O queues of one controller.")
    in_capsule_data_size: Size | None = Field(None, ge=0, description="Room for a write in its capsule.")
    max_io_size: Size | None = Field(None, ge=4096, description="Largest data of one command.")

    def options(self) -> tuple[tuple[str, int], ...]:
        return tuple((k, v) for k, v in self.model_dump(exclude={"type"}).items() if v is not None)


class KeySection(Section):
    """A DH-HMAC-CHAP secret, by the file on the enclosure's machine that holds it (mode 0600)."""

    name: _Name = Field(description="Its name in the keyring. A new secret wants a new name.")
    file: _Path = Field(description="Absolute path of the file with `DHHC-1:...`.")


class MallocSection(Section):
    """Memory as a block device. Its contents end with the target."""

    name: _Name = Field(description="Name of the bdev.")
    size: Size = Field(ge=512, description="Bytes.")
    block_size: _BlockSize = Field(4096, description="Bytes of a logical block.")
    uuid: _Uuid | None = Field(None, description="Its UUID; without it the target makes one.")

    @model_validator(mode="after")
    def _whole_blocks(self) -> "MallocSection":
        if self.size % self.block_size:
            size, block = size_text(self.size), size_text(self.block_size)
            raise ValueError(f"{self.name}: {size} is no whole number of blocks of {block}")
        return self


class NullSection(MallocSection):
    """A bdev without contents, for measurements: writes are forgotten, reads are zeros."""


class AioSection(Section):
    """A file or a block device of the enclosure's machine as a bdev."""

    name: _Name = Field(description="Name of the bdev.")
    file: _Path = Field(description="Absolute path; a file has to be there, with its size.")
    block_size: _BlockSize = Field(4096, description="Bytes of a logical block.")


class NvmeSection(Section):
    """An NVMe controller to attach: an SSD in a slot, or one behind another fabric."""

    name: _Name = Field(description="Its bdevs are called NAMEn1, NAMEn2 and so on.")
    transport: Literal["pcie", "tcp", "rdma"] = Field("pcie", description="How it is reached.")
    address: str = Field(min_length=1, max_length=255, description="`0000:3b:00.0`, or an IP address.")
    port: int | None = Field(None, ge=1, le=65535, description="Of a fabric.")
    nqn: _Nqn | None = Field(None, description="Its subsystem's NQN, on a fabric.")
    host_nqn: _Nqn | None = Field(None, description="As whom to connect.")
    key: _Name | None = Field(None, description="Name of the key to prove oneself with.")
    controller_key: _Name | None = Field(None, description="Name of the key that the controller proves.")

    @property
    def place(self) -> records.Address:
        if self.transport == "pcie":
            return records.Address("PCIE", records.canonical_address(self.address))
        return address_of(self.transport, self.address, self.port or 4420)


class LvolStoreSection(Section):
    """A store of logical volumes. If the bdev carries none, one is made, and the bdev's contents are lost."""

    name: _Name = Field(description="Name of the store.")
    bdev: _BdevName = Field(description="The bdev to use, whole.")
    cluster_size: Size | None = Field(None, ge=1 << 12, description="Unit of allocation.")


class LvolSection(Section):
    """A logical volume; namespaces name it as `STORE/NAME`."""

    name: _Name = Field(description="Name of the volume.")
    store: _Name = Field(description="Its store.")
    size: Size = Field(ge=MIB, multiple_of=MIB, description="Whole MiB. It can grow, not shrink.")
    thin: bool = Field(False, description="Allocate as it is written.")

    @property
    def alias(self) -> str:
        return f"{self.store}/{self.name}"


class NamespaceSection(Section):
    nsid: int = Field(ge=1, le=0xFFFF_FFFE, description="Namespace id.")
    bdev: _BdevName = Field(description="Name of the bdev, `STORE/NAME` of a logical volume.")
    nguid: _Nguid | None = Field(None, description="32 digits. g35 knows a namespace by it: do set it.")
    uuid: _Uuid | None = Field(None, description="UUID; without it, that of the bdev.")


class ListenerSection(Section):
    """An address at which hosts find the subsystem."""

    transport: Literal["tcp", "rdma"] = Field("tcp", description="The transport.")
    address: str = Field(description="An IP address of the enclosure.")
    port: int = Field(4420, ge=1, le=65535, description="The port.")

    @model_validator(mode="after")
    def _is_address(self) -> "ListenerSection":
        try:
            ipaddress.ip_address(self.address)
        except ValueError:
            raise ValueError(
                f"{self.address!r} is no IP address; it stands without brackets, and the port has its own key"
            ) from None
        return self

    @property
    def place(self) -> records.Address:
        return address_of(self.transport, self.address, self.port)


class HostSection(Section):
    """A host that may connect."""

    nqn: _Nqn = Field(description="Its NQN.")
    key: _Name | None = Field(None, description="Name of the key that it must prove to have.")
    controller_key: _Name | None = Field(None, description="Name of the key that it may ask us to prove.")

    @model_validator(mode="after")
    def _both_ways(self) -> "HostSection":
        if self.controller_key is not None and self.key is None:
            raise ValueError(f"{self.nqn}: a controller key without a key of the host's")
        return self

    @property
    def record(self) -> records.Host:
        return records.Host(self.nqn, self.key, self.controller_key)


class SubsystemSection(Section):
    """An NVM subsystem, with its namespaces, listeners and hosts."""

    nqn: _Nqn = Field(description="Its NQN.")
    serial: Annotated[str, _printable(20)] | None = Field(None, description="Serial number.")
    model: Annotated[str, _printable(40)] | None = Field(None, description="Model number.")
    max_namespaces: int | None = Field(None, ge=1, description="Largest namespace id; SPDK's own is 32.")
    allow_any_host: bool = Field(False, description="Let every host in.")
    ana_reporting: bool | None = Field(
        None, description="Tell hosts the access states of its listeners; SPDK's own is false."
    )
    namespaces: tuple[NamespaceSection, ...] = Field((), max_length=1024, description="Namespaces.")
    listeners: tuple[ListenerSection, ...] = Field((), max_length=64, description="Listeners.")
    hosts: tuple[HostSection, ...] = Field((), max_length=1024, description="Hosts that may connect.")

    @model_validator(mode="after")
    def _holds_together(self) -> "SubsystemSection":
        _distinct("namespace id", (each.nsid for each in self.namespaces))
        _distinct("listener", (each.place for each in self.listeners))
        _distinct("host", (each.nqn for each in self.hosts))
        if self.allow_any_host and self.hosts:
            raise ValueError(f"{self.nqn} lets any host in, and names hosts: choose one")
        for each in self.namespaces:
            if self.max_namespaces is not None and each.nsid > self.max_namespaces:
                raise ValueError(f"namespace {each.nsid} is above max_namespaces")
        return self


class Description(Section):
    """The whole file."""

    transports: tuple[TransportSection, ...] = Field((), max_length=2)
    keys: tuple[KeySection, ...] = Field((), max_length=1024)
    malloc: tuple[MallocSection, ...] = Field((), max_length=1024)
    null: tuple[NullSection, ...] = Field((), max_length=1024)
    aio: tuple[AioSection, ...] = Field((), max_length=1024)
    nvme: tuple[NvmeSection, ...] = Field((), max_length=256)
    lvol_stores: tuple[LvolStoreSection, ...] = Field((), max_length=256)
    lvols: tuple[LvolSection, ...] = Field((), max_length=1024)
    subsystems: tuple[SubsystemSection, ...] = Field((), max_length=256)

    @model_validator(mode="after")
    def _holds_together(self) -> "Description":
        _distinct("transport", (each.type for each in self.transports))
        _distinct("key", (each.name for each in self.keys))
        memory = (*self.malloc, *self.null)
        names = [each.name for each in memory] + [each.name for each in self.aio]
        _distinct("bdev", names + [each.name for each in self.nvme])
        _distinct("lvol store", (each.name for each in self.lvol_stores))
        _distinct("lvol", (each.alias for each in self.lvols))
        _distinct("subsystem", (each.nqn for each in self.subsystems))
        _distinct("file of [[aio]]", (os.path.normpath(each.file) for each in self.aio))
        _distinct("uuid of [[malloc]] and [[null]]", (each.uuid for each in memory if each.uuid))
        # Two namespaces on one bdev are two names for the same blocks, and a pool would use them twice.
        namespaces = [namespace for each in self.subsystems for namespace in each.namespaces]
        _distinct("bdev of a namespace", (each.bdev for each in namespaces))
        _distinct("nguid", (each.nguid for each in namespaces if each.nguid))
        _distinct("uuid", (each.uuid for each in namespaces if each.uuid))
        return self


def _distinct(what: str, names: Iterable[object]) -> None:
    seen: set[object] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"two times the same {what}: {name}")
        seen.add(name)


def address_of(transport: str, address: str, port: int) -> records.Address:
    family = "IPv6" if ":" in address else "IPv4"
    return records.Address(transport.upper(), records.canonical_address(address), str(port), family)


def parse_description(document: dict[str, Any], where: str) -> Description:
    """A checked description. Raises ConfigError, which names every wrong key."""
    refusal = f"{where} does not describe an enclosure"
    return checked(document, Description, refusal, "docs/enclosures.md lists every key")


def load_description(path: Path) -> Description:
    """The description in a file. Raises ConfigError."""
    return parse_description(toml_in(path), str(path))
