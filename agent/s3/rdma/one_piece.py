"""A get by RDMA whose bytes are one piece: the thread that reads them also sends them on their way.

They are read into the memory that the device sends from, so nobody copies them. The thread waits for the end
of the transfer as long as it may wait for a client: then the event loop has nothing to wait for.
"""

from collections.abc import Callable

from awscrt import checksums

from agent.http.patience import Patience
from agent.s3.answers import Answer
from agent.s3.rdma.engine import BUFFER_BYTES, Connection, Staging, Transfer, TransferEngine, TransferFailed
from agent.s3.rdma.token import Memory


class OnePiece:
    """Made in the event loop for one get. `room` and `send` are for the thread that reads, while the loop
    waits for that; all else is the loop's. `close` it in any case."""

    def __init__(
        self,
        engine: TransferEngine,
        connection: Connection,
        memory: Memory,
        need: Callable[[], None],
        patience: Patience,
    ) -> None:
        """`need` raises TransferFailed where the client has gone."""
        self._engine, self._memory, self._need, self._patience = engine, memory, need, patience
        self._connection = connection
        self._staging: Staging | None = None
        self._transfer: Transfer = engine.transfer(connection)
        self._failed: TransferFailed | None = None
        self.crc = 0
        """CRC-64/NVME of the bytes."""
        self.has_begun = False
        """Whether `send` took the bytes; else somebody else has to send them."""

    def room(self, size: int) -> memoryview | None:
        """The memory for so many bytes, the same with every call; None where they are several pieces, too
        many for the client, or all of it is in use."""
        if not 0 < size <= min(BUFFER_BYTES, self._memory.length):
            return None
        if self._staging is None:
            self._staging = self._engine.take()
        return self._staging.view[:size] if self._staging is not None else None

    def send(self, answer: Answer, body: memoryview) -> None:
        """Begin to write `body` into the client's memory, where it lies in `room`."""
        staging = self._staging
        if staging is None or body.obj is not staging.view.obj:
            return
        self.has_begun = True
        self.crc = checksums.crc64nvme(body)
        try:
            self._need()
            self._engine.begin_write(
                self._transfer, staging, len(body), self._memory.address, self._memory.key
            )
        except TransferFailed as failed:
            self._failed = failed
        else:
            self._wait()

    def _wait(self) -> None:
        patience, connection = self._patience, self._connection
        began = patience.clock()
        seconds = patience.until() - began
        if seconds <= 0 or began < connection.no_wait_until:
            return
        if self._transfer.ended.wait(seconds):
            patience.waited(began)
        else:
            connection.no_wait_until = patience.waited_in_vain(began)

    async def sent(self) -> None:
        """Wait for the end of the transfer. Raises TransferFailed."""
        if self._failed is not None:
            raise self._failed
        await self._engine.finish(self._transfer)

    async def close(self) -> None:
        """Give the memory back, after the device has let go of it."""
        staging, self._staging = self._staging, None
        if staging is not None:
            try:
                await self._engine.abandon(self._transfer)
            finally:
                self._engine.give_back(staging)
