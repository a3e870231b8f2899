"""Contents of blocks: any byte that is not the right one, at the right place, is noticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from agent.replay.content import PAGE_BYTES, BlockContent

SIZES = [512, 4096, 4608, 65536, 1 << 20]
CONTENT = BlockContent(65536)


def _value(content: BlockContent, hash_id: int) -> NDArray[np.uint64]:
    words = np.zeros(content.value_bytes // 8, np.uint64)
    content.fill(hash_id, words)
    return words


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("hash_id", [0, 1, 182_789, (1 << 128) - 1])
def test_what_was_filled_is_right(size: int, hash_id: int) -> None:
    content = BlockContent(size)
    assert content.wrong_bytes(hash_id, _value(content, hash_id)) == 0


def test_contents_and_keys_are_frozen() -> None:
    # A pool outlives a release: what an old replay stored, a new one must be able to judge.
    value = _value(CONTENT, 17).tobytes()
    assert CONTENT.key(17).hex() == "a0e1085bc479a279b30c64abd95e46cc"
    assert (
        value[:40].hex() == "e9d18d9a969ef882e267510ec32474af056d9a2b15dba30c0000000000000000a99a2d4d73766e3e"
    )
    assert value[-8:].hex() == "3cb4c4c0f922bc7f"


@given(hash_id=st.integers(0, 1 << 64), at=st.integers(0, 65535), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_one_wrong_byte(hash_id: int, at: int, bit: int) -> None:
    words = _value(CONTENT, hash_id)
    words.view(np.uint8)[at] ^= 1 << bit
    assert CONTENT.wrong_bytes(hash_id, words) == 1


@given(
    hash_id=st.integers(0, 1 << 64),
    size=st.sampled_from([8, 64, 512, 4096, 16384]),
    places=st.tuples(st.integers(0, 8191), st.integers(0, 8191)).filter(lambda pair: pair[0] != pair[1]),
)
def test_bytes_at_another_place_of_the_block_are_noticed(
    hash_id: int, size: int, places: tuple[int, int]
) -> None:
    words = _value(CONTENT, hash_id)
    count = size // 8
    source, target = (place % (8192 // count) * count for place in places)
    if source == target:
        return
    words[target : target + count] = words[source : source + count].copy()
    assert CONTENT.wrong_bytes(hash_id, words) >= size // 2


@given(
    ids=st.tuples(st.integers(0, 1 << 64), st.integers(0, 1 << 64)).filter(lambda pair: pair[0] != pair[1]),
    page=st.integers(0, 15),
)
def test_a_page_of_another_block_is_noticed(ids: tuple[int, int], page: int) -> None:
    words, other = (_value(CONTENT, hash_id) for hash_id in ids)
    part = slice(page * PAGE_BYTES // 8, (page + 1) * PAGE_BYTES // 8)
    words[part] = other[part]
    assert CONTENT.wrong_bytes(ids[0], words) >= 16


def test_seed_and_length_make_other_keys_and_contents() -> None:
    keys = {
        BlockContent(size, seed).key(hash_id) for size in (512, 1024) for seed in (0, 1) for hash_id in (0, 1)
    }
    assert len(keys) == 8
    assert BlockContent(65536, seed=1).wrong_bytes(5, _value(CONTENT, 5)) > 60_000


def test_zeros_are_wrong() -> None:
    assert CONTENT.wrong_bytes(3, np.zeros(8192, np.uint64)) > 60_000


def test_a_length_that_is_none() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        BlockContent(1001)
