"""Listings: the bytes of the answers, and the work that goes into one step of them."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import trio

from agent.http.gil_yield import STEP_ROWS, Rests, with_rests
from agent.http.shares import Shares
from agent.http.workers import Workers
from agent.s3.body import Body
from agent.s3.counters import S3Counters
from agent.s3.index import PARTS_MAX, Index, Listing, Part, Piece, StoredObject, Upload
from agent.s3.listing import Listings, _take_keys
from agent.s3.put_object import ObjectWrites
from agent.s3.requests import Operation, S3Request
from agent.s3.xml_in import RowsReader
from tests.support.pool.inline_runner import inline_runner

T = TypeVar("T")

MOMENT = 1_369_353_600_123_000_000
KEYS = [
    *(f"{letter}/{n:03d}/é<&>\"'{'z' * (n % 5) * 50}" for letter in "ab" for n in range(130)),
    *(f"top {n:03d}+%" for n in range(70)),
    "a/",
    "x\n",
]
SHAPES = ({}, {"encoding-type": "url"}, {"fetch-owner": "true"})
PAGES: tuple[dict[str, str], ...] = (
    {}, {"delimiter": "/"}, {"delimiter": "/", "prefix": "a/"}, {"delimiter": "z", "prefix": "b/"},
    {"max-keys": "0"}, {"max-keys": "1"}, {"max-keys": "50"}, {"max-keys": "101", "delimiter": "+"},
    {"prefix": "top", "start-after": "top 010", "marker": "top 010"}, {"prefix": "none"},
    {"start-after": "a/", "marker": "a/", "delimiter": "/"},
    {"continuation-token": "YS8wMDAv", "delimiter": "/", "prefix": "a/"},
    {"continuation-token": "YS8wMDAv", "max-keys": "332"}, {"max-keys": "331"},
)  # fmt: skip
PARTS: tuple[dict[str, str], ...] = (
    {}, {"max-parts": "0"}, {"max-parts": "49"}, {"max-parts": "50"}, {"max-parts": "51"},
    {"part-number-marker": "100"}, {"part-number-marker": "388"},
    {"part-number-marker": "385", "max-parts": "1"}, {"max-parts": "130"}, {"max-parts": "129"},
)  # fmt: skip
UPLOADS: tuple[dict[str, str], ...] = (
    {}, {"max-uploads": "0"}, {"max-uploads": "50"}, {"max-uploads": "129"}, {"max-uploads": "130"},
    {"prefix": "b/"}, {"prefix": "a/00"}, {"key-marker": KEYS[30]},
    {"key-marker": KEYS[30], "upload-id-marker": "up020", "max-uploads": "60"}, {"key-marker": "zz"},
    {"upload-id-marker": "up003"}, {"prefix": "a/0", "key-marker": "a/05"},
)  # fmt: skip
GOLDEN = {
    Operation.LIST_OBJECTS: "4db1430aaf48ce4d67c75717b11375a735c7c989ccfb5192794bf8e2d533cc89",
    Operation.LIST_OBJECTS_V1: "1df60e6e094e03e54e4659043eb9a27e2625309dbc928afa26d481096e5c51dc",
    Operation.LIST_PARTS: "75741df34386b3928cc8d364b5a2bfa87b8e5b5ce8d58a39b0f8bab9e8dc7863",
    Operation.LIST_UPLOADS: "c679db73f6e4cb1d5df48ef875196ee47dd589ca4d82afdcbb5d5ed2f93eeed1",
}
"""Digests of the answers that were written in one step, each, from elements."""


class Store:
    """As much of a store as a listing needs."""

    def __init__(self, index: Index) -> None:
        self.index = index


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = Index(tmp_path / "index.sqlite")
    made.make_bucket("blocks", 1)
    for n, key in enumerate(KEYS):
        new = StoredObject(key, n, f"{n:032x}", MOMENT + n * 700_000_000, 0, {"content-type": "x"}, "")
        made.put("blocks", new, [Piece(f"f{n}", n)])
    for n in range(130):
        made.begin_upload("blocks", Upload(f"up{n:03d}", KEYS[n // 2 * 3], MOMENT + n, {}))
        checksum = "crc32:AAAA" if n % 2 else ""
        made.put_part("up000", Part(n * 3 + 1, Piece(f"p{n}", n), f"{n:032x}", MOMENT + n, checksum))
    yield made
    made.close()


def with_listings(index: Index, work: Callable[[Listings, Any], Awaitable[T]]) -> T:
    async def main() -> T:
        workers, store = Workers(1, inline_runner), Store(index)
        workers.start()
        try:
            return await work(Listings(workers, "eu-west-1", Shares(1, [store]), Rests()), store)
        finally:
            workers.stop()

    return trio.run(main)


def bodies(index: Index, operation: Operation, key: str, queries: list[Mapping[str, str]]) -> list[bytes]:
    async def work(listings: Listings, store: Any) -> list[bytes]:
        requests = [S3Request({}, operation, "blocks", key, query) for query in queries]
        return [(await listings.page(store, request)).body for request in requests]

    return with_listings(index, work)


def queries_of(operation: Operation) -> list[Mapping[str, str]]:
    if operation is Operation.LIST_PARTS:
        return [{"uploadId": "up000", **page} for page in PARTS]
    if operation is Operation.LIST_UPLOADS:
        return [{**shape, **page} for shape in SHAPES[:2] for page in UPLOADS]
    return [{**shape, **page} for shape in SHAPES for page in PAGES]


@pytest.mark.parametrize("operation", GOLDEN)
def test_answers_that_are_written_in_steps_are_those_that_were_written_in_one(
    index: Index, operation: Operation
) -> None:
    key = KEYS[0] if operation is Operation.LIST_PARTS else ""
    digest = hashlib.sha256()
    for body in bodies(index, operation, key, queries_of(operation)):
        digest.update(hashlib.sha256(body).digest())
    assert digest.hexdigest() == GOLDEN[operation]


def test_a_row_of_a_listing_is_written_as_s3_has_it(index: Index) -> None:
    [body] = bodies(index, Operation.LIST_OBJECTS_V1, "", [{"prefix": "b/000/"}])
    assert body.endswith(
        b"<Contents><Key>b/000/\xc3\xa9&lt;&amp;&gt;\"'</Key><LastModified>2013-05-24T00:01:31.123Z"
        b'</LastModified><ETag>"00000000000000000000000000000082"</ETag><Size>130</Size>'
        b"<StorageClass>STANDARD</StorageClass><Owner><ID>g35</ID><DisplayName>g35</DisplayName></Owner>"
        b"</Contents></ListBucketResult>"
    )


def test_no_step_of_a_listing_has_more_than_its_rows(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    ask, list_page = Index._ask, Index.list_page

    def counted(self: Index, statement: str, *arguments: object) -> list[Any]:
        found = ask(self, statement, *arguments)
        asked.append(len(found))
        return found

    def page(self: Index, *arguments: Any) -> Listing:
        found = list_page(self, *arguments)
        asked.append(len(found.objects) + len(found.prefixes))
        return found

    monkeypatch.setattr(Index, "_ask", counted)
    monkeypatch.setattr(Index, "list_page", page)
    for operation in GOLDEN:
        key = KEYS[0] if operation is Operation.LIST_PARTS else ""
        bodies(index, operation, key, queries_of(operation))
    assert STEP_ROWS <= max(asked) <= STEP_ROWS + 1


def test_a_thread_rests_for_as_long_as_it_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("agent.http.gil_yield.time.sleep", slept.append)
    rests, began = Rests(), time.thread_time()
    rests.after(began)
    assert slept == []
    while time.thread_time() < began + 0.002:
        pass
    rests.after(began)
    assert 0.002 <= slept[0] < 0.02


def test_short_works_in_a_row_rest_as_one_long_work_does() -> None:
    now = 100.0
    rests = Rests(lambda: now)
    slept = worked = 0.0
    for _ in range(1000):
        now += 0.0001
        worked += 0.0001
        seconds = rests.owed(0.0001)
        slept, now = slept + seconds, now + seconds
    assert slept == pytest.approx(worked, abs=0.001)
    now += 10
    assert rests.owed(0.0001) == 0, "who was idle owes nothing"


def test_all_threads_of_the_door_together_work_for_half_of_the_time() -> None:
    now = 100.0
    rests = Rests(lambda: now)
    owed = [rests.owed(0.01) for _ in range(8)]
    assert owed == pytest.approx([0.01 + 0.02 * number for number in range(8)])


def test_a_thread_that_takes_many_rows_rests_after_every_few(monkeypatch: pytest.MonkeyPatch) -> None:
    worked, slept = [0.0], list[float]()
    monkeypatch.setattr("agent.http.gil_yield.time.sleep", slept.append)
    monkeypatch.setattr("agent.http.gil_yield.time.thread_time", lambda: worked[0])
    for _ in with_rests(range(10 * STEP_ROWS)):
        worked[0] += 0.001
    assert slept == pytest.approx([STEP_ROWS * 0.001] * 10)


def test_the_keys_of_a_removal_are_checked_a_few_at_a_time() -> None:
    rows = [{"Key": f"{number}"} for number in range(1000)]
    keys: list[str] = []
    met = [len(keys) for _ in _take_keys(rows, keys)]
    assert met == list(range(STEP_ROWS, 1000, STEP_ROWS))
    assert keys == [row["Key"] for row in rows]


def test_no_step_of_a_completion_has_more_than_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part costs work in each pass over them; no pass goes on for longer than its rows."""
    count, made = PARTS_MAX, Index(tmp_path / "index.sqlite")
    made.make_bucket("blocks", 1)
    made.begin_upload("blocks", Upload("up", "a", 1, {}))
    row = "INSERT INTO parts VALUES ('up', ?, ?, 5242880, ?, 1, '')"
    rows_of_parts = [(number, f"f{number:05d}", f"{number:032x}") for number in range(1, count + 1)]
    made._connection.executemany(row, rows_of_parts)
    passes: list[int] = []
    monkeypatch.setattr("agent.http.gil_yield.time.sleep", lambda seconds: passes.append(1))
    monkeypatch.setattr("agent.http.gil_yield.time.thread_time", itertools.count().__next__)
    rows = [{"PartNumber": str(number), "ETag": etag} for number, _, etag in rows_of_parts]

    class Read(Body):
        def __init__(self) -> None:
            pass

        async def rows(self, root: str, row: str, rests: Rests) -> RowsReader:
            reader = RowsReader(root, row)
            reader.rows = rows
            return reader

    async def main() -> bytes:
        workers, store = Workers(1, inline_runner), cast(Any, Store(made))
        workers.start()
        try:
            store.discard = lambda runner, files: None
            writes = ObjectWrites(workers, S3Counters(), Shares(1, [store]), 1 << 30, workers.rests)
            request = S3Request({}, Operation.COMPLETE_UPLOAD, "blocks", "a", {"uploadId": "up"})
            return (await writes.complete_upload(store, request, Read())).body
        finally:
            workers.stop()

    body = trio.run(main)
    assert b"-10000&quot;" in body or b'-10000"' in body
    assert made.find("blocks", "a").size == count * 5242880
    made.close()
    # Read, named by the client, compared, files of the upload, pieces of the object, spare ones no more.
    assert len(passes) >= 6 * count // STEP_ROWS


def test_an_event_loop_takes_one_step_at_a_time_and_rests_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    at: list[str] = []
    slept = [0.0]

    async def sleep(seconds: float) -> None:
        at.append("rest")
        slept[0] += seconds
        assert seconds >= 0.001
        await trio.lowlevel.checkpoint()

    def steps() -> Iterator[None]:
        for _ in range(3):
            began = time.thread_time()
            while time.thread_time() < began + 0.001:
                pass
            at.append("step")
            yield

    async def main() -> None:
        rests = Rests(lambda: time.thread_time() + slept[0])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rests.work, steps())
            nursery.start_soon(rests.work, steps())

    monkeypatch.setattr("agent.http.gil_yield.trio.sleep", sleep)
    trio.run(main)
    assert at == ["step", "rest"] * 6


def test_a_removal_of_many_keys_is_answered_as_it_was(index: Index) -> None:
    class Document(Body):
        """A body that was read."""

        def __init__(self) -> None:
            pass

        async def rows(self, root: str, row: str, rests: Rests) -> RowsReader:
            reader = RowsReader(root, row)
            await rests.work(
                reader.read(b"<Delete>" + b"<Object><Key>no&amp;</Key></Object>" * 2 + b"</Delete>")
            )
            return reader

    async def work(listings: Listings, store: Any) -> bytes:
        store.discard = lambda runner, files: None
        request = S3Request({}, Operation.DELETE_OBJECTS, "blocks", "", {})
        return (await listings.delete_several(store, request, Document())).body

    body = with_listings(index, work)
    assert body.endswith(b'2006-03-01/">' + b"<Deleted><Key>no&amp;</Key></Deleted>" * 2 + b"</DeleteResult>")
