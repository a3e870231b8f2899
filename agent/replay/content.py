"""The content of a block: a function of its hash id, so that every byte read can be judged.

A value is a window into a run of random 8-byte words, at an offset by its hash id. The first 32 bytes of each
4 KiB page are a stamp: a digest of the id, and the page's number. No word occurs twice in the run, so a byte
that moved or belongs to another block is noticed. Judging a value is one numpy comparison at memory speed.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096
STAMP_BYTES = 32
_DIGEST_BYTES = 24
_WORD = 8
WINDOWS = 1 << 17
"""Offsets, of 8 bytes each, at which a window may begin: 1 MiB more than the longest value."""


class BlockContent:
    """Keys and contents for values of `value_bytes` bytes (a multiple of 8). Shared between threads.

    A block that no value can hold lies in several; `part` counts them from 0.
    """

    def __init__(self, value_bytes: int, seed: int = 0) -> None:
        if value_bytes < _WORD or value_bytes % _WORD:
            raise ValueError(f"a value of {value_bytes} bytes; it must be a positive multiple of {_WORD}")
        self.value_bytes = value_bytes
        self._salt = seed.to_bytes(8, "little") + value_bytes.to_bytes(8, "little")
        words = value_bytes // _WORD + WINDOWS
        self._run: NDArray[np.uint64] = np.random.Philox(key=seed).random_raw(words)
        self._full_stamps = (value_bytes - STAMP_BYTES) // PAGE_BYTES + 1 if value_bytes >= STAMP_BYTES else 0

    def key(self, hash_id: int, part: int = 0) -> bytes:
        """The 16-byte key of a value; seed and length are part of it, so replays don't meet by accident."""
        return hashlib.blake2b(
            self._name(hash_id, part), digest_size=16, key=self._salt, person=b"g35 replay key"
        ).digest()

    def fill(self, hash_id: int, into: NDArray[np.uint64], part: int = 0) -> None:
        """Write a value's content into `into`, `value_bytes // 8` words long."""
        digest, start = self._digest(hash_id, part)
        np.copyto(into, self._run[start : start + len(into)])
        stamps = self._stamps_of(into)
        stamps[:] = self._expected_stamps(digest)

    def wrong_bytes(self, hash_id: int, found: NDArray[np.uint64], part: int = 0) -> int:
        """How many bytes of `found` differ from the value's content. `found` is used up: stamps go."""
        digest, start = self._digest(hash_id, part)
        stamps = self._stamps_of(found)
        expected_stamps = self._expected_stamps(digest)
        wrong = _differing_bytes(stamps, expected_stamps)
        window = self._run[start : start + len(found)]
        stamps[:] = self._stamps_of(window)
        return wrong + _differing_bytes(found, window)

    def _name(self, hash_id: int, part: int) -> bytes:
        name = hash_id.to_bytes(16, "little")
        return name + part.to_bytes(8, "little") if part else name

    def _digest(self, hash_id: int, part: int) -> tuple[bytes, int]:
        digest = hashlib.blake2b(
            self._name(hash_id, part), digest_size=_DIGEST_BYTES, key=self._salt, person=b"g35 replay value"
        ).digest()
        return digest, int.from_bytes(digest[:8], "little") % WINDOWS

    def _stamps_of(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The places of the stamps in a value, as a view of one row of words a page."""
        stride = PAGE_BYTES // _WORD
        return np.lib.stride_tricks.as_strided(
            words, (self._full_stamps, STAMP_BYTES // _WORD), (stride * _WORD, _WORD)
        )

    def _expected_stamps(self, digest: bytes) -> NDArray[np.uint64]:
        stamps = np.empty((self._full_stamps, STAMP_BYTES // _WORD), np.uint64)
        stamps[:, : _DIGEST_BYTES // _WORD] = np.frombuffer(digest, np.uint64)
        stamps[:, -1] = np.arange(self._full_stamps, dtype=np.uint64)
        return stamps


def _differing_bytes(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> int:
    if np.array_equal(one, other):
        return 0
    left, right = np.ascontiguousarray(one), np.ascontiguousarray(other)
    return int(np.count_nonzero(left.view(np.uint8) != right.view(np.uint8)))
