"""The processor time of what no design can leave out, each part alone: the floors of a get and of a put.

Bytes have to be sent and received, pass the cipher once, and be copied by the kernel once where they cross a
mount. Each part is done here with nothing around it, by the calls that are cheapest for it, in values of the
same size and out of as much memory. Left out on purpose: asking for a value, finding it, waking anybody.
"""

import functools
import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Protocol

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from agent.bench.contents import Contents, pages
from agent.bench.meter import ProcessMeter
from agent.bench.one_file import READY_NAME
from agent.bench.processor_time import process_seconds
from agent.bench.raw_tcp_server import ASK, BEGIN, drive_blocks
from agent.bench.rounds import Turn, metered, together
from agent.bench.sites import IN_FLIGHT, Sites
from agent.errors import G35Error
from agent.inline.cipher_suites import PROOF_BYTES
from nvmeof.transport.page_sender import LEAST_BYTES, pays_here
from nvmeof.transport.socket_options import set_options

NONCE_BYTES = 12
BOUND_BYTES = 64
"""What is authenticated beside a unit: who wrote it, and where (agent/pool/format/sealed_slot.py)."""
ENDS = ("send", "receive")
DATAGRAM_SECONDS_MIN = 0.3
ASKED_BYTES = 16 << 20
"""Blocks that the sender is asked for at a time: the asking should not show."""


class Part(Protocol):
    """Work of one kind. `measure` does it for about `seconds`: microseconds a value, by their names."""

    def prepare(self) -> None: ...

    def measure(self, seconds: float) -> dict[str, float]: ...


class StreamPart:
    """One TCP stream between two processes: `send` and `receive`, of the cheapest way that there is.

    On loopback the kernel delivers in the sender's name, so the two are to be read as a sum.
    """

    def __init__(
        self, sites: Sites, block_bytes: int, values: int, *, from_bytes: int = 0, into_bytes: int = 0
    ) -> None:
        """Of blocks that hold so many values. They come out of so much memory, one behind the other, and go
        into so much; 0: always the same block."""
        self._sites, self._bytes, self._values = sites, block_bytes, values
        self._from_bytes, self._into_bytes = from_bytes or block_bytes, into_bytes or block_bytes
        self._streams: list[socket.socket] = []
        self._received = memoryview(b"")

    def prepare(self) -> None:
        ways = [False, True] if self._bytes >= LEAST_BYTES and pays_here() else [False]
        self._into = itertools.cycle(drive_blocks(self._bytes, self._into_bytes))
        for by_reference in ways:
            stream = socket.create_connection(("127.0.0.1", self._sites.raw_tcp_port), timeout=30)
            self._sites.at_end(stream.close)
            self._streams.append(stream)
            set_options(stream)
            stream.settimeout(None)
            stream.sendall(BEGIN.pack(self._bytes, self._from_bytes, by_reference))
            self._move(stream)
            if self._received != Contents(self._bytes).value(0):
                raise G35Error("the raw TCP server sent something else than its block")

    def measure(self, seconds: float) -> dict[str, float]:
        share = seconds / len(self._streams)
        return min(
            (self._way(stream, share) for stream in self._streams), key=lambda found: sum(found.values())
        )

    def _way(self, stream: socket.socket, seconds: float) -> dict[str, float]:
        server, here = self._sites.raw_tcp_pid, os.getpid()
        moved, end = 0, time.perf_counter() + seconds
        sent, received = process_seconds(server), process_seconds(here)
        while not moved or time.perf_counter() < end:
            moved += self._move(stream)
        sent, received = process_seconds(server) - sent, process_seconds(here) - received
        each = 1e6 / (moved * self._values)
        return {"send": sent * each, "receive": received * each}

    def _move(self, stream: socket.socket) -> int:
        """Ask for some blocks and receive them; how many."""
        count = max(1, ASKED_BYTES // self._bytes)
        stream.sendall(ASK.pack(count))
        for _ in range(count):
            self._received = next(self._into)
            if stream.recv_into(self._received, self._bytes, socket.MSG_WAITALL) != self._bytes:
                raise G35Error("the raw TCP server ended")
        return count


class DatagramPart:
    """Bare UDP between two processes, in bursts by segmentation offload, of the emulated NIC's size."""

    def __init__(self, value_bytes: int) -> None:
        self._bytes = value_bytes

    def prepare(self) -> None:
        """Nothing: the program that measures it starts its processes itself."""

    def measure(self, seconds: float) -> dict[str, float]:
        command = [sys.executable, "-P", "-m", "emulator.roce.bench"]
        command += ["--seconds", str(max(seconds, DATAGRAM_SECONDS_MIN)), "udp_gso"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            record = json.loads(ran.stdout)
            return {end: float(record[f"{end}_us_per_mib"]) * self._bytes / (1 << 20) for end in ENDS}
        except (ValueError, KeyError, TypeError):
            said = ran.stderr.strip() or repr(ran.stdout)
            raise G35Error(f"bare datagrams were not measured: {said}") from None


class CipherPart:
    """One pass of AES-256-GCM over a value, in one call of our library: `cipher`."""

    def __init__(self, value_bytes: int, *, opens: bool) -> None:
        self._opens = opens
        self._aead = AESGCM(secrets.token_bytes(32))
        self._nonce, self._bound = secrets.token_bytes(NONCE_BYTES), secrets.token_bytes(BOUND_BYTES)
        self._plain, self._into = Contents(value_bytes).value(0), pages(value_bytes)
        self._sealed = pages(value_bytes + PROOF_BYTES)

    def prepare(self) -> None:
        # The same nonce each time: nobody gets to see what is sealed here.
        self._aead.encrypt_into(self._nonce, self._plain, self._bound, self._sealed)
        self._aead.decrypt_into(self._nonce, self._sealed, self._bound, self._into)
        if self._into != self._plain:
            raise G35Error("what was sealed did not open to what it was")

    def measure(self, seconds: float) -> dict[str, float]:
        nonce, bound = self._nonce, self._bound
        if self._opens:
            work, text, into = self._aead.decrypt_into, self._sealed, self._into
        else:
            work, text, into = self._aead.encrypt_into, self._plain, self._sealed
        return {"cipher": _each(lambda: work(nonce, text, bound, into), seconds)}


class CopyPart:
    """One copy of a value by the kernel, from pages in memory to a buffer of the process: `copy`.

    It is a read of a file in memory. A FUSE request copies as much, and wakes two processes for it.
    """

    def __init__(self, value_bytes: int) -> None:
        self._into = pages(value_bytes)

    def prepare(self) -> None:
        self.measure(0.0)
        if self._into != Contents(len(self._into)).value(0):
            raise G35Error("a file in memory did not return what was written to it")

    def measure(self, seconds: float) -> dict[str, float]:
        file = os.memfd_create("g35-bench-copy", os.MFD_CLOEXEC)
        try:
            os.pwrite(file, Contents(len(self._into)).value(0), 0)
            return {"copy": _each(lambda: os.preadv(file, [self._into], 0), seconds)}
        finally:
            os.close(file)


class MountPart:
    """A value across a mount, and nothing else: `mount`, of both processes.

    Our door answers a READ at once with what lies in its memory, or drops what a WRITE brought. So this is
    the kernel's copy, its pages and wake-ups, and the door. Four threads ask, as on the path.
    """

    def __init__(self, sites: Sites, value_bytes: int, *, reads: bool) -> None:
        self._sites, self._bytes, self._reads = sites, value_bytes, reads

    def prepare(self) -> None:
        path = self._sites.memory_file.with_name(READY_NAME.decode())
        file = os.open(path, os.O_RDONLY if self._reads else os.O_WRONLY)
        self._sites.at_end(lambda: os.close(file))
        move = os.preadv if self._reads else os.pwritev
        self._turns: list[Turn] = [
            functools.partial(move, file, [pages(self._bytes)], 0) for _ in range(IN_FLIGHT)
        ]

    def measure(self, seconds: float) -> dict[str, float]:
        meter = ProcessMeter({"door": self._sites.memory_mount_pid})
        with metered(meter):
            ran = together(self._turns, seconds)
        if ran.bytes != ran.operations * self._bytes:
            raise G35Error("the mount from memory moved less than it was asked for")
        return {"mount": sum(meter.spent.values()) * 1e6 / ran.operations}


def _each(work: Callable[[], object], seconds: float) -> float:
    """Microseconds of this thread's processor time for one call."""
    count, end = 0, time.perf_counter() + seconds
    began = time.thread_time()
    while True:
        for _ in range(8):
            work()
        count += 8
        if time.perf_counter() >= end:
            return (time.thread_time() - began) * 1e6 / count
