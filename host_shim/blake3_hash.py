"""BLAKE3 (the hash alone, 32 bytes), for block hashes of LMCache: by the package blake3, or in pure Python.

After the BLAKE3 paper (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020/2021): section 2.2 the compression
function, 2.4 chunks of 1,024 bytes, 2.5 the binary tree over them. Pure Python does about 0.4 MB/s.
"""

from __future__ import annotations

import functools
import importlib
import struct
from collections.abc import Callable

_IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
_PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_ROUNDS = 7
_CHUNK_START, _CHUNK_END, _PARENT, _ROOT = 1, 2, 4, 8
_BLOCK_BYTES, _CHUNK_BYTES = 64, 1024
_MASK = 0xFFFF_FFFF
_MIXED = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip
"""Columns, then diagonals, of the state of 4 x 4 words."""


def blake3(data: bytes) -> bytes:
    """The 32-byte BLAKE3 of `data`."""
    return _hash_function()(data)


@functools.cache
def _hash_function() -> Callable[[bytes], bytes]:
    try:
        package = importlib.import_module("blake3")
    except ImportError:
        return blake3_in_python

    def by_package(data: bytes) -> bytes:
        return bytes(package.blake3(data).digest())

    return by_package


def blake3_in_python(data: bytes) -> bytes:
    """`blake3` with nothing but this file."""
    words = _subtree(data, 0, _ROOT)
    return struct.pack("<8I", *words)


def _subtree(data: bytes, counter: int, root: int) -> tuple[int, ...]:
    """The chaining value of some chunks; the left side of a parent has the greatest power of two of them."""
    if len(data) <= _CHUNK_BYTES:
        return _chunk(data, counter, root)
    chunks = (len(data) + _CHUNK_BYTES - 1) // _CHUNK_BYTES
    left_chunks = 1 << (chunks - 1).bit_length() - 1
    cut = left_chunks * _CHUNK_BYTES
    left = _subtree(data[:cut], counter, 0)
    right = _subtree(data[cut:], counter + left_chunks, 0)
    return _compress(_IV, (*left, *right), 0, _BLOCK_BYTES, _PARENT | root)


def _chunk(data: bytes, counter: int, root: int) -> tuple[int, ...]:
    value: tuple[int, ...] = _IV
    last = max(0, (len(data) - 1) // _BLOCK_BYTES)
    for number in range(last + 1):
        block = data[number * _BLOCK_BYTES : (number + 1) * _BLOCK_BYTES]
        flags = (_CHUNK_START if number == 0 else 0) | (_CHUNK_END | root if number == last else 0)
        words = struct.unpack("<16I", block.ljust(_BLOCK_BYTES, b"\x00"))
        value = _compress(value, words, counter, len(block), flags)
    return value


def _compress(
    value: tuple[int, ...], words: tuple[int, ...], counter: int, length: int, flags: int
) -> tuple[int, ...]:
    state = [*value, *_IV[:4], counter & _MASK, counter >> 32, length, flags]
    for turn in range(_ROUNDS):
        for index, (a, b, c, d) in enumerate(_MIXED):
            state[a] = (state[a] + state[b] + words[2 * index]) & _MASK
            mixed = state[d] ^ state[a]
            state[d] = (mixed >> 16 | mixed << 16) & _MASK
            state[c] = (state[c] + state[d]) & _MASK
            mixed = state[b] ^ state[c]
            state[b] = (mixed >> 12 | mixed << 20) & _MASK
            state[a] = (state[a] + state[b] + words[2 * index + 1]) & _MASK
            mixed = state[d] ^ state[a]
            state[d] = (mixed >> 8 | mixed << 24) & _MASK
            state[c] = (state[c] + state[d]) & _MASK
            mixed = state[b] ^ state[c]
            state[b] = (mixed >> 7 | mixed << 25) & _MASK
        if turn < _ROUNDS - 1:
            words = tuple(words[place] for place in _PERMUTATION)
    return tuple(state[index] ^ state[index + 8] for index in range(8))
