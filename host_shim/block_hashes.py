"""The hashes by which vLLM, SGLang and LMCache name blocks of tokens, by the standard library alone.

    vllm_block_hashes(tokens, 16)          32 bytes each: the offloading tier's keys less the group
    sglang_page_hashes(tokens, 64)         hexadecimal, as HiCache hands them to its storage
    lmcache_chunk_hashes(tokens, 256)      32 bytes each: ObjectKey.chunk_hash of LMCache's server

A router or a prestaging program that has the tokens can ask for a prefix with these. A block's hash covers
everything before it; only whole blocks have one. Checked against vLLM 0.33.0, SGLang 0.5.23 and LMCache
0.5.6. For text alone: images, adapters and prompt embeddings go into the engines' hashes, and not into these.
"""

import functools
import hashlib
import importlib
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

VllmAlgorithm: TypeAlias = Literal["sha256", "sha256_cbor"]
LmcacheAlgorithm: TypeAlias = Literal["blake3", "sha256_cbor"]

VLLM_SEED = "vllm-none-hash"
"""What a chain of vLLM begins with where PYTHONHASHSEED is not set; else it is that variable's text."""

_SGLANG_NAMESPACE = b"sglang-cache-namespace-v1"
_CBOR_NULL = b"\xf6"

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


def vllm_block_hashes(
    tokens: Sequence[int],
    block_size: int,
    *,
    algorithm: VllmAlgorithm = "sha256",
    seed: str = VLLM_SEED,
    cache_salt: str | None = None,
) -> list[bytes]:
    """One hash for each whole block of `block_size` tokens (vLLM's --prefix-caching-hash-algo).

    `seed` is PYTHONHASHSEED where it is set for vLLM, `cache_salt` the request's. The xxhash algorithms,
    which have collisions, are left out.
    """
    hashed: Callable[[Any], bytes] = _sha256_of_pickle if algorithm == "sha256" else _sha256_of_cbor
    parent, found = hashed(seed), []
    for number, block in enumerate(_blocks(tokens, block_size)):
        extra = (("cache_salt", cache_salt),) if cache_salt and not number else None
        parent = hashed((parent, block, extra))
        found.append(parent)
    return found


def vllm_offload_keys(hashes: Sequence[bytes], blocks_per_chunk: int = 1, group: int = 0) -> list[bytes]:
    """The offloading tier's keys: a chunk is named by the hash of its last block, and by its group."""
    if blocks_per_chunk < 1:
        raise ValueError("a chunk has at least one block")
    return [each + group.to_bytes(4, "big") for each in hashes[blocks_per_chunk - 1 :: blocks_per_chunk]]


def sglang_page_hashes(
    tokens: Sequence[int],
    page_size: int,
    *,
    prior: str | None = None,
    extra_key: str | None = None,
    cache_salt: str | None = None,
) -> list[str]:
    """One SHA-256 in hexadecimal for each whole page. `prior` is the hash of the page before the first."""
    digest = bytes.fromhex(prior) if prior else _sglang_seed(extra_key, cache_salt)
    found = []
    for page in _blocks(tokens, page_size):
        digest = hashlib.sha256(digest + _packed("<", page)).digest()
        found.append(digest.hex())
    return found


def lmcache_chunk_hashes(
    tokens: Sequence[int],
    chunk_size: int = 256,
    *,
    algorithm: LmcacheAlgorithm = "blake3",
    seed: str = VLLM_SEED,
) -> list[bytes]:
    """One hash for each whole chunk, as LMCache's server makes them (its --hash-algorithm).

    `sha256_cbor` is vLLM's and begins with its `seed`. `builtin`, which differs between builds, is left out.
    BLAKE3 in pure Python takes some milliseconds for a chunk; the package blake3 is used where it is
    installed.
    """
    hashed = _lmcache_blake3 if algorithm == "blake3" else _sha256_of_cbor
    parent = _lmcache_blake3((bytes(8), (0,), None)) if algorithm == "blake3" else _sha256_of_cbor(seed)
    found = []
    for chunk in _blocks(tokens, chunk_size):
        parent = hashed((parent, chunk, None))
        found.append(parent)
    return found


def _blocks(tokens: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    if size < 1:
        raise ValueError("a block has at least one token")
    for start in range(0, len(tokens) - size + 1, size):
        yield tuple(map(int, tokens[start : start + size]))


def _packed(order: str, tokens: Sequence[int]) -> bytes:
    return struct.pack(f"{order}{len(tokens)}I", *tokens)


def _sha256_of_pickle(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def _sha256_of_cbor(value: object) -> bytes:
    return hashlib.sha256(b"".join(_cbor(value))).digest()


def _lmcache_blake3(value: tuple[bytes, tuple[int, ...], None]) -> bytes:
    parent, tokens, _ = value
    return blake3(parent + _packed(">", tokens))


def _sglang_seed(extra_key: str | None, cache_salt: str | None) -> bytes:
    if extra_key is None and cache_salt is None:
        return b""
    digest = hashlib.sha256(_SGLANG_NAMESPACE)
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\x00")
        else:
            raw = part.encode()
            digest.update(b"\x01" + len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


def _cbor(value: object) -> Iterator[bytes]:
    """Canonical CBOR (RFC 8949, 4.2.1) of what a block's name is made of; TypeError for anything else."""
    if value is None:
        yield _CBOR_NULL
    elif isinstance(value, int) and not isinstance(value, bool):
        yield _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
    elif isinstance(value, bytes):
        yield _cbor_head(2, len(value)) + value
    elif isinstance(value, str):
        raw = value.encode()
        yield _cbor_head(3, len(raw)) + raw
    elif isinstance(value, tuple):
        yield _cbor_head(4, len(value))
        for each in value:
            yield from _cbor(each)
    else:
        raise TypeError(f"a block's name is not made of {type(value).__name__}")


def _cbor_head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major << 5 | number])
    for code, width in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * width:
            return bytes([major << 5 | code]) + number.to_bytes(width, "big")
    raise ValueError("a number of more than 64 bits")


def blake3(data: bytes) -> bytes:
    """The 32-byte BLAKE3 of `data`, by the package blake3 where it is installed."""
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
    """BLAKE3 after its paper (2021): 2.2 compression, 2.4 chunks of 1,024 bytes, 2.5 the tree. 0.4 MB/s."""
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
