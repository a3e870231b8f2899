"""Lists of buckets, objects, parts and uploads; removal of objects."""

import base64
import binascii
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar
from xml.sax.saxutils import escape

from agent.http.gil_yield import STEP_ROWS, Rests
from agent.http.shares import Shares
from agent.http.workers import Workers
from agent.pool.steps import Runner
from agent.s3.answers import Answer, xml_answer
from agent.s3.body import Body
from agent.s3.errors import S3Error
from agent.s3.index import BUCKETS_MAX, ListedObject, Part, Upload
from agent.s3.requests import KEY_BYTES_MAX, Operation, S3Request, check_key, whole_number
from agent.s3.store import ObjectStore
from agent.s3.xml_out import UNFIT, Content, Element, iso_time, shown, written

ROWS_MAX: Final = 1000
"""Keys of a listing, and of a DeleteObjects."""
At = TypeVar("At")
"""A place in a listing."""
_OWNER: Final = "<Owner><ID>g35</ID><DisplayName>g35</DisplayName></Owner>"


@dataclass(slots=True)
class _Rows(Generic[At]):
    """Rows of a listing, written: those of `first` come before all of `then`."""

    first: list[bytes]
    then: list[bytes]
    count: int
    at: At
    """Where the next ones begin, if there are `more`."""
    more: bool


class Listings:
    """The operations of this file, for all tenants."""

    def __init__(self, workers: Workers, region: str, transfers: Shares, rests: Rests) -> None:
        self._workers = workers
        self._transfers = transfers
        self._region = region
        self._rests = rests

    async def buckets(self, store: ObjectStore, request: S3Request) -> Answer:
        wanted = request.parameters
        prefix, token = wanted.get("prefix", ""), wanted.get("continuation-token", "")
        after, most = _from_token(token), whole_number(wanted, "max-buckets", BUCKETS_MAX, BUCKETS_MAX)
        if not most:
            raise S3Error("InvalidArgument", "max-buckets is 1 at the least.")
        found = await self._workers.ask(store, lambda: store.index.buckets())
        left = [(name, made) for name, made in found if name.startswith(prefix) and name > after]
        rows = [("Bucket", [("Name", name), ("CreationDate", iso_time(made))]) for name, made in left[:most]]
        owner = [("ID", "g35"), ("DisplayName", "g35")]
        following = _to_token(left[most - 1][0]) if len(left) > most else None
        head: list[Element] = [
            ("Owner", owner), ("Buckets", rows), ("ContinuationToken", following),
            ("Prefix", _fit(prefix) if prefix else None),
        ]  # fmt: skip
        return xml_answer("ListAllMyBucketsResult", head)

    async def create_bucket(self, store: ObjectStore, request: S3Request, body: Body) -> Answer:
        if body.length:
            with await self._transfers.take(store):
                wanted = (await body.rows("CreateBucketConfiguration", "", self._rests)).leaves
            if wanted.keys() - {"LocationConstraint"}:
                raise S3Error("NotImplemented", "A bucket has a region here, and nothing else.")
            if wanted.get("LocationConstraint", "") not in ("", self._region):
                message = f"Buckets are in {self._region} here."
                raise S3Error("IllegalLocationConstraintException", message)
        else:
            await body.nothing()
        made = await self._workers.ask(store, lambda: store.index.make_bucket(request.bucket, time.time_ns()))
        if not made:
            raise S3Error("BucketAlreadyOwnedByYou", "The bucket is there, and yours.")
        return Answer(200, [("location", f"/{request.bucket}")])

    async def delete_bucket(self, store: ObjectStore, request: S3Request) -> Answer:
        await self._workers.ask(store, lambda: store.index.remove_bucket(request.bucket))
        return Answer(204)

    async def head_bucket(self, store: ObjectStore, request: S3Request) -> Answer:
        await self._workers.ask(store, lambda: store.index.check_bucket(request.bucket))
        return Answer(200, [("x-amz-bucket-region", self._region)])

    async def location(self, store: ObjectStore, request: S3Request) -> Answer:
        await self._workers.ask(store, lambda: store.index.check_bucket(request.bucket))
        # The first region has no name here, because it was the only one once.
        return xml_answer("LocationConstraint", "" if self._region == "us-east-1" else self._region)

    async def versioning(self, store: ObjectStore, request: S3Request) -> Answer:
        await self._workers.ask(store, lambda: store.index.check_bucket(request.bucket))
        # Without a status: versions were never turned on.
        return xml_answer("VersioningConfiguration", ())

    async def tagging(self, store: ObjectStore, request: S3Request) -> Answer:
        await self._workers.ask(store, lambda: store.index.find(request.bucket, request.key))
        return xml_answer("Tagging", [("TagSet", ())])

    async def page(self, store: ObjectStore, request: S3Request) -> Answer:
        """Of objects, parts or uploads. A worker writes it, a few rows at a time."""
        if request.operation is Operation.LIST_PARTS:
            return await self._parts(store, request)
        if request.operation is Operation.LIST_UPLOADS:
            return await self._uploads(store, request)
        return await self._objects(store, request)

    async def delete(self, store: ObjectStore, request: S3Request) -> Answer:
        job = partial(_remove, store, request.bucket, request.key)
        await self._workers.run(store, job, first=True, rests=True)
        return Answer(204)

    async def delete_several(self, store: ObjectStore, request: S3Request, body: Body) -> Answer:
        with await self._transfers.take(store):
            document = await body.rows("Delete", "Object", self._rests)
        if document.leaves.keys() - {"Quiet"}:
            raise _no_condition()
        if not 1 <= len(document.rows) <= ROWS_MAX:
            raise S3Error("MalformedXML", f"A request has 1 to {ROWS_MAX} keys.")
        keys: list[str] = []
        await self._rests.work(_take_keys(document.rows, keys))
        await self._workers.ask(store, lambda: store.index.check_bucket(request.bucket))
        done: list[bytes] = []
        slow: S3Error | None = None
        for key in keys:
            # A job for each, so that others have their turn. After one time-out all others are refused.
            try:
                if slow is not None:
                    raise slow
                job = partial(_remove, store, request.bucket, key)
                await self._workers.run(store, job, first=True, rests=True)
                if document.leaves.get("Quiet", "").strip() != "true":
                    done.append(written([("Deleted", [("Key", key)])]).encode())
            except S3Error as refused:
                if refused.code == "SlowDown":
                    slow = refused
                why: Content = [("Key", key), ("Code", refused.code), ("Message", refused.message)]
                done.append(written([("Error", why)]).encode())
        return xml_answer("DeleteResult", (), done)

    async def _objects(self, store: ObjectStore, request: S3Request) -> Answer:
        wanted, encoding = request.parameters, _encoding(request)
        first = request.operation is Operation.LIST_OBJECTS_V1
        prefix, delimiter = wanted.get("prefix", ""), wanted.get("delimiter", "")
        start, token = (
            wanted.get("marker" if first else "start-after", ""),
            wanted.get("continuation-token", ""),
        )
        if max(len(each.encode()) for each in (prefix, delimiter, start)) > KEY_BYTES_MAX:
            raise S3Error("InvalidArgument", "A prefix, a delimiter or a start is too long.")
        if not encoding:
            prefix, delimiter, start = map(_fit, (prefix, delimiter, start))
        after = _from_token(token) if token and not first else start
        most = whole_number(wanted, "max-keys", ROWS_MAX, ROWS_MAX)
        owner = first or wanted.get("fetch-owner") == "true"

        def step(at: str, most: int) -> _Rows[str]:
            page = store.index.list_page(request.bucket, prefix, delimiter, at, most)
            objects = "".join([_object_row(each, encoding, owner) for each in page.objects])
            prefixes = written(
                [("CommonPrefixes", [("Prefix", shown(each, encoding))]) for each in page.prefixes]
            )
            count = len(page.objects) + len(page.prefixes)
            return _Rows([objects.encode()], [prefixes.encode()], count, page.after, bool(page.after))

        page = await self._in_steps(store, step, after, most)
        head: list[Element] = [
            ("Name", request.bucket), ("Prefix", shown(prefix, encoding)),
            ("Delimiter", shown(delimiter, encoding) or None), ("MaxKeys", most), ("IsTruncated", page.more),
            ("EncodingType", encoding or None),
        ]  # fmt: skip
        if first:
            head.append(("Marker", shown(start, encoding)))
            head.append(("NextMarker", shown(page.at, encoding) if page.more else None))
        else:
            head += [("KeyCount", page.count), ("ContinuationToken", token or None)]
            head.append(("StartAfter", None if token or not start else shown(start, encoding)))
            head.append(("NextContinuationToken", _to_token(page.at) if page.more else None))
        return xml_answer("ListBucketResult", head, page.first + page.then)

    async def _parts(self, store: ObjectStore, request: S3Request) -> Answer:
        name = request.parameters["uploadId"]
        most = whole_number(request.parameters, "max-parts", ROWS_MAX, ROWS_MAX)
        marker = whole_number(request.parameters, "part-number-marker", 0, 10**9)
        await self._workers.ask(store, lambda: store.index.upload(request.bucket, request.key, name))

        def step(at: int, most: int) -> _Rows[int]:
            found = store.index.parts(name, at, most + 1)
            rows = written([_part_row(part) for part in found[:most]])
            last = found[:most][-1].number if found[:most] else at
            return _Rows([rows.encode()], [], len(found[:most]), last, len(found) > most)

        page = await self._in_steps(store, step, marker, most)
        head: list[Element] = [
            ("Bucket", request.bucket), ("Key", request.key), ("UploadId", name), ("MaxParts", most),
            ("PartNumberMarker", marker), ("IsTruncated", page.more),
            ("NextPartNumberMarker", page.at if page.more and most else None),
        ]  # fmt: skip
        return xml_answer("ListPartsResult", head, page.first)

    async def _uploads(self, store: ObjectStore, request: S3Request) -> Answer:
        wanted, encoding = request.parameters, _encoding(request)
        prefix, marker, name = (wanted.get(each, "") for each in ("prefix", "key-marker", "upload-id-marker"))
        if wanted.get("delimiter"):
            raise S3Error("NotImplemented", "Uploads are listed without a delimiter here.")
        if not encoding:
            prefix, marker = _fit(prefix), _fit(marker)
        most = whole_number(wanted, "max-uploads", ROWS_MAX, ROWS_MAX)

        def step(at: tuple[str, str], most: int) -> _Rows[tuple[str, str]]:
            found = store.index.uploads(request.bucket, prefix, *at, most + 1)
            rows = written([_upload_row(each, encoding) for each in found[:most]])
            last = (found[:most][-1].key, found[:most][-1].name) if found[:most] else at
            return _Rows([rows.encode()], [], len(found[:most]), last, len(found) > most)

        page = await self._in_steps(store, step, (marker, name), most)
        more = page.more and most > 0
        head: list[Element] = [
            ("Bucket", request.bucket), ("KeyMarker", shown(marker, encoding)),
            ("UploadIdMarker", _fit(name)),
            ("Prefix", shown(prefix, encoding)), ("MaxUploads", most), ("IsTruncated", more),
            ("EncodingType", encoding or None),
        ]  # fmt: skip
        if more:
            last_key, last_name = page.at
            head += [("NextKeyMarker", shown(last_key, encoding)), ("NextUploadIdMarker", last_name)]
        return xml_answer("ListMultipartUploadsResult", head, page.first)

    async def _in_steps(
        self, store: ObjectStore, step: Callable[[At, int], _Rows[At]], at: At, most: int
    ) -> _Rows[At]:
        """Up to `most` rows behind `at`, a job for each few of them, so that others have their turn."""
        page = _Rows[At]([], [], 0, at, True)
        while True:
            rows = await self._workers.ask(store, partial(step, page.at, min(STEP_ROWS, most - page.count)))
            page.first += rows.first
            page.then += rows.then
            page.count, page.at, page.more = page.count + rows.count, rows.at, rows.more
            if not page.more or page.count == most:
                return page


def _encoding(request: S3Request) -> str:
    encoding = request.parameters.get("encoding-type", "")
    if encoding not in ("", "url"):
        raise S3Error("InvalidArgument", "encoding-type is url, or left out.")
    return encoding


def _fit(text: str) -> str:
    """Raises S3Error for text that XML cannot carry."""
    if UNFIT.search(text):
        raise S3Error("InvalidArgument", "What XML cannot carry needs encoding-type=url.")
    return text


def _take_keys(rows: Sequence[Mapping[str, str]], keys: list[str]) -> Iterator[None]:
    """Append the keys of a DeleteObjects to `keys`, checked, some in each step. Raises S3Error."""
    for at, row in enumerate(rows):
        if at and not at % STEP_ROWS:
            yield
        if row.keys() - {"Key"}:
            raise _no_condition()
        keys.append(row.get("Key", ""))
        check_key(keys[-1])


def _no_condition() -> S3Error:
    return S3Error("NotImplemented", "Objects are deleted by their keys alone, without a condition.")


def _remove(store: ObjectStore, bucket: str, key: str, runner: Runner) -> None:
    store.discard(runner, store.index.remove(bucket, key))


def _object_row(each: ListedObject, encoding: str, owner: bool) -> str:
    # In one piece, because a listing has a thousand of them. An ETag of ours has nothing to escape.
    return (
        f"<Contents><Key>{escape(shown(each.key, encoding))}</Key>"
        f"<LastModified>{iso_time(each.changed_ns)}</LastModified>"
        f'<ETag>"{each.etag}"</ETag><Size>{each.size}</Size><StorageClass>STANDARD</StorageClass>'
        f"{_OWNER if owner else ''}</Contents>"
    )


def _part_row(part: Part) -> Element:
    fields: list[Element] = [
        ("PartNumber", part.number), ("LastModified", iso_time(part.changed_ns)),
        ("ETag", f'"{part.etag}"'), ("Size", part.piece.size),
    ]  # fmt: skip
    algorithm, _, value = part.checksum.partition(":")
    if algorithm:
        fields.append(("Checksum" + algorithm.upper(), value))
    return ("Part", fields)


def _upload_row(each: Upload, encoding: str) -> Element:
    key, begun = shown(each.key, encoding), iso_time(each.made_ns)
    return ("Upload", [("Key", key), ("UploadId", each.name), ("Initiated", begun)])


def _to_token(after: str) -> str:
    return base64.urlsafe_b64encode(after.encode()).decode()


def _from_token(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise S3Error("InvalidArgument", "The continuation token is none of ours.") from None
