"""`Machine`: memory, queues, front-end and connection in one, as QEMU and a guest with a virtiofs mount are.

A machine outlives its device: `lose` is a dead back-end as seen from here, `start` again finds the next one,
which answers the requests of the dead one.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from agent.bench.virtio_driver.connection import BackEndGone, Connection
from agent.bench.virtio_driver.front_end import FEATURES, PROTOCOL_FEATURES, FrontEnd, asking_for_queues
from agent.bench.virtio_driver.fuse_client import FuseClient
from agent.bench.virtio_driver.guest_memory import GuestMemory
from agent.bench.virtio_driver.request_queue import RequestQueue

URGENT_QUEUE_SIZE = 128
QUEUE_SIZE = 1024
RETRY_SECONDS = 0.02


class Machine:
    """A guest of one device. `memory_bytes`: one size, or one for each region."""

    def __init__(
        self,
        path: Path | str,
        *,
        request_queues: int = 1,
        memory_bytes: int | Sequence[int] = 16 << 20,
        queue_size: int = QUEUE_SIZE,
        features: int = FEATURES,
        protocol_features: int = PROTOCOL_FEATURES,
        pages: bool = True,
        first: int = 0,
    ) -> None:
        """`first`: the number that its rings begin at.

        `pages`: whether data are named page by page, as Linux does it, or in one run.
        """
        self.path = path
        sizes = (memory_bytes,) if isinstance(memory_bytes, int) else memory_bytes
        self.memory = GuestMemory(*sizes)
        self.queues = [
            RequestQueue(self.memory, index, queue_size if index else URGENT_QUEUE_SIZE, first=first)
            for index in range(1 + request_queues)
        ]
        self.front_end = FrontEnd(
            self.memory, self.queues, features=features, protocol_features=protocol_features
        )
        self.client = FuseClient(self.memory, self.queues, pages=pages)
        self.connection: Connection | None = None
        self._closed = False

    def start(self, patience: float = 0.0) -> None:
        """Connect and set everything up; `patience`: seconds in which a device may yet appear or be free.

        Raises BackEndGone, and BackEndFault where the back-end will not have us.
        """
        end = time.monotonic() + patience
        while True:
            try:
                self.connection = self._connected()
                break
            except BackEndGone:
                if time.monotonic() > end:
                    raise
                time.sleep(RETRY_SECONDS)
        # What was kicked or answered while nobody was there: both sides look once.
        for queue in self.queues:
            queue.kick_now()
            queue.wake()

    def _connected(self) -> Connection:
        connection = Connection(self.path)
        try:
            connection.run(self.front_end.starting())
        except BaseException:
            connection.close()
            raise
        return connection

    def stop(self) -> dict[int, int]:
        """Stop the rings as a guest's reset or shutdown does, and hang up; where each ring begins again."""
        if self.connection is None:
            return {}
        try:
            return self.connection.run(self.front_end.stopping())
        finally:
            self.lose()

    def lose(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def close(self) -> None:
        """Hang up and give back memory and eventfds. Once: a second time there is nothing left to do."""
        self.lose()
        if self._closed:
            return
        self._closed = True
        self.front_end.close()
        for queue in self.queues:
            queue.close()
        self.memory.close()

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def queues_offered(path: Path | str) -> int:
    """How many queues the device has, the high-priority one among them. It is asked and left."""
    with Connection(path) as connection:
        return connection.run(asking_for_queues())
