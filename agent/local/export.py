"""The enclosure role of an agent: its local namespaces, served to the other agents by NVMe-oF over TCP.

Each local namespace is a subsystem of its own. Its NQN follows from the server's identity and the NGUID:
paths to one subsystem lead to one medium, and a copy of a device in another server is another medium. A
target has one address: a host that reaches one address sees the namespaces that are exported there, and no
others.
"""

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.config.local_section import LocalSection
from agent.errors import ConfigError, G35Error
from agent.local.storage import DeviceStorage
from nvmeof.authentication.secret import Credentials
from nvmeof.authentication.secret_files import SecretFileError, read_hosts_file
from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.subsystem import Namespace, Subsystem
from nvmeof.controller.target import Target
from nvmeof.controller.tcp_rules import TcpSettings
from nvmeof.transport.tcp_listener import TcpListener
from nvmeof.wire.log_page import AddressFamily, DiscoveryEntry, TransportType

NSID: Final = 1
"""Of the one namespace of each subsystem."""
IN_CAPSULE_BYTES: Final = 1056 << 10
"""A slot of the default volume, 1 MiB and its header, goes with its command (docs/enclosures.md)."""


def subsystem_nqn(host_id: bytes, nguid: bytes) -> str:
    """The name under which a local namespace of a server is found. `host_id` is the agent's own, 16 bytes out
    of its state folder: verbs beside the agent have the same one."""
    return f"nqn.2014-08.org.nvmexpress:uuid:{uuid.uuid5(uuid.UUID(bytes=host_id), nguid.hex())}"


def credentials_of(section: LocalSection) -> dict[str, Credentials]:
    """Of the hosts that may connect, by their NQNs; empty: any host may. Raises ConfigError."""
    if section.hosts_file is None:
        return {}
    try:
        return read_hosts_file(section.hosts_file)
    except SecretFileError as wrong:
        raise ConfigError(f"local.hosts_file: {wrong}", wrong.advice) from None


@dataclass(frozen=True, slots=True)
class _Offered:
    subsystem: Subsystem
    port: DiscoveryEntry


class Export:
    """Listeners for the local namespaces, from construction to `close`. Raises G35Error."""

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        """It listens at all of them from here on, also for devices that come later."""
        settings = ControllerSettings(in_capsule_bytes=IN_CAPSULE_BYTES)
        self._targets = {where: Target(settings) for where in dict.fromkeys(addresses)}
        self._listeners: list[TcpListener] = []
        self._offered: dict[Path, _Offered] = {}
        """By the path of their section, also while the device is gone."""
        try:
            for (address, port), target in self._targets.items():
                self._listeners.append(TcpListener(target, TcpSettings(), address, port))
        except OSError as failed:
            self.close()
            raise G35Error(
                f"cannot serve local namespaces at {address}:{port}: {failed.strerror or failed}",
                "give [[local]] an `export` address of this machine with a free port",
            ) from None

    def offer(self, section: LocalSection, nqn: str, storage: DeviceStorage) -> None:
        """Serve a device, by its NQN, at the address of its section. Hosts that stayed connected to one that
        was withdrawn have it again. Raises G35Error."""
        where = section.address
        target = self._targets[where]
        before = self._offered.get(section.path)
        if before is not None and before.subsystem.nqn == nqn:
            target.attach(before.subsystem, Namespace(NSID, storage))
            return
        if before is not None:  # another device has come in its place
            del self._offered[section.path]
            target.remove_subsystem(before.subsystem.nqn)
            target.remove_port(before.port)
        credentials = credentials_of(section)
        subsystem = Subsystem(
            nqn,
            serial=hashlib.sha256(nqn.encode()).hexdigest()[:20],
            model="g35 local namespace",
            allowed_hosts=credentials.keys() if credentials else None,
        )
        for host_nqn, each in credentials.items():
            target.set_credentials(subsystem, host_nqn, each)
        try:
            target.add_subsystem(subsystem)
        except ValueError:
            raise G35Error(
                f"{section.path} has the label of another device of [[local]]: one is a copy of the other",
                "take the copy away",
            ) from None
        target.attach(subsystem, Namespace(NSID, storage))
        address, port = where
        family = AddressFamily.IPV6 if ":" in address else AddressFamily.IPV4
        entry = DiscoveryEntry(
            address,
            str(port),
            nqn,
            transport_type=TransportType.TCP,
            address_family=family,
            port_id=1,
            tsas=bytes(256),
        )
        target.add_port(entry)
        self._offered[section.path] = _Offered(subsystem, entry)

    def withdraw(self, section: LocalSection) -> None:
        """A device is gone: hosts see its subsystem without a namespace."""
        self._targets[section.address].remove_namespace(self._offered[section.path].subsystem, NSID)

    @property
    def hosts(self) -> int:
        """Sessions of hosts that are connected."""
        return sum(
            not controller.subsystem.is_discovery
            for target in self._targets.values()
            for controller in target.controllers
        )

    def close(self) -> None:
        """Stop listening, and end all connections."""
        for listener in self._listeners:
            listener.close()
