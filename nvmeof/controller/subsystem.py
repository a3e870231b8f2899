"""What a target offers: subsystems, their namespaces, who may connect, and the ports for the discovery log.

`Target` (`target.py`) changes them under its lock. The data path takes none: it reads
`Subsystem.namespaces`, a mapping that is replaced as a whole and never changed in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from nvmeof.authentication.credentials import Credentials
from nvmeof.controller.kv_storage import KvStorage
from nvmeof.controller.port_access import PortAccess
from nvmeof.controller.storage import Storage
from nvmeof.wire.fabrics import DISCOVERY_NQN, encode_nqn
from nvmeof.wire.log_page import AddressFamily, TransportType


class Namespace:
    """A namespace of logical blocks. Its geometry is copied from the storage: the data path reads it often.

    `nguid` and `uuid` are names of 16 bytes; without an NGUID it is that of the storage.
    """

    __slots__ = ("block_count", "lba_bytes", "nguid", "nsid", "storage", "uuid")

    def __init__(
        self, nsid: int, storage: Storage, nguid: bytes | None = None, uuid: bytes | None = None
    ) -> None:
        self.nsid = nsid
        self.storage = storage
        self.lba_bytes = storage.lba_bytes
        self.block_count = storage.block_count
        self.nguid = nguid or storage.nguid
        self.uuid = uuid


class KvNamespace:
    """A namespace of the Key Value command set. In its sizes a byte stands for a block."""

    __slots__ = ("block_count", "lba_bytes", "nguid", "nsid", "storage", "uuid")

    def __init__(
        self, nsid: int, storage: KvStorage, nguid: bytes | None = None, uuid: bytes | None = None
    ) -> None:
        self.nsid = nsid
        self.storage = storage
        self.lba_bytes = 1
        self.block_count = storage.capacity_bytes
        self.nguid = nguid or storage.nguid
        self.uuid = uuid


AnyNamespace: TypeAlias = Namespace | KvNamespace


@dataclass(frozen=True, slots=True)
class Port:
    """Where a target listens. `service` is the port, as text; `tsas` is particular to the transport.

    `subsystem_nqn`: the discovery log names it for that subsystem alone; None: for all.
    """

    address: str
    service: str
    transport_type: int = TransportType.TCP
    address_family: int = AddressFamily.IPV4
    port_id: int = 1
    tsas: bytes = bytes(256)
    subsystem_nqn: str | None = None


class Subsystem:
    """An NVM subsystem. Made and changed through its `Target`; `allowed_hosts` None lets every host in."""

    def __init__(
        self,
        nqn: str,
        *,
        serial: str,
        model: str = "g35 enclosure",
        firmware: str = "0.1",
        allowed_hosts: Iterable[str] | None = None,
    ) -> None:
        encode_nqn(nqn)
        self.nqn = nqn
        self.serial = serial
        self.model = model
        self.firmware = firmware
        self.allowed_hosts = None if allowed_hosts is None else frozenset(allowed_hosts)
        self.namespaces: Mapping[int, AnyNamespace] = MappingProxyType({})
        self.credentials: Mapping[str, Credentials] = MappingProxyType({})
        """Hosts that have to authenticate, by NQN. Changed by `Target.set_credentials`."""
        self.access: PortAccess | None = None
        """Present where it has several ports and reports how each reaches it (ANA)."""

    @property
    def is_discovery(self) -> bool:
        return self.nqn == DISCOVERY_NQN

    def allows(self, host_nqn: str) -> bool:
        return self.allowed_hosts is None or host_nqn in self.allowed_hosts
