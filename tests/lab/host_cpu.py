"""What a read costs the GPU host: seconds of its CPU for each GiB, by way of reading. Runs in the guest.

    g35 host -- .venv/bin/python tests/lab/host_cpu.py

Reads of 1 MiB from the device's mount, as a file and as a value, beside files of the guest's own: in a
tmpfs, on a loop device with ext4, and of the machine by 9p. CPU is what /proc/stat says of all cores that
they were not idle, so interrupts and kernel threads count. The guest is emulated as a rule: compare the
rows, not with other machines; and the agent's own CPU is not in here.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from host_shim.pool import Pool

MIB = 1 << 20
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KEY = b"the host's CPU  "


@dataclass(frozen=True, slots=True)
class Cost:
    """One row: bytes read, the wall clock, and the guest's CPU meanwhile."""

    way: str
    gib: float
    seconds: float
    cpu_seconds: float

    @property
    def cpu_s_per_gib(self) -> float:
        return self.cpu_seconds / self.gib


def busy_seconds() -> float:
    """CPU time of all cores that was neither idle nor waiting for I/O, since the boot."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / TICKS_PER_S


def measured(way: str, read_once: Callable[[], int], seconds: float) -> Cost:
    """Repeat `read_once` (which says how many bytes it has read) for so long."""
    read_once()
    started, busy, total = time.monotonic(), busy_seconds(), 0
    while time.monotonic() - started < seconds:
        total += read_once()
    return Cost(way, total / (1 << 30), time.monotonic() - started, busy_seconds() - busy)


def reader(path: Path, *, direct: bool = False, drop: bool = False) -> Callable[[], int]:
    """Read the whole file in steps of 1 MiB: past the guest's cache, or through it, emptied before."""

    def read_once() -> int:
        if drop:
            Path("/proc/sys/vm/drop_caches").write_text("1")
        buffer = mmap.mmap(-1, MIB)
        descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            total = 0
            while step := os.preadv(descriptor, [buffer], total):
                total += step
            return total
        finally:
            os.close(descriptor)
            buffer.close()

    return read_once


def all_costs(mount: Path, mebibytes: int, seconds: float) -> list[Cost]:
    """All rows. What it makes in the pool it removes; the rest is in the guest's memory."""
    content = os.urandom(MIB) * mebibytes
    local, image, on_disk = (
        Path("/dev/shm", name) for name in ("host-cpu", "host-cpu-image", "host-cpu-disk")
    )
    on_device, machine = mount / "fs" / "host-cpu", Path("/run/g35/host-cpu")
    on_disk.mkdir(exist_ok=True)
    image.touch()
    os.truncate(image, (2 * mebibytes + 16) * MIB)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, on_disk], check=True)
    try:
        for path in (local, on_disk / "file", on_device, machine):
            path.write_bytes(content)
        os.sync()
        costs = [
            measured("tmpfs", reader(local), seconds),
            measured("ext4 on a loop device, direct", reader(on_disk / "file", direct=True), seconds),
            measured("9p", reader(machine), seconds),
            measured("virtio-fs file, direct", reader(on_device, direct=True), seconds),
            measured("virtio-fs file, through the cache", reader(on_device, drop=True), seconds),
        ]
        with Pool(mount) as pool:
            volume = pool.volume("kv")
            volume.put(KEY, content[:MIB])
            buffer = bytearray(MIB)

            def get_many() -> int:
                return sum(volume.get_into(KEY, buffer) or 0 for _ in range(mebibytes))

            if get_many() != mebibytes * MIB:
                raise SystemExit("error: the pool missed a value that was just stored")
            costs.append(measured("virtio-fs value, host_shim", get_many, seconds))
            volume.delete([KEY])
        return costs
    finally:
        subprocess.run(["umount", on_disk], check=True)
        for path in (local, image, on_device, machine):
            path.unlink(missing_ok=True)


def record(costs: list[Cost]) -> list[dict[str, Any]]:
    """The rows for JSON."""
    return [{**asdict(cost), "cpu_s_per_gib": cost.cpu_s_per_gib} for cost in costs]


def table(costs: list[Cost]) -> str:
    """The rows as text; ratios to the first."""
    lines = [f"{'1 MiB reads':36} {'CPU s/GiB':>10} {'of tmpfs':>9} {'MiB/s':>8}"]
    for cost in costs:
        ratio = cost.cpu_s_per_gib / max(costs[0].cpu_s_per_gib, 1e-9)
        speed = 1024 * cost.gib / cost.seconds
        lines.append(f"{cost.way:36} {cost.cpu_s_per_gib:10.2f} {ratio:9.1f} {speed:8.0f}")
    return "\n".join(lines)


def main() -> None:
    words = argparse.ArgumentParser(description="CPU of the GPU host for each GiB that it reads.")
    words.add_argument("--mount", type=Path, default=Path("/mnt/g35"))
    words.add_argument("--mebibytes", type=int, default=32, help="size of the files; default 32")
    words.add_argument(
        "--seconds", type=float, default=2.0, help="for each row; /proc/stat counts in hundredths; default 2"
    )
    words.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = words.parse_args()
    if os.environ.get("G35_LAB_GUEST") != "1":
        sys.exit("error: this measures the lab's guest; run it by: g35 host -- ...")
    costs = all_costs(chosen.mount, chosen.mebibytes, chosen.seconds)
    print(json.dumps(record(costs), indent=2) if chosen.json else table(costs))


if __name__ == "__main__":
    main()
