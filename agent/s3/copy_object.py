"""CopyObject and UploadPartCopy: bytes from an object of the tenant into a new file, the file into the index.

A copy is a reader and a writer of this door at once, a piece at a time. It has the source as it was when
it was found, to its end, and is whole or absent. It has bytes of its own, which its tenant's quota counts.
A copy of an object onto itself changes what the index says of the object. It moves bytes for another checksum
alone, and never undoes what was acknowledged meanwhile.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import trio

from agent.http.connection import BrokenOff
from agent.http.shares import Shares
from agent.http.workers import Workers
from agent.pool.steps import Runner
from agent.s3.answers import Answer, xml_answer
from agent.s3.body import PIECE_BYTES
from agent.s3.checksums import BodyChecks
from agent.s3.copy_source import check_conditions, range_of, source_of
from agent.s3.errors import S3Error
from agent.s3.get_object import FIND_TRIES
from agent.s3.index import Part, Piece, StoredObject
from agent.s3.put_object import algorithm_of, kept_headers, only_new, part_number, upload_name
from agent.s3.requests import ALGORITHM, S3Request
from agent.s3.store import FileWriter, LostObject, ObjectReader, ObjectStore
from agent.s3.xml_out import Element, iso_time

_CHANGES: Final = frozenset({"x-amz-storage-class", "x-amz-server-side-encryption", ALGORITHM})
"""Headers that make a copy of an object onto itself a change, as S3 has it."""

COPY_TRIES: Final = 3
"""Of a copy of an object onto itself, which begins again where the object changes meanwhile."""


class _Copied(NamedTuple):
    """What an answer says of a copy."""

    etag: str
    checksum: str
    changed_ns: int


_Commit: TypeAlias = Callable[[_Copied, Piece], list[str] | None]
"""Makes the copy visible; the files that become spare. None where the copy is out of date. Raises S3Error."""


class _Copy:
    """One copy under way, from its first byte to its last. Used by one thread at a time."""

    def __init__(
        self, store: ObjectStore, runner: Runner, bucket: str, found: StoredObject, start: int, end: int,
        algorithm: str, commit: _Commit,
    ) -> None:  # fmt: skip
        """Of the bytes `start` to `end`; `algorithm` of a checksum, or none. Raises S3Error or LostObject."""
        self._store, self._bucket, self._found, self._commit = store, bucket, found, commit
        self._at, self._end = start, end
        self._checks = BodyChecks.computing(algorithm)
        self._room = memoryview(bytearray(min(PIECE_BYTES, end - start)))
        self._writer: FileWriter | None = None
        self._reader = ObjectReader(store, found)
        try:
            self._writer = FileWriter(store, runner)
        except BaseException:
            self._reader.close(runner)
            raise

    def step(self, runner: Runner) -> _Copied | None:
        """Copy a piece; after the last one make the copy visible.

        Raises S3Error, or LostObject where the copy is out of date.
        """
        assert self._writer is not None, "the copy is not over"
        piece = self._room[: self._end - self._at]
        try:
            self._reader.read(runner, self._at, piece)
        except LostObject:
            self._store.give_up(runner, self._bucket, self._found)
            raise _no_source() from None
        self._checks.update(piece)
        self._writer.write(runner, piece)
        self._at += len(piece)
        if self._at < self._end:
            return None
        written = self._writer.finish(runner)
        copied = _Copied(self._checks.md5, self._checks.checksum, time.time_ns())
        spare = self._commit(copied, written)
        if spare is None:
            raise LostObject("the object changed while it was copied onto itself")
        committed, self._writer = self._writer, None
        committed.keep(runner)
        self._store.discard(runner, spare)
        return copied

    def close(self, runner: Runner) -> None:
        """Let both ends go; a file that was not committed is removed."""
        try:
            self._reader.close(runner)
        finally:
            if self._writer is not None:
                self._writer.drop(runner)


class ObjectCopies:
    """CopyObject and UploadPartCopy of all tenants."""

    def __init__(self, workers: Workers, transfers: Shares, body_max: int) -> None:
        self._workers = workers
        self._transfers = transfers
        self._body_max = body_max

    async def copy(self, store: ObjectStore, request: S3Request) -> Answer:
        bucket, key = source = source_of(request.headers)
        is_itself = (bucket, key) == (request.bucket, request.key)
        own = None
        if request.headers.get("x-amz-metadata-directive", "").upper() == "REPLACE":
            own = kept_headers(request.headers)
        if is_itself and own is None and not _CHANGES.intersection(request.headers):
            message = "A copy of an object onto itself, without a change of its metadata, is none."
            raise S3Error("InvalidRequest", message)
        is_new, wanted = only_new(request.headers), request.headers.get(ALGORITHM, "").lower()
        await self._workers.ask(store, lambda: store.index.check_bucket(request.bucket))

        def commit(found: StoredObject, copied: _Copied, piece: Piece) -> list[str] | None:
            headers = found.headers if own is None else own
            new = StoredObject(
                request.key, piece.size, copied.etag, copied.changed_ns, 0, headers, copied.checksum
            )
            if is_itself:
                # A put, a removal or other headers may have been acknowledged since: they stay.
                return store.index.replace(bucket, found, new, piece)
            return store.index.put(request.bucket, new, [piece], only_new=is_new)

        def begin(runner: Runner, found: StoredObject) -> _Copy | _Copied | None:
            check_conditions(request.headers, found)
            known = found.checksum.partition(":")[0]
            if is_itself and is_new:
                raise S3Error("PreconditionFailed", "There is such an object already.")
            if is_itself and wanted in ("", known):
                headers = found.headers if own is None else own
                new = replace(found, headers=headers, changed_ns=time.time_ns())
                if not store.index.describe(bucket, new):
                    return None
                return _Copied(new.etag, new.checksum, new.changed_ns)
            self._check_size(found.size)
            algorithm, commit_this = wanted or known, partial(commit, found)
            return _Copy(store, runner, bucket, found, 0, found.size, algorithm, commit_this)

        copied = await self._carry_out(store, request, source, begin, rests=is_itself)
        return _described("CopyObjectResult", copied)

    async def copy_part(self, store: ObjectStore, request: S3Request) -> Answer:
        bucket, _ = source = source_of(request.headers)
        number, name = part_number(request.parameters["partNumber"]), upload_name(request)
        announced = await algorithm_of(self._workers, store, request, name)

        def commit(copied: _Copied, piece: Piece) -> list[str]:
            part = Part(number, piece, copied.etag, copied.changed_ns, copied.checksum)
            return store.index.put_part(name, part)

        def begin(runner: Runner, found: StoredObject) -> _Copy:
            check_conditions(request.headers, found)
            start, end = range_of(request.headers, found.size)
            self._check_size(end - start)
            return _Copy(store, runner, bucket, found, start, end, announced, commit)

        return _described("CopyPartResult", await self._carry_out(store, request, source, begin))

    async def _carry_out(
        self,
        store: ObjectStore,
        request: S3Request,
        source: tuple[str, str],
        begin: Callable[[Runner, StoredObject], _Copy | _Copied | None],
        *,
        rests: bool = False,
    ) -> _Copied:
        """Find the source, a bucket and a key, and copy it a piece a job, so that other tenants have a turn.

        `begin` returns None, or raises LostObject, for a source that was replaced since it was found. `rests`
        where it changes names alone. Raises S3Error, or BrokenOff where the client is gone.
        """

        def first(runner: Runner) -> _Copy | _Copied:
            for _ in range(FIND_TRIES):
                found = store.index.find(*source)
                try:
                    begun = begin(runner, found)
                except LostObject:
                    continue
                if begun is not None:
                    return begun
            raise _no_source()

        with await self._transfers.take(store):
            for _ in range(COPY_TRIES):
                begun = await self._workers.run(store, first, first=True, rests=rests)
                if isinstance(begun, _Copied):
                    return begun
                with contextlib.suppress(LostObject):
                    return await self._to_its_end(store, request, begun)
            raise S3Error("ServiceUnavailable", "The object changes again and again. Please try again.")

    async def _to_its_end(self, store: ObjectStore, request: S3Request, begun: _Copy) -> _Copied:
        """Raises LostObject where the copy is out of date at its end, and what `_carry_out` raises."""
        try:
            copied = None
            while copied is None:
                # A job that has begun is not cancelled, so between two of them the copy has to look itself.
                await trio.lowlevel.checkpoint_if_cancelled()
                if request.is_client_gone():
                    raise BrokenOff("the client of a copy is gone")
                copied = await self._workers.run(store, begun.step)
            return copied
        finally:
            await self._workers.run(store, begun.close)

    def _check_size(self, size: int) -> None:
        if size > self._body_max:
            message = f"A copy has {self._body_max} bytes at the most. Copy a larger object in parts."
            raise S3Error("InvalidRequest", message)


def _described(name: str, copied: _Copied) -> Answer:
    algorithm, _, value = copied.checksum.partition(":")
    content: list[Element] = [
        ("LastModified", iso_time(copied.changed_ns)), ("ETag", f'"{copied.etag}"')
    ]  # fmt: skip
    if algorithm:
        content.append(("Checksum" + algorithm.upper(), value))
    return xml_answer(name, content)


def _no_source() -> S3Error:
    return S3Error("NoSuchKey", "There is no such object.")
