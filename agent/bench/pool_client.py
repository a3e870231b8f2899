"""A client of the bench as a process of its own, so that its cost can be told from all else.

    python -m agent.bench.pool_client mount PATH VALUE-BYTES
    python -m agent.bench.pool_client virtiofs SOCKET VALUE-BYTES     (plays QEMU and the guest's kernel, too)
    python -m agent.bench.pool_client file PATH VALUE-BYTES           (reads an ordinary file)

Each line on its standard input asks for one thing in JSON, each line on its standard output is the answer:

    {"do": "compare"}                  get every value and compare it; {"bytes_got": ...}
    {"do": "get", "seconds": 0.5}      four threads get values; see `Answer`
    {"do": "put", "seconds": 0.5}      four threads put values
"""

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from agent.bench.contents import Contents, pages
from agent.bench.floors import file_reads
from agent.bench.pool_probes import Gets, Puts, compare_all, values_got
from agent.bench.rounds import Timed, together
from agent.bench.sites import IN_FLIGHT, SESSIONS
from agent.bench.virtio_driver.guest_memory import PAGE_BYTES
from agent.bench.virtio_driver.machine import Machine, queues_offered
from agent.bench.virtiofs_files import VirtiofsFiles
from agent.errors import G35Error
from host_shim.pool import Pool, Volume

REQUEST_QUEUES_MAX = 8
SPARE_BYTES = 48 << 20
"""Guest memory besides the values: rings, desks and loans."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was done. `cpu_seconds`: user and system time of this process meanwhile, in the timed part."""

    operations: int
    bytes: int
    seconds: float
    cpu_seconds: float
    bytes_got: int
    bytes_put: int
    misses: int


class Work(ABC):
    """What a way in can do. It gets; a way that can put has a `put` of its own."""

    bytes_got = bytes_put = misses = 0

    @abstractmethod
    def compare(self) -> None:
        """Get everything, and compare it."""

    @abstractmethod
    def get(self, seconds: float) -> Timed:
        """Get for so long."""

    def compare_last(self) -> None:  # noqa: B027  # a way that compares as it gets has nothing left
        """Compare what the last gets brought, after the clock was stopped."""

    def put(self, seconds: float) -> Timed:
        raise G35Error("nothing is put by this way")


class PoolWork(Work):
    """A pool by host_shim; the values are set up and numbered as the probes do it (pool_probes.py)."""

    def __init__(self, pool: Pool, value_bytes: int, guest: Machine | None = None) -> None:
        self.bytes_got = self.bytes_put = self.misses = 0
        self.volume: Volume = pool.volume("kv")
        self._new_buffer = pages if guest is None else lambda size: guest.memory.room(size).view
        self._contents = Contents(value_bytes, None if guest is None else self._new_buffer)
        self._gets = Gets(self, self._contents, new_buffer=self._new_buffer)
        # Keys of its own: others put and delete values of the same pool.
        self._puts = Puts(self, self._contents, self._new_buffer(value_bytes), f"put {os.getpid()}")

    def compare(self) -> None:
        size = self._contents.value_bytes
        compare_all(self, self._contents, "get", values_got(size), self._new_buffer(size))

    def get(self, seconds: float) -> Timed:
        return self._gets.timed(seconds)

    def compare_last(self) -> None:
        self._gets.compare_last()

    def put(self, seconds: float) -> Timed:
        return self._puts.timed(seconds)


class FileWork(Work):
    """An ordinary file of as many bytes as the values that are got, read in pieces of their size."""

    def __init__(self, path: str, value_bytes: int) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        self._value_bytes = value_bytes
        count = values_got(value_bytes)
        self._turns = [
            file_reads(self._descriptor, range(first, count, IN_FLIGHT), pages(value_bytes))
            for first in range(IN_FLIGHT)
        ]

    def compare(self) -> None:
        contents, buffer = Contents(self._value_bytes), pages(self._value_bytes)
        for number in range(values_got(self._value_bytes)):
            os.preadv(self._descriptor, [buffer], number * self._value_bytes)
            if buffer != contents.value(number):
                raise G35Error(f"piece {number} of the file is not what was written")

    def get(self, seconds: float) -> Timed:
        return together([turn.__next__ for turn in self._turns], seconds)


@contextmanager
def way_in(way: str, path: str, value_bytes: int) -> Iterator[Work]:
    if way == "file":
        yield FileWork(path, value_bytes)
        return
    if way == "mount":
        with Pool(path, sessions=SESSIONS, parallel=1) as pool:
            yield PoolWork(pool, value_bytes)
        return
    room = (values_got(value_bytes) + 4) * value_bytes + (1 << 20)
    with started_machine(path, room + SPARE_BYTES) as machine:
        files = VirtiofsFiles(machine)
        with Pool("", sessions=SESSIONS, parallel=1, files=files) as pool:
            yield PoolWork(pool, value_bytes, machine)


@contextmanager
def started_machine(path: str, memory_bytes: int) -> Iterator[Machine]:
    """A machine with as many request queues as the device has, ready for requests."""
    request_queues = min(queues_offered(path) - 1, REQUEST_QUEUES_MAX)
    whole_pages = -(-memory_bytes // PAGE_BYTES) * PAGE_BYTES
    with Machine(path, memory_bytes=whole_pages, request_queues=request_queues) as machine:
        machine.start(patience=5.0)
        machine.client.init()
        yield machine
        machine.stop()


def answer_to(work: Work, asked: dict[str, Any]) -> Answer:
    got, put, misses = work.bytes_got, work.bytes_put, work.misses
    timed, taken = Timed(0, 0, 0.0), 0.0
    match asked["do"]:
        case "compare":
            work.compare()
        case "get":
            before = time.process_time()
            timed = work.get(float(asked["seconds"]))
            taken = time.process_time() - before
            work.compare_last()
        case "put":
            timed = work.put(float(asked["seconds"]))
        case other:
            raise G35Error(f"the bench asked its client for {other!r}")
    return Answer(
        timed.operations, timed.bytes, timed.seconds, taken,
        work.bytes_got - got, work.bytes_put - put, work.misses - misses,
    )  # fmt: skip


def answer_lines(work: Work, way: str) -> None:
    """Do what lines on the standard input ask for, until it ends."""
    print(json.dumps({"ready": way}), flush=True)
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = asdict(answer_to(work, json.loads(line)))
        except G35Error as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


def main() -> None:
    way, path, value_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with way_in(way, path, value_bytes) as work:
        answer_lines(work, way)


if __name__ == "__main__":
    main()
