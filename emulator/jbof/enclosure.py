"""An enclosure: some drives in one NVM subsystem, and a TCP or RDMA port (or both) where hosts find them.

`Enclosure` is what the command line runs and what tests start in their own process. The pieces it joins are
the drives (`drive.py`), the controller role (`nvmeof/controller`), one `Connection` per accepted socket and
one `RdmaListener` for all queue pairs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from emulator.jbof.connection import Connection
from emulator.jbof.drive import Drive
from emulator.jbof.drive_model import DriveModelSettings
from emulator.jbof.medium import FileMedium, Medium, MemoryMedium
from emulator.jbof.rdma_listener import RdmaListener
from nvmeof.controller.rdma_rules import RdmaSettings
from nvmeof.controller.settings import NAMESPACE_ID_LIMIT, ControllerSettings
from nvmeof.controller.subsystem import Port, Subsystem, Target
from nvmeof.controller.tcp_rules import TcpSettings
from nvmeof.errors import NvmeofError
from nvmeof.wire.log_page import AddressFamily, TransportType
from nvmeof.wire.rdma import RdmaAddress

log = logging.getLogger(__name__)

NQN_PREFIX: Final = "nqn.2026-01.io.g35:"
TRANSPORTS: Final = ("tcp", "rdma")
DEFAULT_RDMA_PORT: Final = 4420
"""Every RDMA device has a port space of its own, so that none need be looked for."""

MAX_CONNECTIONS: Final = 1024
"""Sockets served at once; one thread each. More are closed as they come."""

_STOP_S: Final = 5.0


class EnclosureError(Exception):
    """The enclosure cannot be as it was asked for: the world's fault or the user's; says which and how."""


@dataclass(frozen=True, slots=True)
class EnclosureSettings:
    """What to serve. `folder` None keeps the drives in memory; otherwise each is a sparse file in it.

    `name` makes the NQN where none is given, and the NGUIDs of drives in memory. With both transports the
    port of RDMA is that of TCP. RDMA makes an emulated device at `address`, which no other process may have.
    """

    drives: int = 1
    drive_bytes: int = 1 << 30
    folder: Path | None = None
    address: str = "127.0.0.1"
    port: int = 0
    name: str = "jbof"
    nqn: str | None = None
    lba_bytes: int = 4096
    allowed_hosts: frozenset[str] | None = None
    model: DriveModelSettings = field(default_factory=DriveModelSettings)
    controller: ControllerSettings = field(default_factory=ControllerSettings)
    tcp: TcpSettings = field(default_factory=TcpSettings)
    rdma: RdmaSettings = field(default_factory=RdmaSettings)
    transports: tuple[str, ...] = ("tcp",)
    seed: int = 0
    prefault: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.drives <= NAMESPACE_ID_LIMIT:
            raise EnclosureError(f"an enclosure has 0 to {NAMESPACE_ID_LIMIT} drives, not {self.drives}")
        if not self.transports or any(each not in TRANSPORTS for each in self.transports):
            raise EnclosureError(f"an enclosure is reached by {' or '.join(TRANSPORTS)}")
        if self.lba_bytes not in (512, 4096):
            raise EnclosureError("a logical block has 512 or 4096 bytes")
        if self.drive_bytes <= 0 or self.drive_bytes % self.lba_bytes:
            raise EnclosureError(f"a drive's size is a multiple of {self.lba_bytes} bytes")

    @property
    def subsystem_nqn(self) -> str:
        return self.nqn or NQN_PREFIX + self.name


class Enclosure:
    """Serves from `start` to `close`. Drives are numbered from 0; the namespace id is the number plus 1."""

    def __init__(self, settings: EnclosureSettings) -> None:
        self.settings = settings
        self.target = Target(settings.controller)
        self.port = 0
        self._lock = threading.RLock()
        self._drives: dict[int, Drive] = {}
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._rdma: RdmaListener | None = None
        self._connections: set[Connection] = set()
        self._accepted = 0
        self._refused = 0
        self._started_at = time.monotonic()
        self._folder_lock: int | None = None
        try:
            self.subsystem = Subsystem(
                settings.subsystem_nqn,
                serial=hashlib.sha256(settings.subsystem_nqn.encode()).hexdigest()[:20],
                allowed_hosts=settings.allowed_hosts,
            )
            self.target.add_subsystem(self.subsystem)
        except ValueError as error:
            raise EnclosureError(str(error)) from error
        try:
            if settings.folder is not None:
                self._folder_lock = _lock_folder(settings.folder)
            for number in range(settings.drives):
                self._make_drive(number, settings.drive_bytes)
        except BaseException:
            self._release()
            raise

    # --- drives -----------------------------------------------------------------------------------------

    def _make_drive(self, number: int, size: int) -> Drive:
        settings = self.settings
        medium: Medium
        if settings.folder is None:
            nguid = derived_nguid(settings.subsystem_nqn, number)
            try:
                medium = MemoryMedium(size, prefault=settings.prefault)
            except (OSError, ValueError, OverflowError) as error:
                raise EnclosureError(f"no memory for a drive of {size} bytes: {error}") from error
        else:
            nguid = _persistent_nguid(settings.folder, number, size, settings.lba_bytes)
            path = settings.folder / f"drive-{number:03d}.img"
            try:
                medium = FileMedium(path, size)
            except (OSError, ValueError) as error:
                raise EnclosureError(f"drive {number}: {error}") from error
        drive = Drive(
            number,
            medium,
            nguid=nguid,
            lba_bytes=settings.lba_bytes,
            model=settings.model,
            seed=settings.seed + number,
        )
        self._drives[number] = drive
        if self._rdma is not None and (window := medium.window(0, size)) is not None:
            self._rdma.add_medium(window)
        self.target.add_namespace(self.subsystem, number + 1, drive)
        return drive

    @property
    def drives(self) -> list[Drive]:
        """All drives, also those that were pulled out."""
        with self._lock:
            return list(self._drives.values())

    def drive(self, number: int) -> Drive:
        """KeyError if there is no such drive."""
        with self._lock:
            return self._drives[number]

    def is_attached(self, number: int) -> bool:
        return number + 1 in self.subsystem.namespaces

    def remove_drive(self, number: int) -> None:
        """Pull a drive out: its namespace goes, hosts are told, its commands in flight fail."""
        with self._lock:
            self.drive(number)
            if not self.is_attached(number):
                raise ValueError(f"drive {number} is not in the enclosure")
            self.target.remove_namespace(self.subsystem, number + 1)

    def add_drive(self, number: int | None = None, size: int | None = None) -> Drive:
        """Put a drive back that was pulled out (with its contents), or, without a number, a new one in."""
        with self._lock:
            if number is None:
                fresh = max(self._drives, default=-1) + 1
                return self._make_drive(fresh, size or self.settings.drive_bytes)
            drive = self.drive(number)
            if size is not None and size != drive.medium.size:
                raise ValueError(f"drive {number} has {drive.medium.size} bytes")
            self.target.add_namespace(self.subsystem, number + 1, drive)
            return drive

    # --- serving ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, and serve in threads of our own. EnclosureError if the address cannot be had."""
        if "tcp" in self.settings.transports:
            self._listen_tcp()
        if "rdma" in self.settings.transports:
            try:
                self._listen_rdma()
            except NvmeofError as error:
                self.close()
                raise EnclosureError(str(error)) from error

    @property
    def _family(self) -> int:
        return AddressFamily.IPV6 if ":" in self.settings.address else AddressFamily.IPV4

    def _listen_rdma(self) -> None:
        """Raises `NvmeofError`."""
        settings = self.settings
        port = self.port or settings.port or DEFAULT_RDMA_PORT
        listener = RdmaListener(self.target, settings.rdma, settings.address, port)
        windows = [drive.medium.window(0, drive.medium.size) for drive in self.drives]
        listener.start([window for window in windows if window is not None])
        self._rdma = listener
        self.port = port
        self.target.add_port(
            Port(
                settings.address,
                str(port),
                transport_type=TransportType.RDMA,
                address_family=self._family,
                tsas=RdmaAddress().encode(),
            )
        )

    def _listen_tcp(self) -> None:
        settings = self.settings
        family = socket.AF_INET6 if ":" in settings.address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((settings.address, settings.port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise EnclosureError(f"cannot listen on {settings.address}:{settings.port}: {error}") from error
        self._listener = listener
        self.port = listener.getsockname()[1]
        self.target.add_port(Port(settings.address, str(self.port), address_family=self._family))
        self._acceptor = threading.Thread(target=self._accept, name="accept", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        listener = self._listener
        assert listener is not None
        while True:
            try:
                sock, peer = listener.accept()
            except OSError as error:
                if self._listener is None:
                    return
                # Out of descriptors, or a connection that was gone before we took it: go on, but not hot.
                log.warning("accept: %s", error)
                time.sleep(0.05)
                continue
            self._take(sock, peer)

    def _take(self, sock: socket.socket, peer: Any) -> None:
        with self._lock:
            self._connections = {each for each in self._connections if each.thread.is_alive()}
            if self._listener is None or len(self._connections) >= MAX_CONNECTIONS:
                self._refused += 1
                sock.close()
                return
            self._accepted += 1
            try:
                connection = Connection(sock, self.target, self.settings.tcp, f"host-{peer[0]}:{peer[1]}")
                connection.thread.start()
            except (OSError, RuntimeError) as error:
                log.warning("cannot serve %s: %s", peer, error)
                sock.close()
                return
            self._connections.add(connection)

    def close(self) -> None:
        """Stop serving and let go of everything. Idempotent."""
        with self._lock:
            listener, self._listener = self._listener, None
            connections, self._connections = self._connections, set()
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        if self._acceptor is not None:
            self._acceptor.join(_STOP_S)
            self._acceptor = None
        for connection in connections:
            connection.stop("the enclosure stops")
        deadline = time.monotonic() + _STOP_S
        for connection in connections:
            connection.thread.join(max(0.0, deadline - time.monotonic()))
        if self._rdma is not None:
            self._rdma.close()
            self._rdma = None
        self._release()

    def _release(self) -> None:
        for drive in self._drives.values():
            drive.close()
        self._drives.clear()
        if self._folder_lock is not None:
            os.close(self._folder_lock)
            self._folder_lock = None

    def __enter__(self) -> Enclosure:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- what it says of itself ---------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """The ready line: where it listens and what it offers."""
        return {
            "address": self.settings.address,
            "port": self.port,
            "transports": list(self.settings.transports),
            "nqn": self.subsystem.nqn,
            "namespaces": [
                {
                    "nsid": namespace.nsid,
                    "nguid": namespace.nguid.hex(),
                    "size": namespace.block_count * namespace.lba_bytes,
                    "lba_bytes": namespace.lba_bytes,
                }
                for namespace in self.subsystem.namespaces.values()
            ],
        }

    def stats(self) -> dict[str, Any]:
        """Counters of every drive, and who is connected."""
        with self._lock:
            alive = sum(connection.thread.is_alive() for connection in self._connections)
            accepted, refused = self._accepted, self._refused
            if self._rdma is not None:
                alive += self._rdma.connections
                accepted += self._rdma.accepted
                refused += self._rdma.refused
            drives = [
                drive.stats() | {"attached": self.is_attached(number)}
                for number, drive in self._drives.items()
            ]
        return {
            "nqn": self.subsystem.nqn,
            "uptime_s": time.monotonic() - self._started_at,
            "connections": alive,
            "connections_accepted": accepted,
            "connections_refused": refused,
            "controllers": [
                {"cntlid": each.cntlid, "host_nqn": each.host_nqn, "queues": sorted(each.queues)}
                for each in self.target.controllers
            ],
            "drives": drives,
        }


def derived_nguid(nqn: str, number: int) -> bytes:
    """The NGUID of a drive in memory: the same whenever the enclosure of that name starts."""
    return hashlib.sha256(f"g35 drive\0{nqn}\0{number}".encode()).digest()[:16]


def _lock_folder(folder: Path) -> int:
    """Two enclosures on one folder would write over each other."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EnclosureError(f"cannot use the folder {folder}: {error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise EnclosureError(f"another enclosure uses the folder {folder}") from error
    return fd


def _persistent_nguid(folder: Path, number: int, size: int, lba_bytes: int) -> bytes:
    """The NGUID beside a drive's file, made at random the first time.

    EnclosureError if the file beside it describes another drive than the one asked for.
    """
    path = folder / f"drive-{number:03d}.json"
    wanted = {"size": size, "lba_bytes": lba_bytes}
    try:
        if path.exists():
            known = json.loads(path.read_text())
            nguid = bytes.fromhex(known["nguid"])
            if len(nguid) != 16 or {key: known[key] for key in wanted} != wanted:
                raise EnclosureError(f"{path} describes a drive of {known.get('size')} bytes, not of {size}")
            return nguid
        nguid = os.urandom(16)
        write_atomically(path, json.dumps({"nguid": nguid.hex(), **wanted}) + "\n")
        return nguid
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EnclosureError(f"{path}: {error}") from error


def write_atomically(path: Path, text: str) -> None:
    """A reader finds the old file or the whole new one, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
