"""Lists of buckets, objects, parts and uploads; removal of objects."""

from __future__ import annotations

import base64
import binascii
import time
from functools import partial
from typing import Final

import trio

from agent.pool.steps import Runner
from agent.s3.answers import Answer, xml_answer
from agent.s3.body import Body
from agent.s3.errors import S3Error
from agent.s3.index import BUCKETS_MAX, Listing, StoredObject
from agent.s3.requests import KEY_BYTES_MAX, Operation, S3Request, check_key, whole_number
from agent.s3.shares import Shares
from agent.s3.store import ObjectStore
from agent.s3.workers import Workers
from agent.s3.xml_out import UNFIT, Content, Element, iso_time, shown

ROWS_MAX: Final = 1000
"""Keys of a listing, and of a DeleteObjects."""


class Listings:
    """The operations of this file, for all tenants."""

    def __init__(self, workers: Workers, region: str, transfers: Shares) -> None:
        self._workers = workers
        self._transfers = transfers
        self._region = region

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
        head: list[Element] = [("Owner", owner), ("Buckets", rows)]
        if len(left) > most:
            head.append(("ContinuationToken", _to_token(left[most - 1][0])))
        if prefix:
            head.append(("Prefix", _fit(prefix)))
        return xml_answer("ListAllMyBucketsResult", head)

    async def create_bucket(self, store: ObjectStore, request: S3Request, body: Body) -> Answer:
        if body.length:
            with await self._transfers.take(store):
                wanted = (await body.rows("CreateBucketConfiguration", "")).leaves
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

    async def page(self, store: ObjectStore, request: S3Request) -> Answer:
        """Of objects, parts or uploads. A worker writes it: a large one takes a while."""
        others = {Operation.LIST_PARTS: _parts, Operation.LIST_UPLOADS: _uploads}
        make = others.get(request.operation, _objects)
        return await self._workers.ask(store, partial(make, store, request))

    async def delete(self, store: ObjectStore, request: S3Request) -> Answer:
        job = partial(_remove, store, request.bucket, request.key)
        await self._workers.run(store, job, first=True)
        return Answer(204)

    async def delete_several(self, store: ObjectStore, request: S3Request, body: Body) -> Answer:
        with await self._transfers.take(store):
            document = await body.rows("Delete", "Object")
        if document.leaves.keys() - {"Quiet"} or any(row.keys() - {"Key"} for row in document.rows):
            raise S3Error("NotImplemented", "Objects are deleted by their keys alone, without a condition.")
        keys = [row.get("Key", "") for row in document.rows]
        if not 1 <= len(keys) <= ROWS_MAX:
            raise S3Error("MalformedXML", f"A request has 1 to {ROWS_MAX} keys.")
        for key in keys:
            check_key(key)
        # The checks and the answer of 1,000 keys take the loop 2 ms each, with a turn of others between.
        await self._workers.ask(store, lambda: store.index.check_bucket(request.bucket))
        done: list[Element] = []
        slow: S3Error | None = None
        for key in keys:
            # A job for each, so that others have their turn. After one time-out all others are refused.
            try:
                if slow is not None:
                    raise slow
                job = partial(_remove, store, request.bucket, key)
                await self._workers.run(store, job, first=True)
                if document.leaves.get("Quiet", "").strip() != "true":
                    done.append(("Deleted", [("Key", key)]))
            except S3Error as refused:
                if refused.code == "SlowDown":
                    slow = refused
                why: Content = [("Key", key), ("Code", refused.code), ("Message", refused.message)]
                done.append(("Error", why))
        await trio.lowlevel.checkpoint()
        return xml_answer("DeleteResult", done)


def _objects(store: ObjectStore, request: S3Request) -> Answer:
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
    page = store.index.list_page(request.bucket, prefix, delimiter, after, most)
    head: list[Element] = [("Name", request.bucket), ("Prefix", shown(prefix, encoding))]
    if delimiter:
        head.append(("Delimiter", shown(delimiter, encoding)))
    head += [("MaxKeys", most), ("IsTruncated", bool(page.after))]
    if encoding:
        head.append(("EncodingType", encoding))
    if first:
        head.append(("Marker", shown(start, encoding)))
        if page.after:
            head.append(("NextMarker", shown(page.after, encoding)))
    else:
        head.append(("KeyCount", len(page.objects) + len(page.prefixes)))
        if token:
            head.append(("ContinuationToken", token))
        elif start:
            head.append(("StartAfter", shown(start, encoding)))
        if page.after:
            head.append(("NextContinuationToken", _to_token(page.after)))
    owner = first or wanted.get("fetch-owner") == "true"
    return xml_answer("ListBucketResult", head + _rows(page, encoding, owner))


def _parts(store: ObjectStore, request: S3Request) -> Answer:
    name = request.parameters["uploadId"]
    most = whole_number(request.parameters, "max-parts", ROWS_MAX, ROWS_MAX)
    after = whole_number(request.parameters, "part-number-marker", 0, 10**9)
    store.index.upload(request.bucket, request.key, name)
    left = [part for part in store.index.parts(name) if part.number > after]
    rows: list[Element] = [
        ("Bucket", request.bucket), ("Key", request.key), ("UploadId", name), ("MaxParts", most),
        ("PartNumberMarker", after), ("IsTruncated", len(left) > most),
    ]  # fmt: skip
    if len(left) > most > 0:
        rows.append(("NextPartNumberMarker", left[most - 1].number))
    for part in left[:most]:
        fields: list[Element] = [
            ("PartNumber", part.number), ("LastModified", iso_time(part.changed_ns)),
            ("ETag", f'"{part.etag}"'), ("Size", part.piece.size),
        ]  # fmt: skip
        algorithm, _, value = part.checksum.partition(":")
        if algorithm:
            fields.append(("Checksum" + algorithm.upper(), value))
        rows.append(("Part", fields))
    return xml_answer("ListPartsResult", rows)


def _uploads(store: ObjectStore, request: S3Request) -> Answer:
    wanted, encoding = request.parameters, _encoding(request)
    prefix, after, name = (wanted.get(each, "") for each in ("prefix", "key-marker", "upload-id-marker"))
    if wanted.get("delimiter"):
        raise S3Error("NotImplemented", "Uploads are listed without a delimiter here.")
    if not encoding:
        prefix, after = _fit(prefix), _fit(after)
    most = whole_number(wanted, "max-uploads", ROWS_MAX, ROWS_MAX)
    left = [
        each
        for each in store.index.uploads(request.bucket)
        if each.key.startswith(prefix)
        and (each.key > after or (name and (each.key, each.name) > (after, name)))
    ]
    rows: list[Element] = [
        ("Bucket", request.bucket), ("KeyMarker", shown(after, encoding)), ("UploadIdMarker", _fit(name)),
        ("Prefix", shown(prefix, encoding)), ("MaxUploads", most), ("IsTruncated", len(left) > most > 0),
    ]  # fmt: skip
    if encoding:
        rows.append(("EncodingType", encoding))
    if len(left) > most > 0:
        last = left[most - 1]
        rows += [("NextKeyMarker", shown(last.key, encoding)), ("NextUploadIdMarker", last.name)]
    for each in left[:most]:
        key, begun = shown(each.key, encoding), iso_time(each.made_ns)
        rows.append(("Upload", [("Key", key), ("UploadId", each.name), ("Initiated", begun)]))
    return xml_answer("ListMultipartUploadsResult", rows)


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


def _remove(store: ObjectStore, bucket: str, key: str, runner: Runner) -> None:
    store.discard(runner, store.index.remove(bucket, key))


def _rows(page: Listing, encoding: str, owner: bool) -> list[Element]:
    def row(each: StoredObject) -> Element:
        fields: list[Element] = [
            ("Key", shown(each.key, encoding)), ("LastModified", iso_time(each.changed_ns)),
            ("ETag", f'"{each.etag}"'), ("Size", each.size), ("StorageClass", "STANDARD"),
        ]  # fmt: skip
        if owner:
            fields.append(("Owner", [("ID", "g35"), ("DisplayName", "g35")]))
        return ("Contents", fields)

    prefixes: list[Element] = [
        ("CommonPrefixes", [("Prefix", shown(each, encoding))]) for each in page.prefixes
    ]
    return [*map(row, page.objects), *prefixes]


def _to_token(after: str) -> str:
    return base64.urlsafe_b64encode(after.encode()).decode()


def _from_token(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise S3Error("InvalidArgument", "The continuation token is none of ours.") from None
