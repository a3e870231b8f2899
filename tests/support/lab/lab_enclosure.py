"""Our enclosure as a process of the guest, for the kernel's host and for ours; disks read past the cache."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.support.lab import kernel_host
from tests.support.lab.kernel_host import KernelController, run
from tests.support.lab.rdma_cable import OURS, inside
from tests.support.processes import Processes, Started

MEBIBYTE: Final = 1 << 20
DRIVE_BYTES: Final = 48 * MEBIBYTE
# Emulated, Python takes half a minute to start, and several times as long beside other tests.
START_S: Final = 480.0


@dataclass(frozen=True, slots=True)
class RunningEnclosure:
    """An enclosure's process, what it said when it was ready, and its control socket."""

    process: Started
    address: str
    port: int
    nqn: str
    namespaces: list[dict[str, Any]]
    control: Path
    transport: str

    def connect(self, *options: str, digests: bool = False) -> KernelController:
        return kernel_host.connect(
            self.nqn,
            self.port,
            *options,
            digests=digests,
            address=self.address,
            transport=self.transport,
        )


def start_enclosure(processes: Processes, folder: Path, *options: str | Path) -> RunningEnclosure:
    control = folder / "control"
    process = processes.python(
        *("-m", "emulator.jbof", "--drive-size", str(DRIVE_BYTES), "--control", control), *options
    )
    ready = json.loads(process.wait_for_line("ready ", START_S).removeprefix("ready "))
    return RunningEnclosure(
        process,
        ready["address"],
        ready["port"],
        ready["nqn"],
        ready["namespaces"],
        control,
        ready["transports"][0],
    )


def start_at_the_far_end(
    processes: Processes, folder: Path, *options: str | Path, address: str = OURS
) -> RunningEnclosure:
    """By RDMA on an emulated NIC at the cable's other end."""
    with inside():
        return start_enclosure(processes, folder, "--transport", "rdma", "--address", address, *options)


def read_directly(device: Path, blocks: int, skip: int = 0) -> bytes:
    """Read 4 KiB blocks past the page cache, in one command as far as the limits allow."""
    file = Path("/tmp/read-directly")
    run(
        *("dd", f"if={device}", f"of={file}", "bs=1M", f"count={blocks * 4096}", f"skip={skip * 4096}"),
        "iflag=direct,count_bytes,skip_bytes",
    )
    return file.read_bytes()


def write_directly(device: Path, content: bytes, seek: int = 0) -> None:
    """Write past the page cache, in one command as far as the limits allow."""
    file = Path("/tmp/write-directly")
    file.write_bytes(content)
    run("dd", f"if={file}", f"of={device}", "bs=1M", f"seek={seek}", "oflag=direct", "conv=notrunc,fsync")
