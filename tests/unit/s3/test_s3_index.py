"""The index: listings against a naive one, uploads, and what a crash leaves."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from agent.s3.errors import S3Error
from agent.s3.index import Index, Listing, Part, Piece, StoredObject, Upload


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = Index(tmp_path / "index.sqlite")
    made.make_bucket("blocks", 1)
    yield made
    made.close()


def put(index: Index, key: str, *files: str, only_new: bool = False) -> list[str]:
    new = StoredObject(key, len(files), f"tag of {files}", 7, 0, {"content-type": "x"}, "crc32:AAAA")
    return index.put("blocks", new, [Piece(file, 1) for file in files], only_new=only_new)


def test_an_object_is_found_as_it_was_put_and_replaced_as_a_whole(index: Index) -> None:
    index.announce("1")
    index.announce("2")
    assert put(index, "a", "1", "2") == []
    found = index.find("blocks", "a")
    assert (found.size, found.headers, found.checksum) == (2, {"content-type": "x"}, "crc32:AAAA")
    assert index.pieces(found) == [Piece("1", 1), Piece("2", 1)]
    assert index.spare(9) == []
    assert put(index, "a", "3") == ["1", "2"]
    assert index.pieces(found) == []
    assert index.spare(9) == ["1", "2"]
    assert index.remove("blocks", "a", only_id=found.id) == []
    assert index.remove("blocks", "a") == ["3"]
    assert (index.count(), index.remove("blocks", "a")) == (0, [])


def test_what_is_only_to_be_made_replaces_nothing(index: Index) -> None:
    put(index, "a", "1", only_new=True)
    with pytest.raises(S3Error) as refused:
        put(index, "a", "2", only_new=True)
    assert refused.value.code == "PreconditionFailed"
    assert index.pieces(index.find("blocks", "a")) == [Piece("1", 1)]


def test_a_bucket_goes_when_it_is_empty(index: Index) -> None:
    put(index, "a", "1")
    for code in ("BucketNotEmpty",):
        with pytest.raises(S3Error) as refused:
            index.remove_bucket("blocks")
        assert refused.value.code == code
    index.remove("blocks", "a")
    index.remove_bucket("blocks")
    with pytest.raises(S3Error) as refused:
        put(index, "a", "1")
    assert refused.value.code == "NoSuchBucket"


def part(number: int, file: str) -> Part:
    return Part(number, Piece(file, 5), "0" * 32, 3, "")


def test_parts_become_an_object_and_the_others_are_spare(index: Index) -> None:
    index.begin_upload("blocks", Upload("up", "a", 5, {}))
    assert index.put_part("up", part(1, "f1")) == []
    assert index.put_part("up", part(1, "f2")) == ["f1"]
    index.put_part("up", part(2, "f3"))
    index.put_part("up", part(9, "f9"))
    new = StoredObject("a", 10, "tag", 4)
    with pytest.raises(S3Error) as refused:
        index.complete_upload("blocks", "up", new, [part(1, "f1")])
    assert refused.value.code == "InvalidPart"
    assert index.complete_upload("blocks", "up", new, [part(1, "f2"), part(2, "f3")]) == ["f9"]
    assert index.pieces(index.find("blocks", "a")) == [Piece("f2", 5), Piece("f3", 5)]
    for late in (lambda: index.put_part("up", part(3, "f4")), lambda: index.abort_upload("up")):
        with pytest.raises(S3Error) as refused:
            late()
        assert refused.value.code == "NoSuchUpload"


def test_completions_are_remembered_the_latest_of_them_and_as_long_as_their_bucket(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.s3.index.COMPLETED_MAX", 3)
    for number in range(5):
        index.begin_upload("blocks", Upload(f"up{number}", "a", number, {}))
        index.put_part(f"up{number}", part(1, f"f{number}"))
        new = StoredObject("a", 5, f"tag{number}", number, 0, {}, "crc32:AAAA")
        index.complete_upload("blocks", f"up{number}", new, [part(1, f"f{number}")])
    found = [index.completed("blocks", "a", f"up{number}") for number in range(5)]
    assert found == [None, None, ("tag2", "crc32:AAAA"), ("tag3", "crc32:AAAA"), ("tag4", "crc32:AAAA")]
    assert index.completed("blocks", "b", "up4") is None
    index.remove("blocks", "a")
    index.remove_bucket("blocks")
    assert index.completed("blocks", "a", "up4") is None


def test_an_index_of_before_completions_were_remembered_is_opened(tmp_path: Path) -> None:
    first = Index(tmp_path / "index.sqlite")
    first._connection.execute("DROP TABLE completed")
    first.close()
    again = Index(tmp_path / "index.sqlite")
    assert again.completed("blocks", "a", "up") is None
    again.close()


def test_an_aborted_upload_leaves_spare_files(index: Index) -> None:
    index.begin_upload("blocks", Upload("up", "a", 5, {}))
    index.put_part("up", part(1, "f1"))
    assert index.old_uploads(5) == []
    assert index.old_uploads(6) == ["up"]
    assert index.abort_upload("up") == ["f1"]
    assert index.uploads("blocks") == []


def test_what_was_announced_is_spare_after_a_restart(tmp_path: Path) -> None:
    first = Index(tmp_path / "index.sqlite")
    first.announce("half")
    opening = first.opening
    first.close()
    again = Index(tmp_path / "index.sqlite")
    assert (again.spare(9), again.opening) == (["half"], opening + 1)
    again.close()


def naive(keys: list[str], prefix: str, delimiter: str, after: str) -> list[str]:
    """All rows in order: keys, and common prefixes once."""
    rows: list[str] = []
    for key in sorted(keys, key=str.encode):
        if not key.startswith(prefix) or key.encode() <= after.encode():
            continue
        at = key.find(delimiter, len(prefix)) if delimiter else -1
        row = key if at < 0 else key[: at + len(delimiter)]
        if row not in rows and (at < 0 or not after.startswith(row) or after != row):
            rows.append(row)
    return rows


WORDS = st.text("ab/é", min_size=1, max_size=5)


@given(
    keys=st.sets(WORDS, max_size=12), prefix=st.text("ab/", max_size=2), most=st.integers(1, 4),
    delimiter=st.sampled_from(["", "/", "b", "//"]),
)  # fmt: skip
def test_pages_of_a_listing_are_the_listing(keys: set[str], prefix: str, most: int, delimiter: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        index = Index(Path(folder) / "index.sqlite")
        index.make_bucket("blocks", 1)
        for key in keys:
            put(index, key, f"file of {key}")
        rows: list[str] = []
        page = Listing(after="")
        while True:
            page = index.list_page("blocks", prefix, delimiter, page.after, most)
            found = [each.key for each in page.objects] + page.prefixes
            assert len(found) <= most
            rows += sorted(found, key=str.encode)
            if not page.after:
                break
        index.close()
    assert rows == naive(sorted(keys), prefix, delimiter, "")


def test_a_listing_of_nothing_is_not_truncated(index: Index) -> None:
    put(index, "a", "1")
    assert index.list_page("blocks", "", "", "", 0) == Listing()
    assert [each.key for each in index.list_page("blocks", "", "", "", 9).objects] == ["a"]
    assert index.list_page("blocks", "", "", "a", 9) == Listing()
    with pytest.raises(S3Error):
        index.list_page("nobucket", "", "", "", 9)


def test_an_index_takes_no_more_of_the_disk_than_it_may_and_what_is_there_can_be_removed(
    tmp_path: Path,
) -> None:
    path, most = tmp_path / "small.sqlite", 1 << 18
    index = Index(path, most)
    index.make_bucket("blocks", 1)
    stored: list[str] = []

    def store_many() -> None:
        for number in range(1000):
            index.announce(f"file {number}")
            put(index, f"{number:01000d}", f"file {number}")
            stored.append(f"{number:01000d}")

    with pytest.raises(S3Error) as refused:
        store_many()
    assert refused.value.code == "InsufficientStorage"
    assert 20 < len(stored) < 250
    with pytest.raises(S3Error) as refused:
        index.begin_upload("blocks", Upload("name", "a", 1, {}))
    assert refused.value.code == "InsufficientStorage"
    for key in stored:
        for file in index.remove("blocks", key):
            index.forget(file)
    index.announce("again")
    index.close()
    assert path.stat().st_size < most + 100_000


@pytest.mark.parametrize("delimiter", ["", "/"])
def test_a_page_far_into_a_bucket_costs_no_more_than_the_first(index: Index, delimiter: str) -> None:
    for number in range(1000):
        put(index, f"{number:04d}", f"file {number}")
    steps: list[int] = []

    def count() -> int:
        steps[-1] += 1
        return 0

    index._connection.set_progress_handler(count, 10)
    for after in ("", "0900"):
        steps.append(0)
        assert len(index.list_page("blocks", "", delimiter, after, 50).objects) == 50
    assert steps[1] <= 1.5 * steps[0]
