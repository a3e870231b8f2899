"""Folders as places in G4, and what a bundle and its name are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.pool.format.spill_mark import SpillMark, could_be, decode, is_mark, step_bytes
from agent.spill.bundle import ITEMS_MAX, BundleBuilder, Damaged, items_untrusted
from agent.spill.folder import FolderTarget
from agent.spill.names import GENERATION_SECONDS, age_of, bundle_name, new_number, volume_prefix
from agent.spill.room import Room
from agent.spill.target import Gone, Taken, TargetError
from tests.support.pool.spill_pool import POOL_ID, MemoryTarget

VOLUME = bytes(range(16))


def test_a_folder_stores_once_and_gives_ranges(tmp_path: Path) -> None:
    target = FolderTarget(tmp_path, 1 << 20)
    name = bundle_name(POOL_ID, VOLUME, 77)
    target.put(name, memoryview(bytes(range(256))))
    with pytest.raises(Taken):
        target.put(name, memoryview(b"another"))
    assert target.fetch(name, 10, 5).result(10) == bytes(range(10, 15))
    assert target.fetch(name, 250, 100).result(10) == bytes(range(250, 256))
    with pytest.raises(Gone):
        target.fetch(name + "x", 0, 1).result(10)
    assert [(each.name, each.size) for each in target.names(volume_prefix(POOL_ID, VOLUME))] == [(name, 256)]
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    target.delete(name)
    target.delete(name)
    assert list(target.names(volume_prefix(POOL_ID, VOLUME))) == []
    target.close()


def test_a_folder_that_goes_is_an_error_and_comes_again(tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    target = FolderTarget(folder)
    name = bundle_name(POOL_ID, VOLUME, 1)
    folder.rename(tmp_path / "away")
    folder.write_text("no folder")
    with pytest.raises(TargetError):
        target.put(name, memoryview(b"one"))
    with pytest.raises(TargetError):
        target.fetch(name, 0, 1).result(10)
    folder.unlink()
    (tmp_path / "away").rename(folder)
    target.put(name, memoryview(b"one"))
    assert target.fetch(name, 0, 3).result(10) == b"one"
    target.close()


def test_names_are_a_function_of_the_number_and_grow_old() -> None:
    wall = 1_800_000_000.0
    number = new_number(wall)
    assert number < 1 << 28
    name = bundle_name(POOL_ID, VOLUME, number)
    assert name == bundle_name(POOL_ID, VOLUME, number)
    assert name.startswith(volume_prefix(POOL_ID, VOLUME))
    assert age_of(name, wall) == 0
    assert age_of(name, wall + 3 * GENERATION_SECONDS) == 3
    assert age_of("something else", wall) == 256
    assert age_of(volume_prefix(POOL_ID, VOLUME) + "zz/00000", wall) == 256


MARKS = [SpillMark(0, 1, 1), SpillMark((1 << 28) - 1, 4095, 16), SpillMark(77, 9, 5)]


@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_is_read_as_it_was_written(mark: SpillMark) -> None:
    pseudonym = os.urandom(16)
    ghost = mark.encode(pseudonym)
    assert len(ghost) == 8
    assert is_mark(ghost)
    assert decode(ghost) == mark
    assert could_be(ghost, pseudonym)
    assert not could_be(ghost, pseudonym[:-1] + bytes((pseudonym[-1] ^ 1,)))
    assert not could_be(ghost, pseudonym[:13] + bytes((pseudonym[13] ^ 1,)) + pseudonym[14:])


@pytest.mark.parametrize("slot_bytes", [4096 + (64 << 10), 4096 + (1 << 20), 4096 + (16 << 20)])
def test_a_bundle_says_where_its_items_are(slot_bytes: int) -> None:
    builder, items = BundleBuilder(slot_bytes, 64 << 20), []
    while builder.has_room(slot_bytes):
        item = os.urandom(4096) * (slot_bytes // 4096)
        builder.room(slot_bytes)[:] = item
        items.append((builder.add(slot_bytes), item))
    assert 3 <= len(items) <= ITEMS_MAX
    raw = bytes(builder.finish(POOL_ID, VOLUME, 5))
    assert len(raw) <= 64 << 20
    found = list(items_untrusted(raw[:4096]))
    step = step_bytes(slot_bytes)
    assert [each.offset for each in found] == [mark.step * step for mark, _ in items]
    assert [raw[each.offset : each.offset + each.size] for each in found] == [item for _, item in items]
    with pytest.raises(Damaged):
        list(items_untrusted(raw[:100] + b"!" + raw[101:4096]))
    with pytest.raises(Damaged):
        list(items_untrusted(raw[:4000]))


def test_room_is_counted_and_the_oldest_goes_first() -> None:
    target, wall = MemoryTarget(), 1_800_000_000.0
    numbers = [new_number(wall - age * GENERATION_SECONDS) for age in (9, 3, 1, 0)]
    for number in numbers:
        target.put(bundle_name(POOL_ID, VOLUME, number), memoryview(bytes(100)))
    target.put(bundle_name(POOL_ID, bytes(16), 1), memoryview(bytes(100)))
    room = Room(target, POOL_ID, VOLUME, 450)
    room.survey(10.0, wall)
    assert room.used == 400
    assert not room.take(100)
    assert room.take(40)
    assert room.make_room() == 1
    left = [each.name for each in target.names(volume_prefix(POOL_ID, VOLUME))]
    assert left == [bundle_name(POOL_ID, VOLUME, number) for number in numbers[1:]]
    assert room.delete_all()
    assert len(target.objects) == 1, "another volume's bundles stay"
