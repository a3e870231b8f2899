"""PutObject and the parts of a multipart upload: a body into a file, the file into the index.

The index names a file only after its last byte was sealed and all checksums of the client matched. Until then
nobody sees it, and a writer that dies leaves a spare file, which the next opening removes.
"""

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

from agent.http.gil_yield import STEP_ROWS, Rests, with_rests
from agent.http.shares import Shares
from agent.http.workers import Workers
from agent.pool.steps import Runner
from agent.s3.answers import Answer, xml_answer
from agent.s3.body import Body
from agent.s3.checksums import PREFIX
from agent.s3.counters import S3Counters
from agent.s3.errors import S3Error
from agent.s3.index import PARTS_MAX, Part, Piece, StoredObject, Upload
from agent.s3.part_checksums import FULL, whole_checksum
from agent.s3.requests import S3Request
from agent.s3.store import FileWriter, ObjectStore
from agent.s3.xml_out import Element

PART_BYTES_MIN: Final = 5 << 20
"""Of every part but the last, as with S3."""
OBJECT_BYTES_MAX: Final = 5 << 40
HEADERS_BYTES_MAX: Final = 4096
KEPT: Final = ("content-type", "cache-control", "content-disposition", "content-language", "expires")
Commit: TypeAlias = Callable[[Piece], list[str]]
"""Makes a file visible; the files that become spare. Raises S3Error."""
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ObjectWrites:
    """The writing operations, for all tenants."""

    def __init__(
        self, workers: Workers, counters: S3Counters, transfers: Shares, body_max: int, rests: Rests
    ) -> None:
        self._workers = workers
        self._counters = counters
        self._transfers = transfers
        self._body_max = body_max
        self._rests = rests

    async def put(self, store: ObjectStore, request: S3Request, body: Body) -> Answer:
        _need_length(body)
        headers = kept_headers(request.headers)
        is_new = only_new(request.headers)
        await self._workers.ask(store, lambda: store.index.check_bucket(request.bucket))

        def commit(piece: Piece) -> list[str]:
            new = StoredObject(
                request.key, piece.size, body.checks.md5, time.time_ns(), 0, headers, body.checks.checksum
            )
            return store.index.put(request.bucket, new, [piece], only_new=is_new)

        await self._into_file(store, body, commit)
        return _written(body)

    async def put_part(self, store: ObjectStore, request: S3Request, body: Body) -> Answer:
        _need_length(body)
        number, name = part_number(request.parameters["partNumber"]), upload_name(request)
        announced = await algorithm_of(self._workers, store, request, name)
        if announced and body.checks.algorithm not in ("", announced):
            message = f"The parts of this upload have {announced}, and this one {body.checks.algorithm}."
            raise S3Error("InvalidRequest", message)

        def commit(piece: Piece) -> list[str]:
            part = Part(number, piece, body.checks.md5, time.time_ns(), body.checks.checksum)
            return store.index.put_part(name, part)

        await self._into_file(store, body, commit)
        return _written(body)

    async def _into_file(self, store: ObjectStore, body: Body, commit: Commit) -> None:
        """Write the body to a file and commit it. A body of one piece is one job."""
        writer: FileWriter | None = None

        def add(piece: memoryview, runner: Runner) -> None:
            nonlocal writer
            body.checks.update(piece)
            if body.is_over:
                body.check()
            if writer is None:
                writer = FileWriter(store, runner)
            writer.write(runner, piece)
            if body.is_over:
                spare = commit(writer.finish(runner))
                committed, writer = writer, None
                committed.keep(runner)
                store.discard(runner, spare)

        with await self._transfers.take(store):
            is_first = True
            try:
                while not body.is_over:
                    piece = await body.next_piece(self._body_max)
                    await self._workers.run(store, partial(add, piece or memoryview(b"")), first=is_first)
                    is_first = False
                self._counters.bytes_written += body.length
            finally:
                if writer is not None:
                    await self._workers.run(store, writer.drop)

    async def begin_upload(self, store: ObjectStore, request: S3Request) -> Answer:
        headers = kept_headers(request.headers)
        algorithm = request.headers.get("x-amz-checksum-algorithm", "")
        new = Upload(secrets.token_urlsafe(24), request.key, time.time_ns(), headers, algorithm.lower())
        await self._workers.ask(store, lambda: store.index.begin_upload(request.bucket, new))
        names = [("Bucket", request.bucket), ("Key", request.key), ("UploadId", new.name)]
        answer = xml_answer("InitiateMultipartUploadResult", names)
        if algorithm:
            answer.headers.append(("x-amz-checksum-algorithm", algorithm))
        return answer

    async def complete_upload(self, store: ObjectStore, request: S3Request, body: Body) -> Answer:
        with await self._transfers.take(store):
            rows = (await body.rows("CompleteMultipartUpload", "Part", self._rests)).rows
        name, is_new = upload_name(request), only_new(request.headers)

        def complete(runner: Runner, etag: str) -> str:
            upload = store.index.upload(request.bucket, request.key, name)
            parts = _chosen(rows, {part.number: part for part in with_rests(_parts_of(store, name))})
            checksum = whole_checksum(request.headers, parts)
            size = sum(part.piece.size for part in parts)
            new = StoredObject(request.key, size, etag, time.time_ns(), 0, upload.headers, checksum)
            spare = store.index.complete_upload(request.bucket, name, new, parts, only_new=is_new)
            store.discard(runner, spare)
            return checksum

        def complete_once(runner: Runner) -> tuple[str, str]:
            etag = _etag_of(row.get("ETag", "") for row in rows)
            try:
                return etag, complete(runner, etag)
            except S3Error:
                # An earlier request may have completed it, whose answer did not reach its client.
                earlier = store.index.completed(request.bucket, request.key, name)
                if earlier is None or earlier[0] != etag:
                    raise
                return etag, earlier[1]

        etag, checksum = await self._workers.run(store, complete_once, first=True)
        found: list[Element] = [("Location", request.resource), ("Bucket", request.bucket)]
        found += [("Key", request.key), ("ETag", f'"{etag}"')]
        if checksum:
            algorithm, _, value = checksum.partition(":")
            found += [("Checksum" + algorithm.upper(), value), ("ChecksumType", FULL)]
        return xml_answer("CompleteMultipartUploadResult", found)

    async def abort_upload(self, store: ObjectStore, request: S3Request) -> Answer:
        name = upload_name(request)

        def abort(runner: Runner) -> None:
            store.index.upload(request.bucket, request.key, name)
            store.discard(runner, store.index.abort_upload(name))

        await self._workers.run(store, abort, first=True)
        return Answer(204)


def _need_length(body: Body) -> None:
    if not body.has_length:
        raise S3Error("MissingContentLength", "Content-Length is missing.")


def part_number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 5 or not 1 <= int(text) <= PARTS_MAX:
        raise S3Error("InvalidArgument", f"A part's number is 1 to {PARTS_MAX}.")
    return int(text)


def upload_name(request: S3Request) -> str:
    name = request.parameters["uploadId"]
    if _TOKEN.fullmatch(name) is None:
        raise S3Error("NoSuchUpload", "There is no such upload.")
    return name


async def algorithm_of(workers: Workers, store: ObjectStore, request: S3Request, name: str) -> str:
    """The checksum that the parts of an upload were announced with, or an empty string. Raises S3Error."""
    return (
        await workers.ask(store, partial(store.index.upload, request.bucket, request.key, name))
    ).algorithm


def only_new(headers: Mapping[str, str]) -> bool:
    if "if-match" in headers:
        raise S3Error("NotImplemented", "If-Match is not known of writes.")
    condition = headers.get("if-none-match")
    if condition not in (None, "*"):
        raise S3Error("NotImplemented", "Of writes, If-None-Match is * alone.")
    return condition is not None


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    kept = {name: headers[name] for name in KEPT if name in headers}
    kept |= {name: value for name, value in headers.items() if name.startswith("x-amz-meta-")}
    encodings = [each.strip() for each in headers.get("content-encoding", "").split(",")]
    if encoding := ",".join(each for each in encodings if each not in ("", "aws-chunked")):
        kept["content-encoding"] = encoding
    if sum(len(name) + len(value) for name, value in kept.items()) > HEADERS_BYTES_MAX:
        raise S3Error("MetadataTooLarge", f"Headers and metadata have {HEADERS_BYTES_MAX} bytes at the most.")
    return kept


def _etag_of(etags: Iterable[str]) -> str:
    """The ETag of a multipart object, from those that the client names for its parts; empty for malformed
    ones."""
    sums = hashlib.md5(usedforsecurity=False)
    count = 0
    try:
        for etag in with_rests(etags):
            sums.update(bytes.fromhex(etag.strip('"')))
            count += 1
    except ValueError:
        return ""
    return f"{sums.hexdigest()}-{count}"


def _parts_of(store: ObjectStore, upload: str) -> Iterator[Part]:
    """The parts of an upload, some of which are read at a time."""
    after = 0
    while found := store.index.parts(upload, after, STEP_ROWS):
        yield from found
        after = found[-1].number


def _chosen(rows: Sequence[Mapping[str, str]], parts: Mapping[int, Part]) -> list[Part]:
    """The parts that the client names, checked. Raises S3Error."""
    chosen: list[Part] = []
    if not rows:
        raise S3Error("MalformedXML", "An upload is completed with one part at the least.")
    for row in with_rests(rows):
        number = part_number(row.get("PartNumber", ""))
        part = parts.get(number)
        if part is None or row.get("ETag", "").strip('"') != part.etag:
            raise S3Error("InvalidPart", "A part is missing, or has another ETag.")
        if chosen and number <= chosen[-1].number:
            raise S3Error("InvalidPartOrder", "Parts are named in ascending order.")
        if chosen and chosen[-1].piece.size < PART_BYTES_MIN:
            raise S3Error("EntityTooSmall", f"All parts but the last have at least {PART_BYTES_MIN} bytes.")
        algorithm, _, value = part.checksum.partition(":")
        said = {leaf: text for leaf, text in row.items() if leaf not in ("PartNumber", "ETag")}
        if said.items() - {("Checksum" + algorithm.upper(), value)}:
            raise S3Error("InvalidPart", "A part has another checksum.")
        chosen.append(part)
    if sum(part.piece.size for part in chosen) > OBJECT_BYTES_MAX:
        raise S3Error("EntityTooLarge", "The object is larger than objects may be.")
    return chosen


def _written(body: Body) -> Answer:
    answer = Answer(200, [("etag", f'"{body.checks.md5}"')])
    if body.checks.checksum:
        name, _, value = body.checks.checksum.partition(":")
        answer.headers.append((PREFIX + name, value))
    return answer
