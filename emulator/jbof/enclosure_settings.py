"""What an enclosure is to be: its drives, where it listens, who may connect. Checked before it is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from emulator.jbof.drive_folder import EnclosureError
from emulator.jbof.drive_model import DriveModelSettings
from emulator.jbof.kv_drive import UNIT_BYTES
from nvmeof.authentication.secret import Credentials
from nvmeof.controller.rdma_queue import RdmaSettings
from nvmeof.controller.settings import NAMESPACE_ID_LIMIT, ControllerSettings
from nvmeof.controller.tcp_rules import TcpSettings
from nvmeof.transport import TRANSPORTS

NQN_PREFIX: Final = "nqn.2026-01.io.g35:"
PORT_MAX: Final = 65535
MAX_PORTS: Final = 16
"""Listeners of one enclosure that were asked for by number."""


@dataclass(frozen=True, slots=True)
class EnclosureSettings:
    """`folder` None keeps the drives in memory; otherwise each is a sparse file in it.

    `drives` are of logical blocks; behind them come `kv_drives` of the KV command set, of the same size. In a
    folder, each KV drive is a folder of its own, with a file for every value.

    `name` makes the NQN where none is given, and the NGUIDs of drives in memory. With both transports the
    port of RDMA is that of TCP. RDMA makes an emulated device at `address`, which no other process may have.
    Hosts with `credentials`, by NQN, have to authenticate. With several `ports`, each is a TCP port (`port`
    and the next ones), and the subsystem reports how each reaches its namespaces (ANA).
    """

    drives: int = 1
    kv_drives: int = 0
    drive_bytes: int = 1 << 30
    folder: Path | None = None
    address: str = "127.0.0.1"
    port: int = 0
    name: str = "jbof"
    nqn: str | None = None
    lba_bytes: int = 4096
    allowed_hosts: frozenset[str] | None = None
    credentials: Mapping[str, Credentials] = field(default_factory=dict)
    model: DriveModelSettings = field(default_factory=DriveModelSettings)
    link_bytes_per_s: float = 0.0
    """Of the link that all drives share, each way; 0: as fast as the machine."""
    controller: ControllerSettings = field(default_factory=ControllerSettings)
    tcp: TcpSettings = field(default_factory=TcpSettings)
    rdma: RdmaSettings = field(default_factory=RdmaSettings)
    transports: tuple[str, ...] = ("tcp",)
    seed: int = 0
    prefault: bool = False
    bare: bool = False
    ports: int = 1

    def __post_init__(self) -> None:
        total = self.drives + self.kv_drives
        if min(self.drives, self.kv_drives) < 0 or total > NAMESPACE_ID_LIMIT:
            raise EnclosureError(f"an enclosure has 0 to {NAMESPACE_ID_LIMIT} drives, not {total}")
        if self.kv_drives and self.drive_bytes % UNIT_BYTES:
            raise EnclosureError(f"a KV drive's size is a multiple of {UNIT_BYTES} bytes")
        if not 0 <= self.link_bytes_per_s < float("inf"):
            raise EnclosureError("the rate of an enclosure's link is a number of 0 or more")
        if not self.transports or any(each not in TRANSPORTS for each in self.transports):
            raise EnclosureError(f"an enclosure is reached by {' or '.join(TRANSPORTS)}")
        if not 1 <= self.ports <= MAX_PORTS:
            raise EnclosureError(f"an enclosure has 1 to {MAX_PORTS} ports, not {self.ports}")
        if not self.address:
            raise EnclosureError("an enclosure listens at an address; 0.0.0.0 is all of this machine's")
        if not 0 <= self.port <= PORT_MAX:
            raise EnclosureError(f"a port is between 0 and {PORT_MAX}")
        if self.port and self.port + self.ports - 1 > PORT_MAX:
            last = PORT_MAX - self.ports + 1
            raise EnclosureError(f"of {self.ports} ports the first is {last} at the most, not {self.port}")
        if self.ports > 1 and (self.transports != ("tcp",) or self.bare):
            raise EnclosureError("several ports are of TCP, and of an enclosure that has its drives already")
        if self.lba_bytes not in (512, 4096):
            raise EnclosureError("a logical block has 512 or 4096 bytes")
        if self.drive_bytes <= 0 or self.drive_bytes % self.lba_bytes:
            raise EnclosureError(f"a drive's size is a multiple of {self.lba_bytes} bytes")

    @property
    def subsystem_nqn(self) -> str:
        return self.nqn or NQN_PREFIX + self.name
