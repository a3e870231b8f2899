"""A folder in which others write: no link is followed, and nothing is deleted that is no bundle's."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.spill.bundle import BundleBuilder
from agent.spill.care import LEFTOVER_SECONDS, check, usage
from agent.spill.folder import THREADS, WAITING_MAX, FolderTarget
from agent.spill.names import ROOT, bundle_name, pool_prefix, volume_of, volume_prefix
from agent.spill.room import Room
from agent.spill.target import Gone, Stored, Target, TargetError
from tests.support.pool.spill_pool import POOL_ID, MemoryTarget

VOLUME = bytes(range(16))
NAME = bundle_name(POOL_ID, VOLUME, 77)
SECONDS = 10.0


@pytest.fixture
def below(tmp_path: Path) -> Iterator[tuple[Path, Path, Target]]:
    """The folder, a foreign file beside it that is named as a bundle is, and the target."""
    foreign = tmp_path / "foreign" / NAME
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"foreign" * 1000)
    folder = tmp_path / "folder"
    folder.mkdir()
    target = FolderTarget(folder)
    yield folder, foreign, target
    target.close()


PARTS = [ROOT, f"{ROOT}/{POOL_ID}", volume_prefix(POOL_ID, VOLUME)[:-1], os.path.dirname(NAME), NAME]


@pytest.mark.parametrize("part", PARTS, ids=["root", "pool", "volume", "generation", "bundle"])
def test_a_link_in_the_way_is_followed_by_nothing(below: tuple[Path, Path, Target], part: str) -> None:
    folder, foreign, target = below
    (folder / part).parent.mkdir(parents=True, exist_ok=True)
    (folder / part).symlink_to(folder.parent / "foreign" / part)
    with pytest.raises(TargetError):
        target.fetch(NAME, 0, 7).result(SECONDS)
    with pytest.raises(TargetError):
        target.put(NAME, memoryview(b"one"))
    if part != NAME:
        with pytest.raises(TargetError):
            target.put(bundle_name(POOL_ID, VOLUME, 78), memoryview(b"one"))
    room = Room(target, POOL_ID, VOLUME, 90)
    for walk in (lambda: check(target, POOL_ID), lambda: room.survey(1.0, time.time()), room.delete_all):
        with contextlib.suppress(TargetError):
            walk()
    assert room.make_room() == 0
    assert foreign.read_bytes() == b"foreign" * 1000
    assert [each.name for each in foreign.parent.iterdir()] == [foreign.name]


def test_what_is_no_regular_file_is_no_bundle_and_holds_no_thread(below: tuple[Path, Path, Target]) -> None:
    folder, _, target = below
    target.put(NAME, memoryview(b"12345"))
    names = [bundle_name(POOL_ID, VOLUME, number) for number in range(64, 72)]
    for name in names:
        os.mkfifo(folder / name)
    asked = [target.fetch(name, 0, 5) for name in names]
    assert target.fetch(NAME, 0, 5).result(SECONDS) == b"12345"
    for each in asked:
        with pytest.raises(Gone):
            each.result(SECONDS)
    assert list(target.names(pool_prefix(POOL_ID))) == [Stored(NAME, 5)]


@pytest.mark.parametrize("name", ["../foreign/x", f"{ROOT}/../../foreign/x", f"{ROOT}//x", "{foreign}"])
def test_a_name_leads_nowhere_but_below_the_folder(below: tuple[Path, Path, Target], name: str) -> None:
    _, foreign, target = below
    name = name.format(foreign=foreign)
    with pytest.raises(TargetError):
        target.put(name, memoryview(b"one"))
    with pytest.raises(TargetError):
        target.delete(name)
    assert foreign.exists()


def test_what_has_no_name_of_g35s_stays(below: tuple[Path, Path, Target]) -> None:
    folder, _, target = below
    target.put(NAME, memoryview(bytes(100)))
    generation = (folder / NAME).parent
    theirs = [
        generation / "notes.txt",
        generation / "ABCDE",
        generation.parent / "passwd",
        generation.parent / "zz" / "00000",
        generation.parent.parent / "notes" / "00" / "00000",
        generation.parent.parent / "README",
    ]
    partial = generation / ".part-0123456789abcdef"
    for each in [*theirs, partial]:
        each.parent.mkdir(exist_ok=True, parents=True)
        each.write_bytes(bytes(1000))
    assert {each.name for each in target.names(pool_prefix(POOL_ID))} == {
        NAME,
        str(partial.relative_to(folder)),
    }
    room = Room(target, POOL_ID, VOLUME, 90)
    room.survey(1.0, time.time())
    assert room.make_room() == 1
    target.put(NAME, memoryview(bytes(100)))
    assert room.delete_all()
    assert partial.exists()
    found = check(target, POOL_ID)
    assert (found.leftovers, found.being_written) == (0, 1), "another agent may be writing it"
    assert partial.exists()
    an_hour_ago = time.time() - LEFTOVER_SECONDS - 1
    os.utime(partial, (an_hour_ago, an_hour_ago))
    assert check(target, POOL_ID).leftovers == 1
    assert not partial.exists()
    assert all(each.exists() for each in theirs)


def test_a_room_deletes_in_a_bucket_what_is_named_as_a_bundle_alone() -> None:
    target, volume = MemoryTarget(), volume_prefix(POOL_ID, VOLUME)
    for name in (NAME, volume + "00/notes", volume + "00/ABCDE", volume + "00/more/00000", volume + "x"):
        target.objects[name] = bytes(100)
    room = Room(target, POOL_ID, VOLUME, 90)
    room.survey(1.0, time.time())
    assert room.used == 500
    assert room.make_room() == 1
    target.objects[NAME] = bytes(100)
    assert room.delete_all()
    assert len(target.objects) == 4
    assert NAME not in target.objects


@pytest.mark.parametrize("volume", ["z" * 32, "A" * 32, "0" * 31, "0x" + "0" * 30, " " * 32])
def test_the_id_of_a_volume_is_hexadecimal(volume: str) -> None:
    target = MemoryTarget()
    name = f"{pool_prefix(POOL_ID)}{volume}/00/abcde"
    assert not volume_of(name, POOL_ID)
    target.objects[name] = b""
    assert list(usage(target, POOL_ID, 1.8e9)) == [""]
    assert volume_of(NAME, POOL_ID) == VOLUME.hex()
    assert not volume_of(NAME, "f" * 32)


def test_where_another_file_system_shows_nothing_is_written(tmp_path: Path) -> None:
    mounted, folder = tmp_path / "mounted", tmp_path / "folder"
    mounted.mkdir()
    folder.symlink_to(mounted)
    target = FolderTarget(folder)
    target.put(NAME, memoryview(b"one"))
    folder.unlink()
    folder.symlink_to("/proc")
    for call in (
        lambda: target.put(NAME, memoryview(b"one")),
        lambda: target.fetch(NAME, 0, 3).result(SECONDS),
        lambda: target.delete(NAME),
        lambda: list(target.names(pool_prefix(POOL_ID))),
    ):
        with pytest.raises(TargetError, match="another file system") as refused:
            call()
        assert not isinstance(refused.value, Gone)
    folder.unlink()
    folder.symlink_to(mounted)
    assert target.fetch(NAME, 0, 3).result(SECONDS) == b"one"
    target.close()


def test_the_folder_itself_is_never_made(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    target = FolderTarget(folder)
    folder.rmdir()
    for call in (
        lambda: target.put(NAME, memoryview(b"one")),
        lambda: target.fetch(NAME, 0, 3).result(SECONDS),
        lambda: target.delete(NAME),
        lambda: list(target.names(pool_prefix(POOL_ID))),
    ):
        with pytest.raises(TargetError, match="it is not there") as refused:
            call()
        assert not isinstance(refused.value, Gone)
    assert not folder.exists()
    target.close()


def stored_bundle(target: Target, *, values: int = 8, folder: Path) -> Path:
    builder = BundleBuilder(4096 + 16384, 8 << 20)
    for _ in range(values):
        builder.room(20480)[:] = os.urandom(20480)
        builder.add(20480)
    target.put(NAME, builder.finish(POOL_ID, VOLUME, 77))
    return folder / NAME


@pytest.mark.parametrize(("left", "good"), [(8, 8), (3, 3), (1, 1), (0, 0)])
def test_a_bundle_cut_short_is_kept_for_the_values_before_the_cut(
    below: tuple[Path, Path, Target], left: int, good: int
) -> None:
    folder, _, target = below
    file = stored_bundle(target, folder=folder)
    os.truncate(file, 4096 + left * 20480 + (5000 if left < 8 else 0))
    found = check(target, POOL_ID)
    assert (found.values, found.bad_values) == (good, 8 - good)
    assert file.exists() == (good > 0)
    assert found.bad_count == (good == 0)


def test_a_huge_file_under_a_bundles_name_is_not_read_into_memory(below: tuple[Path, Path, Target]) -> None:
    folder, _, target = below
    file = stored_bundle(target, folder=folder)
    os.truncate(file, 1 << 42)
    assert check(target, POOL_ID).values == 8
    os.truncate(file, 0)
    os.truncate(file, 1 << 42)
    assert check(target, POOL_ID).bad_count == 1
    assert not file.exists()


@pytest.mark.parametrize("error", [MemoryError(), OSError(), OSError(22, "invalid"), ValueError("null byte")])
def test_a_read_that_fails_ends_no_thread(
    below: tuple[Path, Path, Target], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    _, _, target = below
    target.put(NAME, memoryview(b"12345"))
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> bytes:
            raise error

        patch.setattr("agent.spill.folder.os.pread", refuse)
        for _ in range(THREADS * 2):
            with pytest.raises(TargetError, match="cannot read"):
                target.fetch(NAME, 0, 5).result(SECONDS)
    assert target.fetch(NAME, 0, 5).result(SECONDS) == b"12345"


def test_what_is_given_up_waits_for_no_thread_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    read = FolderTarget._read

    def hang(self: FolderTarget, name: str, offset: int, size: int) -> bytes:
        over.wait(60)
        return read(self, name, offset, size)

    monkeypatch.setattr(FolderTarget, "_read", hang)
    target = FolderTarget(tmp_path)
    target.put(NAME, memoryview(b"12345"))
    for _ in range(4 * WAITING_MAX):
        asked = target.fetch(NAME, 0, 5)
        target.give_up(asked)
    waiting = [target.fetch(NAME, 0, 5) for _ in range(2 * WAITING_MAX + THREADS)]
    assert len(target._wanted) <= WAITING_MAX
    refused = [each for each in waiting if each.done()]
    assert len(refused) >= WAITING_MAX
    with pytest.raises(TargetError, match="no more can be asked"):
        refused[0].result(0)
    over.set()
    answers = [each.exception(SECONDS) or each.result(SECONDS) for each in waiting]
    assert answers.count(b"12345") >= WAITING_MAX
    target.close()
    with pytest.raises(TargetError):
        target.fetch(NAME, 0, 5).result(0)
