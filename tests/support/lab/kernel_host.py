"""The Linux kernel as NVMe/TCP and NVMe/RDMA host, driven by nvme-cli and seen through sysfs. Only inside the
lab's guest.

The guest has no udev: device nodes come from devtmpfs, and their names from the kernel alone.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_until

HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:35353535-0000-4000-8000-353535353535"
HOST_ID = "35353535-0000-4000-8000-353535353535"
# Emulated, a command takes ten times as long as usual.
COMMAND_TIMEOUT_S = 240

BLOCK_DEVICE = re.compile(r"nvme\d+n\d+")


def run(*command: str | Path, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Run a program; its standard output. Raises AssertionError with what it said if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        words = " ".join(str(word) for word in command)
        raise AssertionError(f"{words}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def kernel_log() -> str:
    """The guest kernel's messages, for the text of a failure."""
    return run("dmesg")


def discover(port: int, address: str = "127.0.0.1", transport: str = "tcp") -> list[dict[str, Any]]:
    """The records of the discovery log page, as `nvme discover` prints them in JSON."""
    said = run("nvme", "discover", *_where(port, address, transport), "-o", "json")
    records: list[dict[str, Any]] = json.loads(said)["records"]
    return records


@dataclass(frozen=True, slots=True)
class KernelController:
    """One controller that the kernel is connected to, e.g. `nvme0`."""

    name: str

    @property
    def device(self) -> Path:
        return Path("/dev", self.name)

    @property
    def state(self) -> str:
        """As the driver calls it: live, connecting, resetting, ... or `gone`."""
        return self.attribute("state") or "gone"

    def attribute(self, name: str) -> str:
        """A sysfs attribute of the controller; empty if there is none (any more)."""
        return _read(Path("/sys/class/nvme", self.name, name))

    def identify(self) -> dict[str, Any]:
        """Identify Controller, decoded by nvme-cli."""
        fields: dict[str, Any] = json.loads(run("nvme", "id-ctrl", self.device, "-o", "json"))
        return fields

    def identify_namespace(self, nsid: int) -> dict[str, Any]:
        """Identify Namespace, decoded by nvme-cli."""
        fields: dict[str, Any] = json.loads(run("nvme", "id-ns", self.device, "-n", str(nsid), "-o", "json"))
        return fields

    def namespaces(self) -> dict[int, Path]:
        """Namespace id -> block device, for those that the kernel offers at this moment."""
        nqn, found = self.attribute("subsysnqn"), {}
        for disk in Path("/sys/block").iterdir():
            # With native multipathing the disk hangs below the subsystem, otherwise below the controller.
            if BLOCK_DEVICE.fullmatch(disk.name) and _read(disk / "device" / "subsysnqn") == nqn:
                nsid = _read(disk / "nsid")
                if nsid and Path("/dev", disk.name).exists():
                    found[int(nsid)] = Path("/dev", disk.name)
        return found

    def wait_for_state(self, state: str, seconds: float = 240) -> None:
        wait_until(lambda: self.state == state, seconds, f"{self.name} to become {state}")

    def wait_for_namespace(self, nsid: int, seconds: float = 120) -> Path:
        return wait_until(lambda: self.namespaces().get(nsid), seconds, f"namespace {nsid}") or Path()

    def wait_for_no_namespace(self, nsid: int, seconds: float = 120) -> None:
        wait_until(lambda: nsid not in self.namespaces(), seconds, f"namespace {nsid} to go")

    def disconnect(self) -> None:
        run("nvme", "disconnect", "-d", self.name)
        wait_until(lambda: self.state == "gone", 120, f"{self.name} to go")


def connect(
    nqn: str,
    port: int,
    *options: str,
    digests: bool = False,
    address: str = "127.0.0.1",
    queues: int = 2,
    host_nqn: str = HOST_NQN,
    transport: str = "tcp",
) -> KernelController:
    """`nvme connect`; returns when the controller is live. Raises AssertionError with what nvme-cli said."""
    before = _controllers()
    run(
        *("nvme", "connect", *_where(port, address, transport, host_nqn), "-n", nqn, "-i", str(queues)),
        *(("--hdr-digest", "--data-digest") if digests else ()),
        *options,
    )
    fresh = [
        KernelController(name)
        for name in _controllers() - before
        if KernelController(name).attribute("subsysnqn") == nqn
    ]
    assert len(fresh) == 1, f"one new controller expected, not {fresh}"
    fresh[0].wait_for_state("live")
    return fresh[0]


def disconnect_all() -> None:
    """End every connection, also those that are trying to come back."""
    run("nvme", "disconnect-all")
    wait_until(lambda: not _controllers(), 240, "all controllers to go")


def drop_caches() -> None:
    """Forget clean pages, so that the next read goes to the device."""
    run("sync")
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def _controllers() -> set[str]:
    folder = Path("/sys/class/nvme")
    return {entry.name for entry in folder.iterdir()} if folder.exists() else set()


def _where(port: int, address: str, transport: str, host_nqn: str = HOST_NQN) -> tuple[str, ...]:
    return ("-t", transport, "-a", address, "-s", str(port), "-q", host_nqn, "-I", HOST_ID)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
