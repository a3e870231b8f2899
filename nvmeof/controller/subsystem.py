"""Subsystems of a target: namespaces, hosts that may connect, ports, and how a port reaches the namespaces.

`Target` (`target.py`) changes them under its lock. The data path takes none: it reads
`Subsystem.namespaces`, a mapping that is replaced as a whole and never changed in place.

All namespaces of a subsystem are one ANA group (NVMe Base 2.0, 8.1), for they fail together. A state belongs
to a port, and every controller reports the state of the port by which its host connected.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from nvmeof.authentication.secret import Credentials
from nvmeof.controller.storage import KvStorage, Storage
from nvmeof.wire.ana import ANA_STATUS, AnaState
from nvmeof.wire.fabrics import DISCOVERY_NQN, encode_nqn


class _Attached:
    """Names of 16 bytes; without an NGUID of its own a namespace has that of its storage."""

    def __init__(self, nsid: int, nguid: bytes, uuid: bytes | None) -> None:
        self.nsid = nsid
        self.nguid = nguid
        self.uuid = uuid


class Namespace(_Attached):
    """A namespace of logical blocks. Its geometry is copied from the storage: the data path reads it
    often."""

    def __init__(
        self, nsid: int, storage: Storage, nguid: bytes | None = None, uuid: bytes | None = None
    ) -> None:
        super().__init__(nsid, nguid or storage.nguid, uuid)
        self.storage = storage
        self.lba_bytes = storage.lba_bytes
        self.block_count = storage.block_count


class KvNamespace(_Attached):
    """A namespace of the Key Value command set. In its sizes a byte stands for a block."""

    def __init__(self, nsid: int, storage: KvStorage) -> None:
        super().__init__(nsid, storage.nguid, None)
        self.storage = storage
        self.lba_bytes = 1
        self.block_count = storage.capacity_bytes


AnyNamespace: TypeAlias = Namespace | KvNamespace


ANA_GROUP: Final = 1
"""The group of all namespaces."""
ANA_TRANSITION_S: Final = 10
"""ANATT: how long a host is to wait for the end of the state `CHANGE`."""


class PortAccess:
    """The states of one subsystem's ports; `Target.set_access` changes them, under its lock."""

    def __init__(self) -> None:
        self.change_count = 0
        self._states = MappingProxyType[int, AnaState]({})

    def state(self, port_id: int) -> AnaState:
        """Optimized, unless somebody said otherwise. Safe without a lock."""
        return self._states.get(port_id, AnaState.OPTIMIZED)

    def set(self, port_id: int, state: AnaState) -> bool:
        if self.state(port_id) is state:
            return False
        self._states = MappingProxyType({**self._states, port_id: state})
        self.change_count += 1
        return True

    def refusal(self, port_id: int) -> int:
        """The status of commands that come by a port; 0 where they are served."""
        return ANA_STATUS.get(self.state(port_id), 0)


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
