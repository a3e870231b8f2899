"""Connects to an enclosure and disconnects, many times, and says what of it stays behind.

    python -m tests.support.nvme.connect_leak [--transport tcp|rdma] [--connects 10000]

The enclosure is a process of its own, this one is the host. Each time a controller is opened with its admin
queue, an I/O queue is connected, a block is read, and both are closed. After a tenth of them, when pools and
caches have their size, and again at the end, file descriptors, threads and resident memory of both are noted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from nvmeof.host import commands
from nvmeof.transport import connect_io_queue
from nvmeof.transport.controller import Controller
from tests.support.nvme.nvme_ends import HOST, HOST_ID
from tests.support.nvme.transport_ways import Way
from tests.support.processes import Processes

LBA_BYTES = 4096
SETTLED_SECONDS = 20.0
_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a process holds at a time."""

    descriptors: int
    threads: int
    resident: int

    @classmethod
    def of(cls, process_id: int) -> Holdings:
        folder = Path("/proc", str(process_id))
        return cls(
            len(list((folder / "fd").iterdir())),
            len(list((folder / "task").iterdir())),
            int((folder / "statm").read_text().split()[1]) * _PAGE_BYTES,
        )

    def is_more_than(self, before: Holdings) -> bool:
        """Of what can leak one by one."""
        return self.descriptors > before.descriptors or self.threads > before.threads


@dataclass(frozen=True, slots=True)
class Outcome:
    """Host and enclosure after the first tenth of `connects`, and after all."""

    connects: int
    seconds: float
    host: tuple[Holdings, Holdings]
    enclosure: tuple[Holdings, Holdings]

    def leaks(self) -> list[str]:
        """Descriptors and threads that stayed."""
        return [
            f"the {name} holds {after.descriptors} descriptors and {after.threads} threads "
            f"where it held {before.descriptors} and {before.threads}"
            for name, (before, after) in (("host", self.host), ("enclosure", self.enclosure))
            if after.is_more_than(before)
        ]

    def lines(self) -> list[str]:
        return [
            f"{name}: descriptors {before.descriptors} -> {after.descriptors}, threads {before.threads} -> "
            f"{after.threads}, resident {before.resident >> 10:,} -> {after.resident >> 10:,} KiB"
            for name, (before, after) in (("host", self.host), ("enclosure", self.enclosure))
        ]


def connect_often(transport: str, connects: int, folder: Path) -> Outcome:
    """Do it `connects` times (10 or more), with the enclosure's files in `folder`."""
    way, processes = Way(transport), Processes(folder)
    try:
        ready = folder / "jbof.json"
        enclosure = processes.g35(
            "jbof", "--name", "leak", "--drives", "1", "--drive-size", "16M", "--address", way.address,
            "--transport", transport, "--allow-host", HOST, "--ready-file", ready,
        )  # fmt: skip
        enclosure.wait_for_line("ready", 60)
        where = json.loads(ready.read_text())
        began = time.monotonic()
        before: tuple[Holdings, Holdings] | None = None
        for count in (connects // 10, connects - connects // 10):
            trio.run(_connect, way, where["port"], where["nqn"], count)
            after = _settled(lambda: (Holdings.of(os.getpid()), Holdings.of(enclosure.pid)), before)
            before = before or after
        assert before is not None
        (host_before, theirs_before), (host_after, theirs_after) = before, after
        return Outcome(
            connects, time.monotonic() - began, (host_before, host_after), (theirs_before, theirs_after)
        )
    finally:
        processes.end_all()


async def _connect(way: Way, port: int, nqn: str, count: int) -> None:
    buffer = memoryview(bytearray(LBA_BYTES))
    for _ in range(count):
        async with way.open_controller(
            port, nqn, HOST, HOST_ID, keep_alive_s=30.0, io_queues=1, connect_timeout_s=20.0
        ) as controller:
            # It holds up the admin queue meanwhile, which has nothing to do.
            _read_a_block(controller, buffer)


def _read_a_block(controller: Controller, buffer: memoryview) -> None:
    queue = connect_io_queue(controller.info, 1, 16, 20.0)
    try:
        command = commands.read(1, 0, 1, buffer)
        queue.submit(command)
        if not queue.wait(command, time.monotonic() + 20.0) or command.status:
            raise AssertionError(f"a block could not be read: {command.failure()}")
    finally:
        queue.close()


def _settled(
    note: Callable[[], tuple[Holdings, Holdings]], before: tuple[Holdings, Holdings] | None
) -> tuple[Holdings, Holdings]:
    """What is held once it no longer becomes less, or once it is no more than `before`: the peer hears of the
    last disconnect a little later, on a busy machine after two equal looks."""
    gc.collect()
    end = time.monotonic() + SETTLED_SECONDS
    least = note()
    while time.monotonic() < end:
        if before is not None and not any(map(Holdings.is_more_than, least, before)):
            break
        time.sleep(0.1)
        now = note()
        if before is None and [each.descriptors + each.threads for each in now] == [
            each.descriptors + each.threads for each in least
        ]:
            return now
        least = now
    return least


def main(words: Sequence[str] | None = None) -> int:
    """0 where nothing stayed."""
    parser = argparse.ArgumentParser(description="Connect and disconnect, many times.")
    parser.add_argument("--transport", choices=("tcp", "rdma"), default="tcp")
    parser.add_argument("--connects", type=int, default=10_000)
    chosen = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="g35-connects-") as folder:
        outcome = connect_often(chosen.transport, chosen.connects, Path(folder))
    print(f"{outcome.connects:,} connects over {chosen.transport} in {outcome.seconds:.1f} s")
    print(*outcome.lines(), *outcome.leaks(), sep="\n")
    return 1 if outcome.leaks() else 0


if __name__ == "__main__":
    sys.exit(main())
