"""The Linux kernel's nvmet as NVMe/TCP or NVMe/RDMA target, set up through configfs. Only in the lab's guest.

Backing devices are null_blk disks that keep what is written in memory.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from types import TracebackType

NVMET = Path("/sys/kernel/config/nvmet")
NULL_BLK = Path("/sys/kernel/config/nullb")
ADDRESS = "127.0.0.1"


def make_disk(disk: Path, mebibytes: int = 16, block_bytes: int = 4096) -> Path:
    """Make a null_blk disk of the folder `disk` below `NULL_BLK`; its device."""
    disk.mkdir()
    for name, value in (("memory_backed", 1), ("size", mebibytes), ("blocksize", block_bytes)):
        (disk / name).write_text(str(value))
    (disk / "power").write_text("1")
    device = Path("/dev/nullb" + (disk / "index").read_text().strip())
    return device if device.exists() else Path("/dev", disk.name)  # newer kernels name it after its folder


def remove_disk(disk: Path) -> None:
    """The opposite; a disk that is gone already is no error."""
    with contextlib.suppress(FileNotFoundError):
        (disk / "power").write_text("0")
        disk.rmdir()


class KernelTarget:
    """One subsystem on one port of nvmet. A context manager: leaving it takes everything down again."""

    def __init__(
        self,
        nqn: str = "nqn.2026-01.lab:nvmet",
        *,
        port: int = 4420,
        allow_any_host: bool = True,
        inline_bytes: int | None = None,
        address: str = ADDRESS,
        transport: str = "tcp",
    ) -> None:
        self.nqn = nqn
        self.port = port
        self.address = address
        self._subsystem = NVMET / "subsystems" / nqn
        self._port = NVMET / "ports" / str(port)
        self._link = self._port / "subsystems" / nqn
        self._disks: dict[int, Path] = {}
        self._hosts: list[Path] = []
        self._subsystem.mkdir()
        try:
            (self._subsystem / "attr_allow_any_host").write_text("1" if allow_any_host else "0")
            self._port.mkdir()
            for name, value in (
                ("addr_trtype", transport),
                ("addr_adrfam", "ipv4"),
                ("addr_traddr", address),
                ("addr_trsvcid", str(port)),
            ):
                (self._port / name).write_text(value)
            if inline_bytes is not None:
                (self._port / "param_inline_data_size").write_text(str(inline_bytes))
            self.offer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> KernelTarget:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add_namespace(self, nsid: int, mebibytes: int = 16, block_bytes: int = 4096) -> uuid.UUID:
        """Add a namespace on a fresh disk and enable it; returns its NGUID. A connected host gets an AER."""
        self._disks[nsid] = disk = NULL_BLK / f"lab{self.port}_{nsid}"
        device = make_disk(disk, mebibytes, block_bytes)
        nguid = uuid.uuid5(uuid.NAMESPACE_URL, f"{self.nqn}/{nsid}")
        namespace = self._subsystem / "namespaces" / str(nsid)
        namespace.mkdir()
        (namespace / "device_path").write_text(str(device))
        (namespace / "device_nguid").write_text(str(nguid))
        (namespace / "enable").write_text("1")
        return nguid

    def remove_namespace(self, nsid: int) -> None:
        """Take a namespace away, as pulling a drive would. A connected host gets an AER."""
        namespace = self._subsystem / "namespaces" / str(nsid)
        with contextlib.suppress(FileNotFoundError):
            (namespace / "enable").write_text("0")
            namespace.rmdir()
        remove_disk(self._disks.pop(nsid))

    def allow_host(self, host_nqn: str) -> None:
        host = NVMET / "hosts" / host_nqn
        host.mkdir(exist_ok=True)
        self._hosts.append(host)
        (self._subsystem / "allowed_hosts" / host_nqn).symlink_to(host)

    def authenticate(
        self, host_nqn: str, secret: str, own_secret: str = "", *, hash_name: str, group: str
    ) -> None:
        """Have an allowed host prove itself from now on, and, with `own_secret`, be ready to do so too."""
        host = NVMET / "hosts" / host_nqn
        (host / "dhchap_hash").write_text(f"hmac({hash_name})")
        (host / "dhchap_dhgroup").write_text(group)
        (host / "dhchap_key").write_text(secret)
        if own_secret:
            (host / "dhchap_ctrl_key").write_text(own_secret)

    def offer(self) -> None:
        """Let hosts connect; true from the beginning."""
        self._link.symlink_to(self._subsystem)

    def withdraw(self) -> None:
        """End all connections and take no new ones; the disks keep their contents."""
        with contextlib.suppress(FileNotFoundError):
            self._link.unlink()

    def close(self) -> None:
        """Without connections first, nothing is in use any more."""
        self.withdraw()
        for nsid in list(self._disks):
            self.remove_namespace(nsid)
        for host in self._hosts:
            (self._subsystem / "allowed_hosts" / host.name).unlink(missing_ok=True)
            host.rmdir()
        for folder in (self._port, self._subsystem):
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()
