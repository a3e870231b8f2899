"""A buffer in several places behaves as one, and a value opens into it as into one."""

from __future__ import annotations

import os
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.inline.cipher_suites import AesGcm, AesXts, Place
from agent.inline.scatter import Scatter
from agent.inline.secrets import SecretKey

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(SIZES, st.data())
def test_slices_are_those_of_the_bytes(sizes: list[int], data: st.DataObject) -> None:
    runs = [
        memoryview(bytearray(range(end - size, end)))
        for size, end in zip(sizes, accumulate(sizes), strict=True)
    ]
    whole = bytes(range(sum(sizes)))
    scatter = Scatter(runs)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    part = scatter[start:stop]
    pieces = [part] if isinstance(part, memoryview) else part.runs
    assert b"".join(pieces) == whole[start:stop]
    assert len(part) == stop - start
    scatter[start:stop] = bytes(stop - start)
    assert b"".join(runs) == whole[:start] + bytes(stop - start) + whole[stop:]


def test_a_slice_in_one_place_is_that_place() -> None:
    first, second = memoryview(bytearray(10)), memoryview(bytearray(10))
    part = Scatter([first, second])[12:15]
    assert isinstance(part, memoryview)
    assert part.obj is second.obj
    with pytest.raises(ValueError, match="differ"):
        Scatter([first, second])[5:15] = b"short"


@given(st.lists(st.integers(1, 3000), min_size=2, max_size=8))
def test_gcm_opens_run_by_run(sizes: list[int]) -> None:
    cipher = AesGcm(SecretKey(bytes(range(64)))).slot(bytes(24), Place(bytes(16), 5))
    plain = os.urandom(sum(sizes))
    sealed = bytearray(len(plain))
    proof = cipher.seal_unit(3, plain, memoryview(sealed), b"bound")
    runs = [memoryview(bytearray(size)) for size in sizes]
    assert cipher.scatters
    assert cipher.open_unit(3, memoryview(sealed), Scatter(runs), b"bound", proof)
    assert b"".join(runs) == plain
    sealed[-1] ^= 1
    assert not cipher.open_unit(3, memoryview(sealed), Scatter(runs), b"bound", proof)


def test_xts_says_that_it_cannot() -> None:
    assert not AesXts(SecretKey(bytes(range(64)))).slot(bytes(24), Place(bytes(16), 5)).scatters
