"""The hashes by which vLLM, SGLang and LMCache name blocks of tokens, by the standard library alone.

    vllm_block_hashes(tokens, 16)          32 bytes each: the offloading tier's keys less the group
    sglang_page_hashes(tokens, 64)         hexadecimal, as HiCache hands them to its storage
    lmcache_chunk_hashes(tokens, 256)      32 bytes each: ObjectKey.chunk_hash of LMCache's server

A router or a prestaging program that has the tokens can ask for a prefix with these, without the engine. All
are chained: a block's hash covers everything before it, so the first missing one ends the prefix. Only whole
blocks have a hash. Checked against vLLM 0.33.0, SGLang 0.5.23 and LMCache 0.5.6 (tests/unit/host_shim has
values taken from them). They are for text alone: images, adapters and prompt embeddings go into the engines'
hashes, too, and not into these.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

from host_shim.blake3_hash import blake3

VllmAlgorithm: TypeAlias = Literal["sha256", "sha256_cbor"]
LmcacheAlgorithm: TypeAlias = Literal["blake3", "sha256_cbor"]

VLLM_SEED = "vllm-none-hash"
"""What a chain of vLLM begins with where PYTHONHASHSEED is not set; else it is that variable's text."""

_SGLANG_NAMESPACE = b"sglang-cache-namespace-v1"
_CBOR_NULL = b"\xf6"


def vllm_block_hashes(
    tokens: Sequence[int],
    block_size: int,
    *,
    algorithm: VllmAlgorithm = "sha256",
    seed: str = VLLM_SEED,
    cache_salt: str | None = None,
) -> list[bytes]:
    """One hash for each whole block of `block_size` tokens (vLLM's --prefix-caching-hash-algo).

    `seed` is PYTHONHASHSEED where it is set for vLLM, `cache_salt` the request's. The xxhash algorithms are
    left out: without PYTHONHASHSEED they differ from process to process, and they have collisions.
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

    `sha256_cbor` is vLLM's and begins with its `seed`, where LMCache runs beside vLLM; `builtin` is left out,
    because it is Python's own hash() and differs between builds. BLAKE3 in pure Python takes some
    milliseconds for a chunk; where the package blake3 is installed, it is used.
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
