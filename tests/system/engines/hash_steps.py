"""Run by an engine's interpreter: its own block hashes beside those of host_shim.block_hashes.

Argument: the engine. Tokens, sizes and salts are random, seeded.
"""

from __future__ import annotations

import os
import random
import sys

from host_shim.block_hashes import lmcache_chunk_hashes, sglang_page_hashes, vllm_block_hashes

ROUNDS = 20


def vllm(dice: random.Random, tokens: list[int], size: int) -> None:
    from vllm.utils.hashing import sha256, sha256_cbor
    from vllm.v1.core import kv_cache_utils

    salt = dice.choice([None, "tenant one", "ä"])
    for function, name in ((sha256, "sha256"), (sha256_cbor, "sha256_cbor")):
        kv_cache_utils.init_none_hash(function)
        theirs: list[bytes] = []
        for start in range(0, len(tokens) - size + 1, size):
            extra = (("cache_salt", salt),) if salt and not start else None
            parent = theirs[-1] if theirs else None
            block = tokens[start : start + size]
            theirs.append(kv_cache_utils.hash_block_tokens(function, parent, block, extra))
        assert theirs == vllm_block_hashes(tokens, size, algorithm=name, cache_salt=salt)  # type: ignore[arg-type]


def lmcache(dice: random.Random, tokens: list[int], size: int) -> None:
    from lmcache.v1.multiprocess.token_hasher import TokenHasher

    assert TokenHasher(size).compute_chunk_hashes(tokens) == lmcache_chunk_hashes(tokens, size)


def sglang(dice: random.Random, tokens: list[int], size: int) -> None:
    from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

    extra_key, salt = dice.choice([(None, None), ("lora", None), (None, "salt"), ("", "ä")])
    theirs = get_hash_str(tokens, storage_namespace_seed(extra_key, salt), page_size=size)
    ours = sglang_page_hashes(tokens, size, extra_key=extra_key, cache_salt=salt)
    assert list(theirs)[: len(tokens) // size] == ours


def main() -> None:
    os.environ.pop("PYTHONHASHSEED", None)
    dice = random.Random(35)
    check = {"vllm": vllm, "lmcache": lmcache, "sglang": sglang}[sys.argv[1]]
    for _ in range(ROUNDS):
        tokens = [
            dice.choice([dice.randrange(30), dice.randrange(1 << 32)]) for _ in range(dice.randrange(1, 300))
        ]
        check(dice, tokens, dice.choice([1, 16, 64, 256]))
    print("all steps done")


if __name__ == "__main__":
    main()
