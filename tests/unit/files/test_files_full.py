"""A full store, a lost block, an enclosure that is away: what a program sees, and what remains."""

from __future__ import annotations

import errno
import itertools
import os

import pytest

from agent.fs.files.block_commit import PLACES_TRIED
from agent.fs.files.space_reclaim import BACKLOG_BLOCKS, RETRY_SECONDS
from agent.fs.interface import Caller
from tests.support.fs.files_calls import CALLER, ROOT
from tests.unit.files.conftest import BLOCK, World


def errno_of(refusal: pytest.ExceptionInfo[OSError]) -> int | None:
    return refusal.value.errno


def fill(world: World, blocks: int) -> None:
    """Leave room for so many blocks of the largest capacity and for none smaller."""
    world.store.slots = {512: 0, 2048: 0, BLOCK: blocks}


def test_full_is_enospc_and_the_file_keeps_what_it_had(world: World) -> None:
    world.calls.put("file", b"old" * 5000)
    world.store.slots = {512: 0, 2048: 0, BLOCK: 2}
    file = world.calls.open("file", os.O_WRONLY)
    with pytest.raises(OSError) as refusal:
        world.calls.pwrite(file, b"new" * 100, 0)
    assert errno_of(refusal) == errno.ENOSPC
    world.calls.close(file)
    assert world.calls.get("file") == b"old" * 5000


def test_a_writer_is_told_at_write_and_keeps_what_was_taken(world: World) -> None:
    fill(world, 5)
    file = world.calls.open("file", os.O_CREAT | os.O_RDWR)
    taken = 0
    while taken < 5 * BLOCK:
        taken += world.calls.pwrite(file, b"x" * 3000, taken)
    assert taken == 5 * BLOCK
    with pytest.raises(OSError) as refusal:
        world.calls.pwrite(file, b"x" * 3000, taken)
    assert errno_of(refusal) == errno.ENOSPC
    world.calls.close(file)
    world.restart()
    assert world.calls.get("file") == b"x" * taken


def test_a_store_that_is_full_for_one_block_only_shows_at_close_at_the_latest(world: World) -> None:
    """Free in sum and yet no slot where the block must go: `usage` does not tell, `put` does."""
    world.calls.put("file", b"old")
    file = world.calls.open("file", os.O_RDWR)
    world.calls.pwrite(file, b"new", 0)
    world.store.refuse_as_full = True
    with pytest.raises(OSError) as refusal:
        world.calls.fsync(file)
    assert errno_of(refusal) == errno.ENOSPC
    assert world.calls.pread(file, 10, 0) == b"new"
    with pytest.raises(OSError) as refusal:
        world.calls.close(file)
    assert errno_of(refusal) == errno.ENOSPC
    world.store.refuse_as_full = False
    assert world.calls.get("file") == b"old"
    assert world.face.gauges().staging_bytes == 0


def test_an_fsync_that_failed_can_be_repeated_when_there_is_room_again(world: World) -> None:
    file = world.calls.open("file", os.O_CREAT | os.O_RDWR)
    world.calls.pwrite(file, b"new", 0)
    world.store.refuse_as_full = True
    with pytest.raises(OSError):
        world.calls.fsync(file)
    world.store.refuse_as_full = False
    world.calls.fsync(file)
    world.restart()
    assert world.calls.get("file") == b"new"


def test_after_a_block_could_not_be_sealed_the_next_write_says_so(world: World) -> None:
    file = world.calls.open("file", os.O_CREAT | os.O_RDWR)
    world.calls.pwrite(file, b"x" * 100, 0)
    world.store.refuse_as_full = True
    assert world.calls.pwrite(file, b"x" * (BLOCK - 100), 100) == BLOCK - 100
    with pytest.raises(OSError) as refusal:
        world.calls.pwrite(file, b"y", BLOCK)
    assert errno_of(refusal) == errno.ENOSPC
    world.store.refuse_as_full = False
    world.calls.pwrite(file, b"y", BLOCK)
    world.calls.close(file)
    assert world.calls.get("file") == b"x" * BLOCK + b"y"


def test_a_write_over_several_blocks_is_taken_in_part_when_the_store_fills_up(world: World) -> None:
    fill(world, 2)
    file = world.calls.open("file", os.O_CREAT | os.O_RDWR)
    assert world.calls.pwrite(file, b"x" * 4 * BLOCK, 0) == 2 * BLOCK
    with pytest.raises(OSError) as refusal:
        world.calls.pwrite(file, b"x", 2 * BLOCK)
    assert errno_of(refusal) == errno.ENOSPC
    world.calls.close(file)
    assert world.calls.stat("file").size == 2 * BLOCK


def test_room_of_removed_files_is_used_before_anything_is_refused(world: World) -> None:
    fill(world, 4)
    for number in range(20):
        world.calls.put("file", bytes([number]) * 4 * BLOCK)
        world.calls.unlink("file")
    world.calls.put("file", b"z" * 4 * BLOCK)
    assert world.calls.get("file") == b"z" * 4 * BLOCK


def test_a_larger_slot_is_taken_when_the_fitting_ones_are_full(world: World) -> None:
    world.store.slots[512] = 1
    for name in "abc":
        world.calls.put(name, b"x" * 100)
    assert sorted(size for size, _ in world.store.blocks.values()) == [512, 2048, 2048]
    assert [world.calls.get(name) for name in "abc"] == [b"x" * 100] * 3


def test_statfs_and_usage_agree(world: World) -> None:
    fill(world, 8)
    world.calls.put("file", b"x" * 3 * BLOCK)
    shown = world.calls.do(lambda: world.face.statfs(0))
    assert shown.blocks * shown.block_size == 8 * BLOCK
    assert shown.blocks_free * shown.block_size == 5 * BLOCK
    world.calls.unlink("file")
    assert world.calls.do(lambda: world.face.statfs(0)).blocks_free * 4096 == 8 * BLOCK


def test_the_number_of_files_is_bounded(world: World) -> None:
    world.restart(files_max=3)
    world.calls.put("a", b"")
    world.calls.mkdir("b")
    for attempt in (lambda: world.calls.put("c", b""), lambda: world.calls.symlink("x", "c")):
        with pytest.raises(OSError) as refusal:
            attempt()
        assert errno_of(refusal) == errno.ENOSPC
    world.calls.unlink("a")
    world.calls.put("c", b"")


def test_open_handles_are_bounded(world: World) -> None:
    world.calls.put("file", b"")
    world.restart(handles_max=2)
    held = [world.calls.open("file", os.O_RDONLY) for _ in range(2)]
    with pytest.raises(OSError) as refusal:
        world.calls.open("file", os.O_RDONLY)
    assert errno_of(refusal) == errno.ENFILE
    for file in held:
        world.calls.close(file)
    assert world.face.gauges().open_files == 0


# Eviction, where the operator chose it.


def test_whole_least_recently_used_files_go(world: World) -> None:
    world.restart(on_full="evict")
    fill(world, 4)
    for name in "abcd":
        world.now_ns += 10**10
        world.calls.put(name, name.encode() * BLOCK)
    world.now_ns += 10**10
    world.calls.get("a")
    world.calls.put("e", b"e" * 2 * BLOCK)
    assert world.calls.listdir("") == ["a", "d", "e"]
    assert world.calls.get("e") == b"e" * 2 * BLOCK
    assert world.face.counters.files_evicted == 2


def test_open_files_stay_and_without_any_other_it_is_enospc(world: World) -> None:
    world.restart(on_full="evict")
    fill(world, 3)
    world.calls.put("held", b"h" * 2 * BLOCK)
    held = world.calls.open("held", os.O_RDONLY)
    world.calls.put("other", b"o" * BLOCK)
    file = world.calls.open("new", os.O_CREAT | os.O_WRONLY)
    assert world.calls.pwrite(file, b"n" * 2 * BLOCK, 0) == BLOCK
    with pytest.raises(OSError) as refusal:
        world.calls.pwrite(file, b"n", BLOCK)
    assert errno_of(refusal) == errno.ENOSPC
    world.calls.close(file)
    assert world.calls.listdir("") == ["held", "new"]
    assert world.calls.pread(held, 2 * BLOCK, 0) == b"h" * 2 * BLOCK
    world.calls.close(held)


@pytest.mark.interpreted
def test_an_evicted_file_goes_under_all_its_names_and_its_number_is_stale(world: World) -> None:
    world.restart(on_full="evict")
    fill(world, 2)
    world.calls.mkdir("d")
    world.calls.put("a", b"a" * 2 * BLOCK)
    world.calls.link("a", "d/b")
    ino = world.calls.ino("a")
    world.calls.put("new", b"n" * 2 * BLOCK)
    assert (world.calls.listdir(""), world.calls.listdir("d")) == (["d", "new"], [])
    with pytest.raises(OSError) as refusal:
        world.calls.do(lambda: world.face.open(Caller(), ino, os.O_RDONLY))
    assert errno_of(refusal) == errno.ESTALE


def test_an_outage_does_not_cost_file_after_file(world: World) -> None:
    world.restart(on_full="evict")
    fill(world, 4)
    for name in "abcd":
        world.calls.put(name, name.encode() * BLOCK)
    world.store.unavailable = {"delete"}
    for _ in range(3):
        with pytest.raises(OSError):
            world.calls.put("new", b"n" * BLOCK)
    assert world.face.counters.files_evicted == 1
    world.store.unavailable = set()
    world.calls.put("new", b"n" * BLOCK)
    assert world.face.counters.files_evicted == 1


# Lost blocks and absent enclosures.


@pytest.mark.expects_log("lost a block")
def test_a_file_that_lost_a_block_reads_as_eio_until_that_is_certain_and_is_then_gone(world: World) -> None:
    world.calls.put("file", b"x" * 3 * BLOCK)
    world.calls.link("file", "other")
    world.store.blocks.pop(sorted(world.store.blocks)[0])
    for _ in range(2):
        with pytest.raises(OSError) as refusal:
            world.calls.get("file")
        assert errno_of(refusal) == errno.EIO
    world.look_into_suspects()
    for name in ("file", "other"):
        with pytest.raises(OSError) as refusal:
            world.calls.get(name)
        assert errno_of(refusal) == errno.ENOENT
    world.collect()
    assert world.store.blocks == {}
    assert world.face.counters.files_lost == 1


@pytest.mark.expects_log("lost a block")
def test_a_lost_file_that_the_kernel_remembers_is_stale_and_stays_with_who_has_it_open(world: World) -> None:
    world.calls.put("file", b"x" * 2 * BLOCK)
    entry = world.calls.do(lambda: world.face.lookup(CALLER, ROOT, b"file"))
    holder = world.calls.open("file", os.O_RDONLY)
    world.store.blocks.pop(sorted(world.store.blocks)[0])
    with pytest.raises(OSError):
        world.calls.pread(holder, 2 * BLOCK, 0)
    world.look_into_suspects()
    for _ in range(2):
        with pytest.raises(OSError) as refusal:
            world.calls.do(lambda: world.face.open(CALLER, entry.attributes.ino, os.O_RDONLY))
        assert errno_of(refusal) == errno.ESTALE
        assert world.calls.fstat(holder).links == 0
    world.calls.close(holder)
    with pytest.raises(OSError) as refusal:
        world.calls.do(lambda: world.face.getattr(CALLER, entry.attributes.ino, None))
    assert errno_of(refusal) == errno.ESTALE


@pytest.mark.expects_log("lost a block")
def test_a_lost_block_is_found_by_an_overwrite_too(world: World) -> None:
    world.calls.put("file", b"x" * 1000)
    world.store.blocks.clear()
    file = world.calls.open("file", os.O_WRONLY)
    with pytest.raises(OSError) as refusal:
        world.calls.pwrite(file, b"y", 10)
    assert errno_of(refusal) == errno.EIO
    world.calls.close(file)
    world.look_into_suspects()
    assert world.calls.listdir("") == []
    assert world.face.gauges().staging_bytes == 0


def test_an_enclosure_that_is_away_costs_eio_and_not_the_file(world: World) -> None:
    world.calls.put("file", b"x" * 1000)
    world.store.unavailable = {"get", "put", "flush"}
    file = world.calls.open("file", os.O_RDWR)
    for attempt in (
        lambda: world.calls.pread(file, 10, 0),
        lambda: world.calls.pwrite(file, b"y", 10),
        lambda: world.calls.pwrite(file, b"y" * BLOCK, 0),
        lambda: world.calls.fsync(file),
    ):
        with pytest.raises(OSError) as refusal:
            attempt()
        assert errno_of(refusal) == errno.EIO
    world.store.unavailable = set()
    assert world.calls.pread(file, 2000, 0) == b"x" * 1000
    world.calls.close(file)


def test_a_block_whose_place_cannot_be_written_is_put_elsewhere(world: World) -> None:
    tries = itertools.count(1)

    def unavailable_at_first(step: str) -> None:
        if step == "put":
            world.store.unavailable = {"put"} if next(tries) < PLACES_TRIED else set()

    file = world.calls.open("file", os.O_CREAT | os.O_RDWR)
    world.calls.pwrite(file, b"x", 0)
    world.store.before = unavailable_at_first
    world.calls.fsync(file)
    assert next(tries) == PLACES_TRIED + 1
    assert world.store.puts == len(world.store.blocks) == 1
    world.calls.close(file)
    assert world.calls.get("file") == b"x"


def test_a_block_that_may_have_been_stored_is_deleted_later(world: World) -> None:
    """The puts took effect, their answers did not come: the blocks are doomed, each try has another name."""
    world.store.unavailable = {"stored"}
    file = world.calls.open("file", os.O_CREAT | os.O_RDWR)
    world.calls.pwrite(file, b"x", 0)
    with pytest.raises(OSError) as refusal:
        world.calls.fsync(file)
    assert errno_of(refusal) == errno.EIO
    assert len(world.store.blocks) == PLACES_TRIED
    world.store.unavailable = set()
    world.calls.close(file)
    assert len(world.store.blocks) == PLACES_TRIED + 1
    world.collect()
    assert len(world.store.blocks) == 1
    assert world.calls.get("file") == b"x"


def test_one_doomed_block_that_cannot_be_deleted_does_not_hold_up_the_others(world: World) -> None:
    for name in "abc":
        world.calls.put(name, b"x" * BLOCK)
        world.calls.unlink(name)
    failures = iter([True, False, False, False])

    def first_delete_fails(step: str) -> None:
        world.store.unavailable = {"delete"} if step == "delete" and next(failures) else set()

    world.store.before = first_delete_fails
    world.calls.do(world.face.collect)
    assert len(world.store.blocks) == 1
    assert not world.calls.do(world.face.collect), "it is left alone for a while"
    world.later += RETRY_SECONDS
    world.calls.do(world.face.collect)
    assert world.store.blocks == {}


@pytest.mark.expects_log("blocks that files have given up keep their room")
def test_what_cannot_be_deleted_does_not_fill_up_the_store(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """More goes through than there is room for, while an enclosure that holds a part of it is away."""
    fill(world, 200)
    for number in range(180):
        world.calls.put(f"old{number}", b"x" * BLOCK)
    world.store.is_away = lambda name: name[0] % 4 != 0
    kept = sum(world.store.is_away(name) for name in world.store.blocks)
    for number in range(180):
        world.calls.unlink(f"old{number}")
    for _ in range(250):
        world.calls.put("new", b"y" * BLOCK)
        world.calls.unlink("new")
        world.later += 0.1
        while world.calls.do(world.face.collect):
            pass
        assert world.face.gauges().doomed_blocks == len(world.store.blocks) == kept
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warned) == 1
    assert warned[0].startswith(f"{kept} blocks")
    deletes = world.store.deletes
    world.store.is_away = lambda name: False
    world.later += RETRY_SECONDS
    world.collect()
    assert world.store.blocks == {}
    assert world.store.deletes - deletes == kept


def test_operations_do_not_try_again_what_cannot_be_deleted(world: World) -> None:
    for number in range(BACKLOG_BLOCKS - 2):
        world.calls.put(f"old{number}", b"x" * BLOCK)
    for number in range(BACKLOG_BLOCKS - 2):
        world.calls.unlink(f"old{number}")
    world.store.is_away = lambda name: True
    while world.calls.do(world.face.collect):
        pass
    world.store.is_away = lambda name: False
    tried = world.store.deletes
    for number in range(10):
        world.calls.put("new", b"y%d" % number)
    assert world.store.deletes == tried


def test_a_sweep_ends_when_refusals_take_long(world: World) -> None:
    for number in range(10):
        world.calls.put(f"old{number}", b"x" * BLOCK)
        world.calls.unlink(f"old{number}")

    def slow(step: str) -> None:
        if step == "delete":
            world.later += 0.6
            world.store.unavailable = {"delete"}

    world.store.before = slow
    assert not world.calls.do(world.face.collect)
    assert world.store.deletes == 0
    world.store.before = lambda step: None
    world.store.unavailable = set()
    assert world.calls.do(world.face.collect)
    assert len(world.store.blocks) == 2, "it went on behind those two"


def test_a_block_gets_a_name_that_leads_to_an_enclosure_that_is_there(world: World) -> None:
    world.store.is_away = lambda name: name[0] % 16 != 0
    for number in range(100):
        world.calls.put(f"file{number}", b"x%d" % number)
    assert world.face.counters.seals_failed == 0
    assert world.face.gauges().doomed_blocks == 0, "of names that were not used nothing is to be deleted"
    assert all(world.calls.get(f"file{number}") == b"x%d" % number for number in range(100))


def test_no_name_helps_where_all_are_away(world: World) -> None:
    world.store.is_away = lambda name: True
    file = world.calls.open("file", os.O_CREAT | os.O_RDWR)
    world.calls.pwrite(file, b"x", 0)
    with pytest.raises(OSError) as refusal:
        world.calls.fsync(file)
    assert errno_of(refusal) == errno.EIO
    assert world.face.gauges().doomed_blocks == 0
    world.store.is_away = lambda name: False
    world.calls.fsync(file)
    world.calls.close(file)
    assert world.calls.get("file") == b"x"
