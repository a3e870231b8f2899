"""A request's body in large pieces, decoded, checked, of bounded length."""

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import trio

from agent.http.gil_yield import Rests
from agent.s3.checksums import BodyChecks
from agent.s3.chunked import WORDS, ChunkDecoder
from agent.s3.errors import S3Error
from agent.s3.signature import UNSIGNED, Signer
from agent.s3.xml_in import DOCUMENT_BYTES_MAX, RowsReader

PIECE_BYTES: Final = 1 << 20
"""For a worker at a time; a whole slot of the usual volume of blocks."""
CHECKED_BYTES: Final = 128 << 10
"""Of a document, hashed by the event loop at a time: four hashes in 1 ms."""
NOTHING_BYTES_MAX: Final = 16 << 10
"""Of a body that nobody reads."""


class Body:
    """One body. `receive` returns the next bytes, None at the end."""

    def __init__(
        self, headers: Mapping[str, str], signer: Signer, receive: Callable[[], Awaitable[bytes | None]]
    ) -> None:
        """Raises S3Error where the headers are contradictory or incomplete."""
        payload = signer.payload
        if payload not in WORDS and payload != UNSIGNED and len(payload) != 64:
            raise S3Error("InvalidArgument", "x-amz-content-sha256 is neither a hash nor a known word.")
        self._receive = receive
        self._decoder: ChunkDecoder | None = None
        length = headers.get("x-amz-decoded-content-length" if payload in WORDS else "content-length", "")
        if length and not (length.isascii() and length.isdecimal() and len(length) < 16):
            raise S3Error("InvalidArgument", "The length of the body is no number.")
        self.has_length = bool(length)
        self.length = int(length or 0)
        """Of the decoded data; 0 where none was announced."""
        if payload in WORDS:
            if not length:
                raise S3Error("MissingContentLength", "x-amz-decoded-content-length is missing.")
            self._decoder = ChunkDecoder(signer, self.length)
        elif not length and "transfer-encoding" in headers:
            raise S3Error("MissingContentLength", "Content-Length is missing.")
        self.checks = BodyChecks(headers, payload)
        self._room = memoryview(b"")
        self._pending: deque[memoryview] = deque()
        self._received = self._taken = 0
        self.is_over = False

    async def next_piece(self, most: int) -> memoryview | None:
        """The next `PIECE_BYTES` of the data, fewer at its end; None after that. Valid until the next call.

        The caller gives each to `checks`. The last one comes when the whole body is there. Raises S3Error;
        for a body of more than `most` bytes without reading it.
        """
        if self.is_over:
            return None
        if self.length > most:
            raise S3Error("EntityTooLarge", f"A body has {most} bytes at the most.", closes=True)
        if not self._room:
            self._room = memoryview(bytearray(min(self.length, PIECE_BYTES)))
        room, filled = self._room, 0
        while True:
            while self._pending:
                part = self._pending[0]
                count = min(len(part), len(room) - filled)
                room[filled : filled + count] = part[:count]
                filled, self._taken = filled + count, self._taken + count
                if count < len(part):
                    self._pending[0] = part[count:]
                else:
                    self._pending.popleft()
                if filled == len(room) and self._taken < self.length:
                    return room
            data = await self._receive()
            if data is None:
                self._end()
                return room[:filled] if filled else None
            for part in [memoryview(data)] if self._decoder is None else self._decoder.feed(data):
                self._received += len(part)
                if self._received > self.length:
                    raise S3Error("IncompleteBody", "The body is longer than was announced.", closes=True)
                if part:
                    self._pending.append(part)

    def _end(self) -> None:
        self.is_over = True
        if self._decoder is not None:
            self._decoder.finish()
        if self._received != self.length:
            raise S3Error("IncompleteBody", "The body is shorter than was announced.", closes=True)

    def check(self) -> None:
        """After the last piece: compare the data with the client's checksums. Raises S3Error."""
        self.checks.finish(self._decoder.trailers if self._decoder is not None else {})

    async def rows(self, root: str, row: str, rests: Rests) -> RowsReader:
        """The rows of an XML body, checked. Raises S3Error."""
        document, reader = await self._all(DOCUMENT_BYTES_MAX), RowsReader(root, row)
        await rests.work(reader.read(document))
        return reader

    async def nothing(self) -> None:
        """For an operation without a body: read and check a short one. Raises S3Error."""
        await self._all(NOTHING_BYTES_MAX)

    async def _all(self, most: int) -> bytes:
        found = bytearray()
        while (piece := await self.next_piece(most)) is not None:
            for at in range(0, len(piece), CHECKED_BYTES):
                self.checks.update(piece[at : at + CHECKED_BYTES])
                await trio.lowlevel.checkpoint()
            found += piece
        self.check()
        return bytes(found)
