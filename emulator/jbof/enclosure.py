"""An enclosure: drives in one NVM subsystem, and the TCP and RDMA ports at which hosts find it.

It joins the drives (`drive.py`), the controller role (`nvmeof/controller`), and a `TcpListener` or
`RdmaListener` for each address. A `bare` one starts empty; its subsystems, namespaces and listeners are made
at run time (`emulator/jbof/rpc`).
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from emulator.command_line import words_of
from emulator.jbof.drive import Drive
from emulator.jbof.drive_folder import EnclosureError as EnclosureError
from emulator.jbof.drive_folder import derived_nguid, lock_folder, persistent_nguid
from emulator.jbof.drive_model import LinkModel
from emulator.jbof.enclosure_settings import EnclosureSettings as EnclosureSettings
from emulator.jbof.kv_drive import KvDrive
from emulator.jbof.kv_values import FolderValues, MemoryValues, Values
from emulator.jbof.medium import FileMedium, Medium, MemoryMedium
from emulator.jbof.rdma_listener import RdmaListener
from emulator.jbof.retired import RetiredDrives
from nvmeof.controller.settings import NAMESPACE_ID_LIMIT
from nvmeof.controller.subsystem import AnyNamespace, KvNamespace, Namespace, PortAccess, Subsystem
from nvmeof.controller.target import Target
from nvmeof.errors import NvmeofError
from nvmeof.transport import TRANSPORTS
from nvmeof.transport.tcp_listener import TcpListener
from nvmeof.wire.ana import AnaState
from nvmeof.wire.log_page import AddressFamily, DiscoveryEntry, TransportType
from nvmeof.wire.rdma import RDMA_ADDRESS

log = logging.getLogger(__name__)

DEFAULT_RDMA_PORT: Final = 4420
"""Every RDMA device has a port space of its own, so that none need be looked for."""

AnyDrive: TypeAlias = Drive | KvDrive
"""The two kinds of drive: of logical blocks, and of keys and values."""


class Enclosure:
    """Serves from `start` to `close`. Drives are numbered from 0; the namespace id is the number plus 1.

    `on_failure` is called, from any thread, with the reason where a bug or the machine ends its serving. Its
    owner closes it then.
    """

    def __init__(
        self, settings: EnclosureSettings, on_failure: Callable[[str], None] = lambda why: None
    ) -> None:
        self.settings = settings
        self._on_failure = on_failure
        self.target = Target(settings.controller)
        self.port = 0
        self.ports: tuple[int, ...] = ()
        """TCP ports of an enclosure with several, by port id from 1."""
        self._lock = threading.RLock()
        self.link = LinkModel(settings.link_bytes_per_s)
        self._drives: dict[int, AnyDrive] = {}
        self._listeners: dict[tuple[str, str, int], TcpListener | RdmaListener] = {}
        self._pulled: dict[int, list[tuple[Subsystem, AnyNamespace]]] = {}
        self._retired = RetiredDrives(self._give_back)
        self._started_at = time.monotonic()
        self._folder_lock: int | None = None
        try:
            self.subsystem = Subsystem(
                settings.subsystem_nqn,
                serial=hashlib.sha256(settings.subsystem_nqn.encode()).hexdigest()[:20],
                allowed_hosts=settings.allowed_hosts,
            )
            if settings.ports > 1:
                self.subsystem.access = PortAccess()
            for host_nqn, credentials in settings.credentials.items():
                self.target.set_credentials(self.subsystem, host_nqn, credentials)
            if not settings.bare:
                self.target.add_subsystem(self.subsystem)
        except ValueError as error:
            raise EnclosureError(str(error)) from error
        try:
            if settings.folder is not None:
                self._folder_lock = lock_folder(settings.folder)
            for number in range(0 if settings.bare else settings.drives):
                self._make_drive(number, settings.drive_bytes)
            for number in range(settings.drives, settings.drives + settings.kv_drives):
                self._make_kv_drive(number)
        except BaseException:
            self._release()
            raise

    def _make_drive(self, number: int, size: int) -> Drive:
        settings = self.settings
        medium: Medium
        if settings.folder is None:
            nguid = derived_nguid(settings.subsystem_nqn, number)
            try:
                medium = MemoryMedium(size, prefault=settings.prefault)
            except (OSError, ValueError, OverflowError) as error:
                raise EnclosureError(f"no memory for a drive of {size} bytes: {words_of(error)}") from error
        else:
            nguid = persistent_nguid(settings.folder, number, size, settings.lba_bytes)
            path = settings.folder / f"drive-{number:03d}.img"
            try:
                medium = FileMedium(path, size)
            except (OSError, ValueError, OverflowError) as error:
                raise EnclosureError(f"drive {number}: {words_of(error)}") from error
        drive = self._take_in(number, medium, nguid, settings.lba_bytes)
        self.target.attach(self.subsystem, Namespace(number + 1, drive))
        return drive

    def _make_kv_drive(self, number: int) -> None:
        settings = self.settings
        size = settings.drive_bytes
        values: Values = MemoryValues()
        nguid = derived_nguid(settings.subsystem_nqn, number)
        try:
            if settings.folder is not None:
                nguid = persistent_nguid(settings.folder, number, size, 1)
                values = FolderValues(settings.folder / f"drive-{number:03d}.kv")
            drive = KvDrive(
                number,
                values,
                nguid=nguid,
                capacity_bytes=size,
                value_max=settings.controller.max_transfer_bytes,
                model=settings.model,
                seed=settings.seed + number,
            )
        except (OSError, ValueError) as error:
            values.close()
            raise EnclosureError(f"drive {number}: {words_of(error)}") from error
        drive.link = self.link
        self._drives[number] = drive
        self.target.attach(self.subsystem, KvNamespace(number + 1, drive))

    def _take_in(self, number: int, medium: Medium, nguid: bytes, lba_bytes: int) -> Drive:
        settings = self.settings
        drive = Drive(
            number,
            medium,
            nguid=nguid,
            lba_bytes=lba_bytes,
            model=settings.model,
            seed=settings.seed + number,
        )
        drive.link = self.link
        self._drives[number] = drive
        if (window := medium.window(0, medium.size)) is not None:
            for listener in self._listeners.values():
                if isinstance(listener, RdmaListener):
                    listener.add_medium(window)
        return drive

    def take_drive(self, medium: Medium, nguid: bytes, lba_bytes: int) -> Drive:
        """A new drive without a namespace (`Target.add_namespace`). Raises ValueError."""
        with self._lock:
            number = max(self._drives, default=-1) + 1
            if number >= NAMESPACE_ID_LIMIT:
                raise ValueError(f"an enclosure has at most {NAMESPACE_ID_LIMIT} drives")
            return self._take_in(number, medium, nguid, lba_bytes)

    def discard_drive(self, number: int) -> None:
        """Remove its namespaces, and a little later its medium. KeyError if there is none."""
        with self._lock:
            drive = self._drives.pop(number)
            self._pulled.pop(number, None)
            for subsystem, namespace in self._places(drive):
                self.target.remove_namespace(subsystem, namespace.nsid)
        self._retired.add(drive)

    def _give_back(self, drive: AnyDrive) -> None:
        """Close the medium of a drive that nobody uses any more."""
        if isinstance(drive, Drive) and (window := drive.medium.window(0, drive.medium.size)) is not None:
            with self._lock:
                for listener in self._listeners.values():
                    if isinstance(listener, RdmaListener):
                        listener.remove_medium(window)
        drive.close()

    def _places(self, drive: AnyDrive) -> list[tuple[Subsystem, AnyNamespace]]:
        """The subsystems and namespaces by which a drive is served."""
        return [
            (subsystem, namespace)
            for subsystem in self.target.subsystems
            for namespace in subsystem.namespaces.values()
            if namespace.storage is drive
        ]

    @property
    def drives(self) -> list[AnyDrive]:
        """All drives, also those that were pulled out."""
        with self._lock:
            return list(self._drives.values())

    def drive(self, number: int) -> AnyDrive:
        """KeyError if there is no such drive."""
        with self._lock:
            return self._drives[number]

    def is_attached(self, number: int) -> bool:
        return bool(self._places(self.drive(number)))

    def remove_drive(self, number: int) -> None:
        """Pull a drive out: its namespaces go, hosts are told, its commands in flight fail."""
        with self._lock:
            places = self._places(self.drive(number))
            if not places:
                raise ValueError(f"drive {number} is not in the enclosure")
            self._pulled[number] = places
            for subsystem, namespace in places:
                self.target.remove_namespace(subsystem, namespace.nsid)

    def add_drive(self, number: int | None = None, size: int | None = None) -> AnyDrive:
        """Put a drive back that was pulled out, with its contents; without a number, add a block drive."""
        with self._lock:
            if number is None:
                if self.settings.bare:
                    raise ValueError("drives of this enclosure are made by its RPC")
                fresh = max(self._drives, default=-1) + 1
                return self._make_drive(fresh, size or self.settings.drive_bytes)
            drive = self.drive(number)
            if size is not None and size != drive.size_bytes:
                raise ValueError(f"drive {number} has {drive.size_bytes} bytes")
            if self._places(drive):
                raise ValueError(f"drive {number} is there already")
            served = self.target.subsystems
            places = [each for each in self._pulled.get(number, ()) if each[0] in served]
            if not places:
                raise ValueError(f"drive {number} was not pulled out of a namespace that is still offered")
            for subsystem, was in places:
                if was.nsid in subsystem.namespaces:
                    raise ValueError(
                        f"namespace {was.nsid} of {subsystem.nqn} is on another drive now; "
                        f"remove it there, then add drive {number} again"
                    )
            for subsystem, was in places:
                if isinstance(drive, KvDrive):
                    self.target.attach(subsystem, KvNamespace(was.nsid, drive))
                else:
                    self.target.attach(subsystem, Namespace(was.nsid, drive, nguid=was.nguid, uuid=was.uuid))
            del self._pulled[number]
            return drive

    def identity(self, number: int) -> dict[str, Any]:
        """Number and NGUID of a drive's (first) namespace, also of one pulled out. KeyError: no such drive.

        A drive that never was a namespace has no number, and its own NGUID.
        """
        with self._lock:
            drive = self.drive(number)
            places = self._places(drive) or self._pulled.get(number, [])
            nsid, nguid = (places[0][1].nsid, places[0][1].nguid) if places else (None, drive.nguid)
            return {"drive": number, "nsid": nsid, "nguid": nguid.hex()}

    def start(self) -> None:
        """Listen, and serve in threads of its own. EnclosureError if the address cannot be had."""
        settings = self.settings
        if settings.bare:
            return
        try:
            if settings.ports > 1:
                for number in range(settings.ports):
                    port = settings.port + number if settings.port else 0
                    port = self.listen("tcp", settings.address, port, self.subsystem.nqn, number + 1)
                    self.ports += (port,)
                self.port = self.ports[0]
                return
            for transport in TRANSPORTS:
                if transport in settings.transports:
                    port = self.port or settings.port
                    self.port = self.listen(transport, settings.address, port, self.subsystem.nqn)
        except EnclosureError:
            self.close()
            raise

    def set_port_up(self, number: int, up: bool) -> None:
        """Cut a port off with all its connections, or serve it again. ValueError: no such port."""
        if not 1 <= number <= len(self.ports):
            raise ValueError(f"there are {len(self.ports)} ports that can be cut off")
        where = ("tcp", self.settings.address, self.ports[number - 1])
        is_up = where in self._listeners
        if up and not is_up:
            self.listen(*where, self.subsystem.nqn, number)
        elif is_up and not up:
            self.stop_listening(*where, self.subsystem.nqn, number)

    def set_access(self, number: int, state: AnaState) -> None:
        """Set the ANA state of a port. ValueError: no such port."""
        if not 1 <= number <= len(self.ports):
            raise ValueError(f"there are {len(self.ports)} ports that report how they reach the namespaces")
        self.target.set_access(self.subsystem, number, state)

    def listen(
        self,
        transport: str,
        address: str,
        port: int,
        subsystem_nqn: str | None = None,
        port_id: int = 1,
    ) -> int:
        """Listen at one more address, and list it in the discovery log; the port (0 asks for any).

        `subsystem_nqn`: the log names it for that subsystem alone. At an address with a listener only the log
        changes. EnclosureError if the address cannot be had.
        """
        with self._lock:
            if (transport, address, port) not in self._listeners:
                try:
                    listener = (
                        TcpListener(self.target, self.settings.tcp, address, port, port_id)
                        if transport == "tcp"
                        else self._listen_rdma(address, port or DEFAULT_RDMA_PORT)
                    )
                except (OSError, NvmeofError) as error:
                    raise EnclosureError(f"cannot listen on {address}:{port}: {words_of(error)}") from error
                port = listener.port
                self._listeners[transport, address, port] = listener
            self.target.add_port(log_entry(transport, address, port, subsystem_nqn, port_id))
            return port

    def stop_listening(
        self, transport: str, address: str, port: int, subsystem_nqn: str, port_id: int = 1
    ) -> None:
        """Undo `listen` for a subsystem; the last one closes the listener and its connections.

        KeyError if there is no such listener.
        """
        with self._lock:
            self.target.remove_port(log_entry(transport, address, port, subsystem_nqn, port_id))
            gone = log_entry(transport, address, port, None)
            place = (gone.transport_type, gone.address, gone.service)
            if any(place == (left.transport_type, left.address, left.service) for left in self.target.ports):
                return
            listener = self._listeners.pop((transport, address, port))
        listener.close()

    def _listen_rdma(self, address: str, port: int) -> RdmaListener:
        """Raises `NvmeofError`."""
        listener = RdmaListener(self.target, self.settings.rdma, address, port, self._on_failure)
        blocks = [drive for drive in self.drives if isinstance(drive, Drive)]
        windows = [drive.medium.window(0, drive.medium.size) for drive in blocks]
        listener.start([window for window in windows if window is not None])
        return listener

    def close(self) -> None:
        """Stop serving and release everything. Idempotent."""
        with self._lock:
            listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.close()
        self._release()

    def _release(self) -> None:
        for drive in self._drives.values():
            drive.close()
        self._drives.clear()
        self._retired.close()
        if self._folder_lock is not None:
            os.close(self._folder_lock)
            self._folder_lock = None

    def __enter__(self) -> "Enclosure":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def describe(self) -> dict[str, Any]:
        """The ready line: addresses and namespaces."""
        return {
            "address": self.settings.address,
            "port": self.port,
            **({"ports": list(self.ports)} if self.ports else {}),
            "transports": list(self.settings.transports),
            "nqn": None if self.settings.bare else self.subsystem.nqn,
            "namespaces": [
                {
                    "nsid": namespace.nsid,
                    "nguid": namespace.nguid.hex(),
                    "size": namespace.block_count * namespace.lba_bytes,
                    "lba_bytes": namespace.lba_bytes,
                    "command_set": "kv" if isinstance(namespace, KvNamespace) else "nvm",
                }
                for namespace in self.subsystem.namespaces.values()
            ],
        }

    def stats(self) -> dict[str, Any]:
        """Counters of every drive, connections and controllers."""
        with self._lock:
            listeners = list(self._listeners.values())
            alive = sum(listener.connections for listener in listeners)
            accepted = sum(listener.accepted for listener in listeners)
            refused = sum(listener.refused for listener in listeners)
            drives = [
                drive.stats() | self.identity(number) | {"attached": bool(self._places(drive))}
                for number, drive in self._drives.items()
            ]
        return {
            "nqn": self.subsystem.nqn,
            "uptime_s": time.monotonic() - self._started_at,
            "connections": alive,
            "connections_accepted": accepted,
            "connections_refused": refused,
            "authentication": self.target.authentications.described(),
            "guests": self.target.guests.described(),
            "connections_overfull": self.target.overfull,
            "controllers": [
                {"cntlid": each.cntlid, "host_nqn": each.host_nqn, "queues": sorted(each.queues)}
                for each in self.target.controllers
            ],
            "drives": drives,
        }


def log_entry(transport: str, address: str, port: int, nqn: str | None, port_id: int = 1) -> DiscoveryEntry:
    """The entry of a listener in the discovery log, for one subsystem or (None) for all."""
    is_rdma = transport == "rdma"
    return DiscoveryEntry(
        address,
        str(port),
        nqn or "",
        transport_type=TransportType.RDMA if is_rdma else TransportType.TCP,
        address_family=AddressFamily.IPV6 if ":" in address else AddressFamily.IPV4,
        port_id=port_id,
        tsas=RDMA_ADDRESS if is_rdma else bytes(256),
    )
