"""GetObject and HeadObject: find an object, read its first piece before a byte is sent, then the rest.

Every piece was verified by the pool (agent/pool/read/get.py), so a sent byte is a stored byte. An object that
cannot be read is NoSuchKey before the first byte, and the end of the connection after it.
"""

import re
from collections.abc import Callable, Hashable
from functools import partial
from typing import Final, Protocol

import trio

from agent.http.connection import BrokenOff, http_time
from agent.http.shares import Place, Shares
from agent.http.workers import Workers
from agent.pool.steps import Runner
from agent.s3.answers import Answer, Send
from agent.s3.body import PIECE_BYTES
from agent.s3.checksums import PREFIX
from agent.s3.counters import S3Counters
from agent.s3.errors import S3Error
from agent.s3.index import StoredObject
from agent.s3.requests import Operation, S3Request, byte_range
from agent.s3.store import LostObject

_PRINTABLE = re.compile(r"[!-~](?:[ -~]*[!-~])?")
FIND_TRIES: Final = 4
"""An object that is replaced during each look-up is not there for this reader."""
ROOM_BYTES_MIN: Final = 128 << 10
"""Less is not worth a whole room."""
ROOMS_KEPT: Final = 8
"""Rooms that nobody uses."""


class Reading(Protocol):
    """The bytes of one object as it was when it was found. Used by one thread at a time."""

    def read(self, runner: Runner, offset: int, into: memoryview) -> None:
        """Fill `into`. Raises LostObject, or S3Error where the bytes may come back."""

    def close(self, runner: Runner) -> None:
        """Idempotent."""


class Objects(Hashable, Protocol):
    """The objects of a tenant, for who reads them. Safe from any thread."""

    def find(self, bucket: str, key: str) -> StoredObject:
        """Raises S3Error."""

    def open(self, bucket: str, key: str) -> tuple[StoredObject, Reading]:
        """Raises S3Error, and LostObject where it was replaced meanwhile."""

    def give_up(self, runner: Runner, bucket: str, found: StoredObject) -> None:
        """Bytes of it are lost."""


class ObjectStream:
    """The bytes `start` to `end` of an object. `first` is its first piece, read already."""

    def __init__(
        self,
        reads: "ObjectReads",
        store: Objects,
        reader: Reading | None,
        start: int,
        end: int,
        first: memoryview,
        lost: Callable[[Runner], None],
        place: Place,
    ) -> None:
        """`reader`: None where `first` is all. `lost` is called where the bytes are gone for good; `place` is
        given back at the end."""
        self._reads = reads
        self._workers = reads.workers
        self._counters = reads.counters
        self._store = store
        self._reader = reader
        self._start = start
        self._end = end
        self._first = first
        self._lost = lost
        self._place = place
        self._closed = False
        self._rooms = [first]
        """The memory that its pieces are read into."""
        self.length = end - start

    async def send(self, send: Send) -> None:
        try:
            current = self._first
            at = self._start + len(current)
            if at == self._end:
                await send(current)
                return
            await self._send_rest(send, current, at)
        finally:
            await self.close()

    async def _send_rest(self, send: Send, current: memoryview, at: int) -> None:
        other = self._reads.rooms.take(PIECE_BYTES)
        self._rooms.append(other)
        while current:
            # Neither a job that has begun nor bytes that the kernel takes at once see that the door stops.
            await trio.lowlevel.checkpoint_if_cancelled()
            following = other[: min(PIECE_BYTES, self._end - at)]
            # The sending of a piece and the reading of the next one overlap.
            lost: list[Exception] = []
            unsent: Exception | None = None
            async with trio.open_nursery() as nursery:
                if following:
                    nursery.start_soon(self._read_on, following, at, lost)
                try:
                    await send(current)
                except Exception as error:  # kept out of the nursery, which would wrap it
                    unsent = error
            if unsent is not None:
                raise unsent
            if lost:
                self._counters.bodies_broken_off += 1
                raise BrokenOff(str(lost[0]))
            at += len(following)
            current, other = following, memoryview(current.obj)

    async def _read_on(self, into: memoryview, offset: int, lost: list[Exception]) -> None:
        def read(runner: Runner) -> None:
            assert self._reader is not None, "there is more than the first piece"
            try:
                self._reader.read(runner, offset, into)
            except LostObject:
                # The next reader gets NoSuchKey before the first byte, and may store the object again.
                self._lost(runner)
                raise

        try:
            await self._workers.run(self._store, read)
        except (LostObject, S3Error) as error:
            lost.append(error)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                if self._reader is not None:
                    await self._workers.run(self._store, self._reader.close)
            finally:
                # Nobody reads into them any more: a job that has begun is always waited for.
                self._reads.rooms.give_back(self._rooms)
                self._place.give_back()


class Rooms:
    """Memory for pieces, which is used again: a MiB that is new costs 256 page faults. Safe from any thread.

    A body holds two rooms at the most, so all of them are within the bound of `s3.transfers`.
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def __len__(self) -> int:
        """How many nobody uses."""
        return len(self._free)

    def take(self, size: int) -> memoryview:
        """Memory that nobody else has, of up to `PIECE_BYTES`; its contents are arbitrary."""
        if size < ROOM_BYTES_MIN:
            return memoryview(bytearray(size))
        try:
            room = self._free.pop()
        except IndexError:
            room = bytearray(PIECE_BYTES)
        return memoryview(room)[:size]

    def give_back(self, rooms: list[memoryview]) -> None:
        """Nobody has a use of them any more. A second call does nothing."""
        while rooms:
            room = rooms.pop().obj
            if isinstance(room, bytearray) and len(room) == PIECE_BYTES and len(self._free) < ROOMS_KEPT:
                self._free.append(room)


class ObjectReads:
    """GetObject and HeadObject of all tenants."""

    def __init__(self, workers: Workers, counters: S3Counters, transfers: Shares) -> None:
        self.workers = workers
        self.counters = counters
        self.rooms = Rooms()
        self._transfers = transfers

    async def head(self, store: Objects, request: S3Request) -> Answer:
        found = await self.workers.ask(store, lambda: store.find(request.bucket, request.key))
        _check_conditions(request, found)
        return _described(request, found, _wanted(request, found))

    async def get(self, store: Objects, request: S3Request) -> Answer:
        place = await self._transfers.take(store)
        try:
            begin = partial(self._begin, store, request, place)
            return await self.workers.run(store, begin, first=True)
        except BaseException:
            place.give_back()
            raise

    def _begin(self, store: Objects, request: S3Request, place: Place, runner: Runner) -> Answer:
        for _ in range(FIND_TRIES):
            try:
                found, opened = store.open(request.bucket, request.key)
            except LostObject:
                continue
            reader: Reading | None = opened
            try:
                _check_conditions(request, found)
                part = _wanted(request, found)
                answer = _described(request, found, part)
                start, end = part or (0, found.size)
                first = self._room(request, end - start)
                opened.read(runner, start, first)
                if len(first) == end - start:
                    # Nothing more is read, so that no other job has to close it.
                    reader = None
                    opened.close(runner)
            except LostObject:
                opened.close(runner)
                store.give_up(runner, request.bucket, found)
                continue
            except BaseException:
                opened.close(runner)
                raise
            lost = partial(store.give_up, bucket=request.bucket, found=found)
            answer.stream = ObjectStream(self, store, reader, start, end, first, lost, place)
            if reader is None and request.send_at_once is not None:
                request.send_at_once(answer, first)
            return answer
        raise S3Error("NoSuchKey", "There is no such object.")

    def _room(self, request: S3Request, length: int) -> memoryview:
        """Memory for the first piece of a body."""
        if request.room is not None and length <= PIECE_BYTES:
            found = request.room(length)
            if found is not None:
                return found
        return self.rooms.take(min(PIECE_BYTES, length))


def _wanted(request: S3Request, found: StoredObject) -> tuple[int, int] | None:
    header = request.headers.get("range", "")
    if not header or request.operation not in (Operation.GET_OBJECT, Operation.HEAD_OBJECT):
        return None
    if (condition := request.headers.get("if-range")) is not None and condition != f'"{found.etag}"':
        return None
    return byte_range(header, found.size)


def _check_conditions(request: S3Request, found: StoredObject) -> None:
    match, none_match = request.headers.get("if-match"), request.headers.get("if-none-match")
    if match is not None and not names(match, found.etag):
        raise S3Error("PreconditionFailed", "If-Match names another object.")
    if none_match is not None and names(none_match, found.etag):
        raise S3Error("NotModified", "", headers=_validators(found))


def _validators(found: StoredObject) -> list[tuple[str, str]]:
    return [("etag", f'"{found.etag}"'), ("last-modified", http_time(found.changed_ns))]


def names(condition: str, etag: str) -> bool:
    """Whether an If-Match or If-None-Match names the ETag."""
    tags = [each.strip().removeprefix("W/").strip('"') for each in condition.split(",")]
    return "*" in tags or etag in tags


def _described(request: S3Request, found: StoredObject, part: tuple[int, int] | None) -> Answer:
    headers = {"content-type": "binary/octet-stream", **found.headers}
    for name, value in request.parameters.items():
        if name.startswith("response-"):
            if not _PRINTABLE.fullmatch(value):
                raise S3Error("InvalidArgument", f"{name} is no value of a header.")
            headers[name.removeprefix("response-")] = value
    answer = Answer(200, list(headers.items()))
    answer.headers += [*_validators(found), ("accept-ranges", "bytes")]
    answer.length = found.size
    if part is not None:
        answer.status, answer.length = 206, part[1] - part[0]
        answer.headers.append(("content-range", f"bytes {part[0]}-{part[1] - 1}/{found.size}"))
    elif found.checksum and request.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED":
        name, _, value = found.checksum.partition(":")
        answer.headers += [(PREFIX + name, value), ("x-amz-checksum-type", "FULL_OBJECT")]
    return answer
