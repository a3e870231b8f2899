"""Headers that have proven themselves are not opened again; nothing else is believed for that."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.inline.cipher_suites import Place
from agent.inline.secrets import SecretKey
from agent.pool.counters import MissCause
from agent.pool.format.header_cache import TAKES_ONE_OF, HeaderCache
from agent.pool.format.sealed_slot import HEADER_BYTES, OpenSlot, SlotCodec
from tests.support.pool.memory_pool import SUITES, TENANT, VOLUME_ID, fixed_secret, nguid_of

KEY, OTHER_KEY = bytes(range(16)), bytes(range(1, 17))
GENERATION = 77
PLACE = Place(nguid_of(0), 5)
every_suite = pytest.mark.parametrize("suite", SUITES)


def codec_of(suite: str = "aes-256-gcm", number: int = 0, others: tuple[SlotCodec, ...] = ()) -> SlotCodec:
    data_key = SecretKey(bytes([number]) * 32 + fixed_secret().reveal()[:32])
    return SlotCodec(TENANT, VOLUME_ID, data_key, suite, 1 << 16, others=others)


def header_of(codec: SlotCodec, key: bytes = KEY, generation: int = GENERATION) -> memoryview:
    sealer = codec.seal(key, generation, PLACE)
    sealer.seal(0, memoryview(bytes(100)), memoryview(bytearray(4096)))
    return memoryview(bytearray(sealer.header(100, expiry=0, stored_us=1)))


def known(codec: SlotCodec, header: memoryview) -> OpenSlot:
    """What it has proven, so often that it is remembered."""
    for _ in range(3):
        opened = codec.open(header, KEY, PLACE, GENERATION)
    assert isinstance(opened, OpenSlot)
    return opened


@every_suite
def test_the_third_look_is_what_the_second_has_proven(suite: str) -> None:
    codec = codec_of(suite)
    header = header_of(codec)
    first, second, third, fourth = (codec.open(header, KEY, PLACE, GENERATION) for _ in range(4))
    assert isinstance(first, OpenSlot)
    assert first is not second
    assert second is third is fourth


@every_suite
@given(at=st.integers(0, HEADER_BYTES - 1), flip=st.integers(1, 255))
def test_a_byte_that_differs_is_not_believed(suite: str, at: int, flip: int) -> None:
    codec = codec_of(suite)
    header = header_of(codec)
    known(codec, header)
    header[at] ^= flip
    assert isinstance(codec.open(header, KEY, PLACE, GENERATION), MissCause)
    header[at] ^= flip
    assert isinstance(codec.open(header, KEY, PLACE, GENERATION), OpenSlot)


@every_suite
def test_who_asks_for_another_value_gets_a_miss(suite: str) -> None:
    codec = codec_of(suite)
    header = header_of(codec)
    opened = known(codec, header)
    assert codec.open(header, OTHER_KEY, PLACE, GENERATION) is MissCause.EVICTED
    assert codec.open(header, KEY, PLACE, GENERATION + 1) is MissCause.EVICTED
    assert codec.open(header, None, PLACE) is opened


@pytest.mark.parametrize("place", [Place(nguid_of(0), 6), Place(nguid_of(1), 5)])
def test_at_another_place_it_proves_itself_anew(place: Place) -> None:
    """The tweak of XTS is the place, so there the same bytes are another text."""
    codec = codec_of("aes-256-xts+crc64")
    header = header_of(codec)
    known(codec, header)
    assert codec.open(header, KEY, place, GENERATION) is MissCause.CORRUPT


def test_what_one_key_has_proven_another_has_not() -> None:
    old = codec_of()
    header = header_of(old)
    both = codec_of(number=1, others=(old,))
    known(both, header)
    assert codec_of(number=1).open(header, KEY, PLACE, GENERATION) is MissCause.WRONG_KEY


def test_a_header_of_zeroes_is_a_deleted_one() -> None:
    codec = codec_of()
    header = header_of(codec)
    known(codec, header)
    header[:] = bytes(HEADER_BYTES)
    assert codec.open(header, KEY, PLACE, GENERATION) is MissCause.EVICTED


def test_both_tables_are_bounded_and_the_oldest_go() -> None:
    table: HeaderCache[int] = HeaderCache(kept_max=3, seen_max=5)
    header = bytes(HEADER_BYTES)
    for number in range(4):
        table.keep(bytes([number]), header, PLACE, number)
    assert [table.find(bytes([number]), header, PLACE) for number in range(4)] == [None] * 4
    for number in range(4):
        table.keep(bytes([number]), header, PLACE, number)
    assert [table.find(bytes([number]), header, PLACE) for number in range(4)] == [None, 1, 2, 3]
    for number in range(100, 200):  # a scan: each once
        table.keep(bytes([number]), header, PLACE, number)
    assert [table.find(bytes([number]), header, PLACE) for number in range(4)] == [None, 1, 2, 3]
    table.keep(bytes([0]), header, PLACE, 0)
    assert table.find(bytes([0]), header, PLACE) is None, "it was seen too long ago"
    assert len(table._kept) == 3
    assert len(table._seen) == 5


def test_more_values_than_the_table_holds_find_some_of_their_headers() -> None:
    """First in, first out would find none of them, and push out one with each."""
    table: HeaderCache[int] = HeaderCache(kept_max=16, seen_max=256)
    header = bytes(HEADER_BYTES)
    hits = 0
    for turn in range(40):
        for number in range(64):
            found = table.find(bytes([number]), header, PLACE)
            if found is None:
                table.keep(bytes([number]), header, PLACE, number)
            else:
                assert found == number
                hits += turn >= 10
    assert hits > 30 * 64 // 10
    assert len(table._kept) == 16


def test_a_full_table_lets_in_what_is_read_often() -> None:
    table: HeaderCache[int] = HeaderCache(kept_max=4, seen_max=256)
    header = bytes(HEADER_BYTES)
    for number in [0, 1, 2, 3] * 2:
        table.keep(bytes([number]), header, PLACE, number)
    for _ in range(2 * TAKES_ONE_OF):
        table.keep(b"often", header, PLACE, 35)
    assert table.find(b"often", header, PLACE) == 35


@pytest.mark.parametrize("others", [1, 3, 7])
def test_a_full_table_lets_in_what_comes_at_the_same_turn_always(others: int, seed: int) -> None:
    """Between two looks at a value lie as many looks at others, out of more than the table holds."""
    dice = random.Random(seed)
    table: HeaderCache[int] = HeaderCache(kept_max=16, seen_max=512)
    header = bytes(HEADER_BYTES)
    salts = [dice.randbytes(24) for _ in range(256)]

    def is_found(salt: bytes) -> bool:
        if table.find(salt, header, PLACE) is not None:
            return True
        table.keep(salt, header, PLACE, 35)
        return False

    for salt in salts * 2:
        is_found(salt)
    often, rest, looks = dice.randbytes(24), itertools.cycle(salts), 4096
    hits = 0
    for _ in range(looks):
        hits += is_found(often)
        for _ in range(others):
            is_found(next(rest))
    assert hits > looks // 3


def test_many_threads_at_once() -> None:
    table: HeaderCache[int] = HeaderCache(kept_max=8, seen_max=16)
    header = bytes(HEADER_BYTES)
    wrong: list[object] = []

    def work(step: int) -> None:
        for turn in range(3000):
            number = turn * step % 32
            found = table.find(bytes([number]), header, PLACE)
            if found not in (None, number):
                wrong.append(found)
            table.keep(bytes([number]), header, PLACE, number)

    threads = [threading.Thread(target=work, args=(step,)) for step in (1, 3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert len(table._kept) <= 8 + len(threads)
    assert len(table._seen) <= 16 + len(threads)
