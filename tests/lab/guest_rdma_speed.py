"""RDMA WRITE of 64 KiB, emulator to emulator beside rxe to rxe: two processes each, the same program.

Figures of an emulated machine: only their ratio says something, and nothing is asserted of it. Both are
between two processes of the guest: rxe hands packets to itself without a device, the emulator has loopback.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.lab.rdma_cable import KERNEL, RXE, Cable, inside
from tests.support.processes import Processes

EMULATOR = "emulator.roce.pyverbs"
END_S = 360.0


def figure(processes: Processes, folder: Path, *ends: tuple[str, str, str]) -> float:
    """MiB/s between two ends: package, device, address; the first one writes."""
    folder.mkdir()
    started = [
        processes.python("-m", "tests.support.roce.write_figure", *end, folder, role)
        for end, role in zip(ends, ("active", "passive"), strict=True)
    ]
    for each in started:
        assert each.process.wait(END_S) == 0, each.output
    return float(json.loads((folder / "figure").read_text())) / (1 << 20)


@pytest.mark.nightly  # it asserts no figure
def test_write_64k(
    cable: Cable,
    processes: Processes,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    cable.set_mtu(4200)
    try:
        rxe = figure(processes, tmp_path / "rxe", *[("pyverbs", RXE, KERNEL)] * 2)
    finally:
        cable.set_mtu()
    with inside():  # where rxe does not have the UDP port of all addresses
        emulator = figure(
            processes,
            tmp_path / "emulator",
            (EMULATOR, "roce0", "127.0.0.2"),
            (EMULATOR, "roce1", "127.0.0.3"),
        )
    ratio = emulator / rxe
    record_property("roce_write_64k", {"emulator": emulator, "rxe": rxe, "ratio": ratio})
    print(f"WRITE of 64 KiB: emulator {emulator:.1f} MiB/s, rxe {rxe:.1f} MiB/s, ratio {ratio:.2f}")
