"""The RDMA device of the S3 door: staging memory, transfers, and the thread that waits for their completions.

A transfer is posted in the door's event loop, or by the thread that read the bytes. The loop waits for it as
for a job of a worker, and the thread `s3-rdma` waits for completions while transfers are under way. So a
client that does not answer holds no worker, but for the few milliseconds of agent/http/patience.py. It holds
a piece of staging memory, until the time of its transfer is over. Then the queue pair is broken off, which
ends everything on it at once. A buffer is used again only after the completion of its transfer, or after the
end of its queue pair.

A device that fails once is not used again: the thread ends what is under way, and `lost` says why.
"""

import logging
import mmap
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import trio

from nvmeof.errors import ConnectionLost
from nvmeof.rdma.work import (
    FLUSHED,
    Access,
    Done,
    Read,
    Region,
    Span,
    Work,
    WorkKind,
    Write,
    describe_status,
    work_id,
)
from nvmeof.transport.rdma_direct import DirectDevice, DirectPair, PairEnd
from nvmeof.transport.rdma_pair import poll
from nvmeof.transport.verbs_provider import load_verbs

log = logging.getLogger(__name__)

BUFFER_BYTES: Final = 1 << 20
"""Of one transfer: a piece of a body, as over HTTP."""
ROOM: Final = 1
"""Transfers of one queue pair at once: it has one request at a time, whose pieces go in turn."""
TRANSFER_SECONDS: Final = 16.0
"""For 1 MiB: the least rate of a body over HTTP."""
FLUSH_SECONDS: Final = 2.0
"""From the end of a queue pair to the completions of its transfers, which the device writes by itself."""
SLICE_SECONDS: Final = 1.0
"""The thread looks whether it should end at least so often."""
REMOTE_ACCESS: Final = (9, 10)
"""Remote invalid request, remote access error: the client's device refused."""
UNREACHABLE: Final = (12, 13)
"""Transport or receiver-not-ready retries exceeded: nobody answered."""


_LATE: Final = "the client did not answer in time"


class TransferFailed(Exception):
    """A transfer did not happen, or only in part. Its connection is over.

    `refused`: the client's own device refused it. `late`: nobody answered in time.
    """

    def __init__(self, why: str, *, refused: bool = False, late: bool = False) -> None:
        super().__init__(why)
        self.refused = refused
        self.late = late


class Connection:
    """A queue pair that is connected to a client's."""

    def __init__(self, pair: DirectPair) -> None:
        self.pair = pair
        self._over = ""
        self.no_wait_until = 0.0
        """Threads do not wait for the client before."""
        self._lock = threading.Lock()
        """Held while the queue pair is posted to, or ends."""

    @property
    def end(self) -> PairEnd:
        return self.pair.end

    def over(self) -> str:
        """Why it is over; empty while it is not."""
        return self._over

    def post(self, work: Work) -> None:
        """In any thread. Raises TransferFailed; then the connection is over."""
        with self._lock:
            why = self._over
            if not why:
                try:
                    self.pair.pair.post([], [work])
                    return
                except ConnectionLost as lost:
                    why = str(lost)
        self.break_off(why)
        raise TransferFailed(why)

    def break_off(self, why: str) -> None:
        with self._lock:
            if not self._over:
                self._over = why
                self.pair.break_off()

    def close(self) -> None:
        """A queue pair that is gone reaches no memory. `break_off` comes before."""
        with self._lock:
            self.pair.close()


class Transfer:
    """One work request, from before it is posted. Made in the event loop."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection = connection
        self.number = number
        self.work_id = 0
        """Of the work request; 0: none was posted."""
        self.done = trio.Event()
        self.ended = threading.Event()
        """As `done`, for threads."""
        self.status = FLUSHED
        self._token = trio.lowlevel.current_trio_token()

    def finish(self, status: int) -> None:
        """In any thread."""
        self.status = status
        self.ended.set()
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self.done.set)


class TransferEngine:
    """See the top of this file. Its methods are for the door's event loop."""

    def __init__(self, provider: str, address: str, buffers: int, connections: int) -> None:
        """`buffers` of staging memory, 1 MiB each. Raises `VerbsUnavailable` or `ConnectionLost`."""
        self.address = address
        self._verbs = load_verbs(provider)
        self._memory = mmap.mmap(-1, buffers * BUFFER_BYTES)
        # Registered once: a registration for each transfer costs more than the copy.
        self._device = DirectDevice(self._verbs, address, entries=(connections + 1) * (ROOM + 1))
        try:
            view = memoryview(self._memory)
            self._region: Region | None = self._device.domain.register(view, Access.LOCAL_WRITE)
        except BaseException:
            self._device.close()
            raise
        starts = range(0, buffers * BUFFER_BYTES, BUFFER_BYTES)
        first, lkey = self._region.address, self._region.lkey
        self._free = [Staging(view[at : at + BUFFER_BYTES], first + at, lkey) for at in starts]
        self._waiting = trio.lowlevel.ParkingLot()
        """For a piece of memory."""
        self._count = 0
        self._changed = threading.Condition()
        self._under_way: dict[int, Transfer] = {}
        """By the number of their work request."""
        self._lost = ""
        self._stopping = False
        self._thread = threading.Thread(target=self._complete, name="s3-rdma", daemon=True)

    @property
    def lost(self) -> str:
        """Why the device is of no use any more; empty while it is of use."""
        return self._lost

    @property
    def transfers(self) -> int:
        """How many are under way."""
        return len(self._under_way)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """The connections are closed. Idempotent."""
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        region, self._region = self._region, None
        if region is not None:
            self._device.domain.deregister(region)
        self._device.close()

    def connect(self, peer: PairEnd) -> Connection:
        """A connection to a client's queue pair. In any thread. Raises `ConnectionLost`."""
        pair = self._device.make_pair(room=ROOM)
        try:
            pair.connect(peer)
        except BaseException:
            pair.close()
            raise
        return Connection(pair)

    def disconnect(self, connection: Connection) -> None:
        """Its transfers end as failed."""
        connection.break_off("the connection was closed")
        connection.close()
        # Their completions went with the queue pair.
        with self._changed:
            ended = [each for each in self._under_way.values() if each.connection is connection]
        for each in ended:
            each.finish(FLUSHED)

    @asynccontextmanager
    async def buffer(self) -> AsyncIterator["Staging"]:
        """A piece of staging memory. There is one for each body that moves, so the wait is short."""
        while (staging := self.take()) is None:
            await self._waiting.park()
        try:
            yield staging
        finally:
            self.give_back(staging)

    def take(self) -> "Staging | None":
        """A piece of staging memory, if one is free, in any thread: until `give_back`, in the event loop."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def give_back(self, staging: "Staging") -> None:
        self._free.append(staging)
        self._waiting.unpark()

    def transfer(self, connection: Connection) -> Transfer:
        """One that `begin_write` may begin. In the event loop."""
        self._count = (self._count + 1) & 0xFFFFFFFF
        return Transfer(connection, self._count)

    def begin_write(
        self, transfer: Transfer, staging: "Staging", length: int, address: int, key: int
    ) -> None:
        """As `write`, in any thread, without waiting for its end: the event loop has to `finish` or `abandon`
        it."""
        number = work_id(WorkKind.WRITE, transfer.number)
        self._begin(transfer, Write(number, staging.span(length), address, key, signaled=True))

    async def write(
        self, connection: Connection, staging: "Staging", length: int, address: int, key: int
    ) -> None:
        """RDMA WRITE of the first `length` bytes into the client's memory. Raises TransferFailed."""
        transfer = self.transfer(connection)
        self.begin_write(transfer, staging, length, address, key)
        await self.finish(transfer)

    async def read(
        self, connection: Connection, staging: "Staging", length: int, address: int, key: int
    ) -> None:
        """RDMA READ of `length` bytes of the client's memory. Raises TransferFailed."""
        transfer = self.transfer(connection)
        number = work_id(WorkKind.READ, transfer.number)
        self._begin(transfer, Read(number, staging.span(length), address, key))
        await self.finish(transfer)

    def _begin(self, transfer: Transfer, work: Work) -> None:
        with self._changed:
            if self._lost:
                raise TransferFailed(self._lost)
            self._under_way[work.work_id] = transfer
        try:
            transfer.connection.post(work)
        except BaseException:
            self._forget(work.work_id)
            raise
        transfer.work_id = work.work_id
        # After the post, in which the thread would only contend for the device and the interpreter.
        with self._changed:
            self._changed.notify()

    async def finish(self, transfer: Transfer) -> None:
        """Wait for the end of one that was begun. Raises TransferFailed."""
        connection = transfer.connection
        try:
            if not transfer.done.is_set():
                with trio.move_on_after(TRANSFER_SECONDS):
                    await transfer.done.wait()
        finally:
            await self.abandon(transfer)
        if transfer.status:
            words = describe_status(transfer.status)
            late = transfer.status in UNREACHABLE or connection.over() == _LATE
            connection.break_off(words)
            raise TransferFailed(words, refused=transfer.status in REMOTE_ACCESS, late=late)

    async def abandon(self, transfer: Transfer) -> None:
        """Take the buffer back from the device, whatever the client does. Idempotent."""
        try:
            if transfer.work_id and not transfer.done.is_set():
                await self._end(transfer.connection, transfer)
        finally:
            self._forget(transfer.work_id)
            transfer.work_id = 0

    async def _end(self, connection: Connection, transfer: Transfer) -> None:
        connection.break_off(_LATE)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + FLUSH_SECONDS):
            await transfer.done.wait()
        if not transfer.done.is_set():
            connection.close()

    def _forget(self, number: int) -> None:
        with self._changed:
            self._under_way.pop(number, None)

    def _complete(self) -> None:
        """The thread: hand completions to those who wait for them."""
        completions = self._device.completions
        while True:
            with self._changed:
                while not self._under_way and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
            try:
                found = poll(self._verbs, completions)
                if not found:
                    if completions.needs_arming:
                        completions.arm()
                        found = poll(self._verbs, completions)
                    if not found:
                        completions.wait(time.monotonic() + SLICE_SECONDS)
                        continue
            except (ConnectionLost, self._verbs.error) as lost:
                self._give_up(str(lost))
                return
            self._hand_over(found)

    def _give_up(self, why: str) -> None:
        """End what is under way; the owner of the connections closes them."""
        log.error("objects move by RDMA no more until the agent is started again: the device failed: %s", why)
        with self._changed:
            self._lost = why
            ended = list(self._under_way.values())
        for each in ended:
            each.finish(FLUSHED)

    def _hand_over(self, found: list[tuple[int, Done]]) -> None:
        for _, done in found:
            with self._changed:
                transfer = self._under_way.get(done.work_id)
            if transfer is not None:
                transfer.finish(done.status)


class Staging:
    """A piece of staging memory. `view` has `BUFFER_BYTES`."""

    def __init__(self, view: memoryview, address: int, lkey: int) -> None:
        self.view = view
        self._address = address
        self._lkey = lkey

    def span(self, length: int) -> Span:
        assert length <= BUFFER_BYTES
        return Span(self._address, length, self._lkey)
