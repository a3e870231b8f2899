"""The directory block: its bytes, its entries under damage, and which slot a new value gets."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.pool.format.directory import DIRECTORY_BYTES, ENTRY_BYTES, SLOTS_PER_SET, Directory, Entry, InDoubt
from agent.pool.format.eviction_choice import Choice, choose_slot

VECTORS = Path(__file__).parents[2] / "vectors" / "pool.json"
NOW = 1_800_000_000.0
FULL = Entry(
    pseudonym=bytes(range(0x10, 0x20)),
    generation=0x0102030405060708,
    last_use_us=0x1112131415161718,
    length=0x21222324,
    expiry=0x31323334,
    pinned_until=0x41424344,
    hits=0x5152,
    flags=0x6162,
    ghost=bytes(range(0x70, 0x78)),
    tag=0x81828384,
)


def pseudonym(number: int) -> bytes:
    return random.Random(f"pseudonym {number}").randbytes(16)


def entry(number: int, *, age: float = 0.0, hits: int = 0, **more: int) -> Entry:
    return Entry(pseudonym(number), 1000 + number, int((NOW - age) * 1e6), 4096, hits=hits, **more)


def full_directory() -> Directory:
    directory = Directory()
    for slot in range(SLOTS_PER_SET):
        directory.install(slot, entry(slot, age=100.0 + slot))
    return directory


def test_golden_entry_and_block() -> None:
    golden = json.loads(VECTORS.read_text())
    assert FULL.encode().hex() == golden["entry"]
    directory = Directory()
    directory.install(0, FULL)
    directory.install(63, FULL)
    assert directory.image().hex() == golden["entry"] + bytes(62 * 64).hex() + golden["entry"]
    again = Directory(directory.image())
    assert list(again) == [(0, FULL), (63, FULL)]
    assert not again.corrupt_keys


def test_find_install_clear() -> None:
    directory = full_directory()
    for slot in range(SLOTS_PER_SET):
        assert directory.find(pseudonym(slot)) == slot
        assert directory.entry(slot) == entry(slot, age=100.0 + slot)
    directory.clear(7)
    assert directory.find(pseudonym(7)) is None
    assert directory.entry(7) is None
    assert len(list(directory)) == 63
    directory.install(7, entry(9))
    assert directory.find_all(pseudonym(9)) == [7, 9]
    assert directory.find_all(pseudonym(7)) == []
    assert Directory(directory.image()).find_all(pseudonym(9)) == [7, 9]


def test_a_pseudonym_is_found_only_where_one_stands() -> None:
    """The bytes of a key may come up anywhere in a block; only the start of an entry counts."""
    directory = Directory()
    tricky = bytes(8) + b"\x01" * 8
    directory.install(3, Entry(b"\x02" * 16, int.from_bytes(tricky[:8], "little"), 0x0101010101010101, 5))
    assert directory.raw.find(tricky) >= 0
    assert directory.find(tricky) is None
    directory.install(5, Entry(tricky, 1, 1, 1))
    assert directory.find(tricky) == 5


def test_a_hint_is_of_the_entry_that_is_found() -> None:
    alike = [b"\x07" + pseudonym(number)[1:] for number in range(SLOTS_PER_SET - 2)]
    directory = Directory()
    for slot, each in enumerate(alike):
        directory.install(slot, Entry(each, 1, 1, length=1000 + slot, expiry=50 + slot if slot % 2 else 0))
    for slot, each in enumerate(alike):
        assert directory.find(each) == slot
        assert directory.find_length(each, 49.0 + slot) == 1000 + slot
        assert directory.find_length(each, 50.0 + slot) == (-1 if slot % 2 else 1000 + slot)
    nobody = b"\x07" + pseudonym(99)[1:]
    assert directory.find(nobody) is None
    assert directory.find_length(nobody, 0.0) == directory.find_length(pseudonym(99), 0.0) == -1


def test_a_length_is_found_whichever_way_the_entry_came_and_not_after_it_went() -> None:
    directory = full_directory()
    lengths = {entry.pseudonym: entry.length for _, entry in directory}
    for each in (directory, directory.copy(), Directory(directory.image())):
        assert {name: each.find_length(name, 0.0) for name in lengths} == lengths
    other, slot = Directory(), 7
    entry = directory.entry(slot)
    assert entry is not None
    other.take_over(slot, directory)
    assert other.find_length(entry.pseudonym, 0.0) == entry.length
    directory.clear(slot)
    assert directory.find_length(entry.pseudonym, 0.0) == -1
    damaged = bytearray(other.image())
    damaged[slot * 64 + 20] ^= 1
    assert Directory(damaged).find_length(entry.pseudonym, 0.0) == -1


def test_ghosts_outlive_clearing_and_reading() -> None:
    directory = full_directory()
    directory.clear(5, ghost=pseudonym(5))
    directory.clear(6)
    again = Directory(directory.image())
    assert again.has_ghost(pseudonym(5))
    assert not again.has_ghost(pseudonym(6))
    assert again.ghost(5) == pseudonym(5)[:8]
    again.clear(5)
    assert again.has_ghost(pseudonym(5)), "a clear without a ghost keeps the older one"
    assert not again.corrupt_keys


def test_touch_and_pin_reach_the_image_with_a_right_crc() -> None:
    directory = full_directory()
    for _ in range(3):
        directory.touch(4, 12345)
    directory.pin(8, 777)
    again = Directory(directory.image())
    assert not again.corrupt_keys
    assert (again.entry(4).hits, again.entry(4).last_use_us) == (3, 12345)  # type: ignore[union-attr]
    assert again.entry(8).pinned_until == 777  # type: ignore[union-attr]
    assert again.copy().raw == again.raw


def test_hits_saturate() -> None:
    directory = Directory()
    directory.install(0, entry(0, hits=0xFFFE))
    for _ in range(3):
        directory.touch(0, 1)
    assert directory.entry(0).hits == 0xFFFF  # type: ignore[union-attr]


def test_merge_takes_over_uses_and_pins_of_the_same_write_only() -> None:
    ours = full_directory()
    flash = Directory(ours.image())
    flash.install(2, Entry(pseudonym(2), 99, 0, 4096))
    for slot in (1, 2):
        ours.touch(slot, int(NOW * 1e6))
        ours.pin(slot, 4_000_000_000)
    flash.merge_uses(ours)
    merged = Directory(flash.image())
    assert merged.entry(1).hits == 1  # type: ignore[union-attr]
    assert merged.entry(1).pinned_until == 4_000_000_000  # type: ignore[union-attr]
    assert merged.entry(2) == Entry(pseudonym(2), 99, 0, 4096)
    assert not merged.corrupt_keys
    # A pin that only flash knows, another agent's, is not undone by what we remember.
    theirs = Directory(full_directory().image())
    theirs.pin(9, 55)
    fresh = Directory(theirs.image())
    fresh.merge_uses(full_directory())
    assert fresh.entry(9).pinned_until == 55  # type: ignore[union-attr]


def test_every_flipped_bit_of_an_entry_frees_it_and_only_it() -> None:
    directory = full_directory()
    image = directory.image()
    for bit in range(ENTRY_BYTES * 8):
        at = 17 * ENTRY_BYTES + bit // 8
        damaged = bytearray(image)
        damaged[at] ^= 1 << bit % 8
        found = Directory(damaged)
        assert found.entry(17) is None, f"bit {bit}"
        assert found.find(pseudonym(17)) is None
        assert len(list(found)) == 63
        assert len(found.corrupt_keys) == 1
        if bit >= 128:
            assert pseudonym(17) in found.corrupt_keys
        with pytest.raises(InDoubt):
            found.image()
        found.believe()
        # What is written next is whole again.
        assert not Directory(found.image()).corrupt_keys


def test_a_flipped_bit_in_a_free_entry_makes_no_entry() -> None:
    for bit in range(ENTRY_BYTES * 8):
        block = bytearray(DIRECTORY_BYTES)
        block[64 + bit // 8] ^= 1 << bit % 8
        assert list(Directory(block)) == []


@given(st.binary(max_size=300), st.integers(0, 1 << 32))
def test_any_block_is_a_directory(piece: bytes, rest: int) -> None:
    block = (piece + random.Random(rest).randbytes(DIRECTORY_BYTES))[:DIRECTORY_BYTES]
    directory = Directory(block)
    for slot, found in directory:
        assert found.encode() == bytes(directory.raw[slot * 64 : slot * 64 + 64])
    directory.believe()
    assert not Directory(directory.image()).corrupt_keys
    choose_slot(directory, set(), NOW)


def test_a_torn_mix_of_two_entries_is_neither() -> None:
    """Half of one image and half of another, at every 8 bytes: the CRC lets none of the mixes through."""
    old, new = entry(1).encode(), entry(2).encode()
    for cut in range(8, 64, 8):
        directory = Directory((old[:cut] + new[cut:]).ljust(DIRECTORY_BYTES, b"\0"))
        assert list(directory) == []


# -- choosing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("hits", [(0,), (0, 0, 0, 1, 7, 0xFFFF)])
def test_the_victim_of_a_full_set_has_the_greatest_age_over_hits(hits: tuple[int, ...], seed: int) -> None:
    """By whichever way it is found, and the first of several that are alike."""
    dice = random.Random(seed)
    for _ in range(200):
        directory = Directory()
        ages = dice.choices([-3.0, 0.0, 1.0, 5.0, 100.0, dice.random()], k=SLOTS_PER_SET)
        for slot, age in enumerate(ages):
            pinned = dice.choice([0, int(NOW) - 5])
            directory.install(slot, entry(slot, age=age, hits=dice.choice(hits), pinned_until=pinned))
        taken = set(dice.sample(range(SLOTS_PER_SET), dice.choice([0, 0, 3, 63, 64])))
        scores = {
            slot: max(0, int(NOW * 1e6) - found.last_use_us) / (1 + found.hits)
            for slot, found in directory
            if slot not in taken
        }
        choice = choose_slot(directory, taken, NOW)
        if not scores:
            assert choice is None
            continue
        assert choice is not None
        best = max(scores.values())
        assert choice.slot == min(slot for slot, score in scores.items() if score == best)
        assert choice == (choice.slot, directory.entry(choice.slot), best / 1e6, 0)


def test_what_is_pinned_and_what_was_got_is_known_without_a_walk() -> None:
    directory = full_directory()
    assert not directory.has_pinned(NOW)
    directory.pin(63, int(NOW) + 256)
    assert directory.has_pinned(NOW)
    assert not directory.has_pinned(NOW + 256)
    fresh = Directory()
    assert not fresh.has_hits()
    fresh.install(5, entry(5))
    assert not fresh.has_hits()
    fresh.touch(5, 1)
    assert fresh.has_hits()
    fresh.install(5, entry(5, hits=0x100))
    assert fresh.has_hits()


def chosen(directory: Directory, **options: object) -> Choice:
    choice = choose_slot(directory, options.pop("taken", set()), NOW, **options)  # type: ignore[arg-type]
    assert choice is not None
    return choice


def test_a_free_slot_comes_first_from_the_start_on() -> None:
    directory = full_directory()
    directory.clear(10)
    directory.clear(40)
    assert chosen(directory).slot == 10
    assert chosen(directory).victim is None
    assert chosen(directory).free_slots == 2
    assert chosen(directory, start=11).slot == 40
    assert chosen(directory, start=41).slot == 10
    assert chosen(directory, taken={10}).slot == 40
    assert chosen(directory, taken={10}).free_slots == 1


def test_an_expired_entry_comes_before_a_live_one() -> None:
    directory = full_directory()
    directory.install(20, entry(20, expiry=int(NOW) - 1))
    choice = chosen(directory)
    assert (choice.slot, choice.cost, choice.free_slots) == (20, float("inf"), 1)
    assert choice.victim is not None
    directory.clear(3)
    assert chosen(directory).slot == 3


def test_the_victim_has_the_greatest_age_over_hits() -> None:
    directory = Directory()
    for slot in range(SLOTS_PER_SET):
        directory.install(slot, entry(slot, age=10.0, hits=1))
    directory.install(30, entry(30, age=100.0, hits=4))
    assert chosen(directory).slot == 30
    assert chosen(directory).cost == pytest.approx(20.0)
    directory.install(31, entry(31, age=50.0, hits=1))
    assert chosen(directory).slot == 31
    directory.install(32, entry(32, age=-500.0))
    assert chosen(directory, taken=set(range(64)) - {32}).cost == 0.0, "a clock that ran ahead"


def _by_the_rule(directory: Directory, taken: set[int], held: set[bytes], own: bytes) -> int | None:
    """The slot of a full set that has to go, entry by entry."""
    costs = {}
    for slot, each in directory:
        if slot in taken or each.pseudonym == own:
            continue
        if each.expiry and each.expiry <= NOW:
            costs[slot] = float("inf")
        elif each.pinned_until <= NOW and each.pseudonym not in held:
            costs[slot] = max(0, int(NOW * 1e6) - each.last_use_us) / (1 + each.hits)
    return max(costs, key=lambda slot: (costs[slot], -slot)) if costs else None


@pytest.mark.parametrize("seed", range(60))
def test_the_victim_of_a_full_set_is_that_of_the_rule(seed: int) -> None:
    """In sets without pins and ends, where two columns are enough, and in others."""
    dice = random.Random(f"victims {seed}")
    directory = Directory()
    for slot in range(SLOTS_PER_SET):
        more = {"age": float(dice.randrange(-2, 9)), "hits": dice.randrange(3)}
        if seed % 2:
            ends = [0, 0, 0, int(NOW) - 5, int(NOW) + 5]
            more |= {"expiry": dice.choice(ends), "pinned_until": dice.choice(ends)}
        directory.install(slot, entry(slot, **more))  # type: ignore[arg-type]
    taken = set(dice.sample(range(SLOTS_PER_SET), dice.choice([0, 1, 9, SLOTS_PER_SET])))
    held = {pseudonym(slot) for slot in range(dice.choice([0, 0, 20]))}
    own = dice.choice([bytes(16), bytes(16), pseudonym(7)])
    choice = choose_slot(directory, taken, NOW, held=held, own=own)
    assert (choice.slot if choice is not None else None) == _by_the_rule(directory, taken, held, own)


@pytest.mark.parametrize("seed", range(60))
def test_a_directory_that_was_changed_chooses_as_one_that_is_read(seed: int) -> None:
    """It counts ends and free slots as it changes; a copy, and one with the same bytes, count anew."""
    dice = random.Random(f"changes {seed}")
    directory = Directory(full_directory().image()) if seed % 2 else Directory()
    for number in range(120):
        slot = dice.randrange(SLOTS_PER_SET)
        if dice.random() < 0.6:
            expiry = dice.choice([0, 0, int(NOW) - 5, int(NOW) + 5])
            directory.install(slot, entry(number, age=float(dice.randrange(9)), expiry=expiry))
        else:
            directory.clear(slot, ghost=dice.choice([None, pseudonym(number)]))
        if number % 10:
            continue
        taken = set(dice.sample(range(SLOTS_PER_SET), dice.choice([0, 1, 9])))
        start = dice.randrange(SLOTS_PER_SET)
        of_each = [
            choose_slot(each, taken, NOW, start)
            for each in (directory, directory.copy(), Directory(directory.image()))
        ]
        assert of_each[0] == of_each[1] == of_each[2]
        empty = [at % SLOTS_PER_SET for at in range(start, start + SLOTS_PER_SET)]
        empty = [at for at in empty if directory.entry(at) is None and at not in taken]
        assert of_each[0] is not None
        assert directory.free_from(start, taken) == (empty[0] if empty else None)
        if empty:
            over = sum(at not in taken and 0 < each.expiry <= NOW for at, each in directory)
            assert (of_each[0].slot, of_each[0].free_slots) == (empty[0], len(empty) + over)


def test_pinned_and_reserved_slots_are_never_victims() -> None:
    directory = Directory()
    for slot in range(SLOTS_PER_SET):
        directory.install(slot, entry(slot, age=10.0, pinned_until=int(NOW) + 60 if slot != 5 else 0))
    assert chosen(directory).slot == 5
    assert choose_slot(directory, {5}, NOW) is None
    assert choose_slot(directory, {5}, NOW + 61) is not None, "pins end"
