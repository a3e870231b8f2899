"""Memory that no thread zeroes or copies with the interpreter's lock."""

from __future__ import annotations

import ctypes
import mmap
import random

import pytest

from host_shim.unlocked_memory import MAPPED_BYTES, copy_bytes, joined, new_memory


@pytest.mark.parametrize("size", [1, 4096, MAPPED_BYTES - 1, MAPPED_BYTES, MAPPED_BYTES + 1, 1 << 20])
def test_it_is_writable_and_zero(size: int) -> None:
    memory = new_memory(size)
    assert (memory.nbytes, memory.format, memory.readonly, memory.contiguous) == (size, "B", False, True)
    assert not any(memory)
    memory[-1] = 35
    assert memory[-1] == 35


def test_what_is_long_comes_from_the_kernel() -> None:
    assert isinstance(new_memory(MAPPED_BYTES).obj, mmap.mmap)
    assert isinstance(new_memory(MAPPED_BYTES - 1).obj, bytearray)


def test_each_has_its_own() -> None:
    one, other = new_memory(MAPPED_BYTES), new_memory(MAPPED_BYTES)
    one[:4] = b"mine"
    assert bytes(other[:4]) == bytes(4)


def test_a_copy_goes_to_the_beginning() -> None:
    target, source = new_memory(8), memoryview(bytearray(b"12345"))
    copy_bytes(target, source)
    assert bytes(target) == b"12345\0\0\0"
    copy_bytes(target, source[:0])
    assert bytes(target) == b"12345\0\0\0"


def test_a_copy_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="9 bytes do not fit into 8"):
        copy_bytes(new_memory(8), new_memory(9))


@pytest.mark.parametrize(
    "sizes", [(), (0,), (5, 7), (MAPPED_BYTES,), (MAPPED_BYTES, 0, 3), (9, MAPPED_BYTES)]
)
def test_parts_are_joined_as_bytes_join_them(sizes: tuple[int, ...]) -> None:
    dice = random.Random(35)
    parts = [memoryview(bytearray(dice.randbytes(size))) for size in sizes]
    made = joined(parts)
    assert made == b"".join(parts)
    assert isinstance(made, bytes)
    assert hash(made) == hash(b"".join(parts))


def test_a_large_value_is_joined_without_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ctypes.memmove` lets go of it."""
    moved: list[int] = []
    move = ctypes.memmove
    monkeypatch.setattr(ctypes, "memmove", lambda *words: (moved.append(words[2]), move(*words)))
    joined([new_memory(MAPPED_BYTES), new_memory(1 << 20)])
    assert moved == [MAPPED_BYTES, 1 << 20]
