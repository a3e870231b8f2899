"""Block hashes against values that the engines' own code gave for the same tokens."""

from __future__ import annotations

import pytest

from host_shim.block_hashes import (
    blake3_in_python,
    lmcache_chunk_hashes,
    sglang_page_hashes,
    vllm_block_hashes,
    vllm_offload_keys,
)

TOKENS = [(index * 7919 + 13) % 151_936 for index in range(100)]


def test_vllm_sha256() -> None:
    """vllm.v1.core.kv_cache_utils.hash_block_tokens with sha256, PYTHONHASHSEED not set."""
    hashes = vllm_block_hashes(TOKENS, 16)
    assert len(hashes) == 6
    assert hashes[0].hex() == "6ab141cf6df1fd210cb0636d12329df6612c127f8b145ff7475b88cb0205fcc0"
    assert hashes[5].hex() == "600d250a6952416cb2ac2b427d401425262422ab840453730ca6ce8157c085f1"
    salted = vllm_block_hashes(TOKENS, 16, cache_salt="s1")
    assert salted[5].hex() == "bdf67ade66038a511774f2d12285d9cce1cd4819c39aecd76b3bf6a308540b56"


def test_vllm_sha256_cbor() -> None:
    hashes = vllm_block_hashes(TOKENS, 16, algorithm="sha256_cbor")
    assert hashes[0].hex() == "11dbff107932c6a93362311bc1e0c5c53f91709d25e9cfcdb7a7689a1fc5ba5f"
    assert hashes[5].hex() == "54719f968a30803cad5e2bcb04ae869f1d13ee4ba2702b36da2919d11fbf8271"
    salted = vllm_block_hashes(TOKENS, 16, algorithm="sha256_cbor", cache_salt="s1")
    assert salted[5].hex() == "0cff3715e811bf3da22807e8bba027b89a3a297b1edf5127a6a390f273184a8b"


def test_sglang_pages() -> None:
    """sglang.srt.mem_cache.utils.get_hash_str; with a namespace also storage_namespace_seed."""
    hashes = sglang_page_hashes(TOKENS, 16)
    assert hashes[0] == "4d0de4f1ef832a7ed88966c6e5ac360e4701a071400746a7ece9a6af9a299ebb"
    assert hashes[5] == "138941d46b213b3c171a0fa2526ccd7e792e71c692c45e20b1e5d3438b4317b8"
    named = sglang_page_hashes(TOKENS, 16, extra_key="lora", cache_salt="salt")
    assert named[5] == "9312c926c4b13a83971cb9df222346669dd0063e2dc44f9c2e97a6429af36ab3"
    assert sglang_page_hashes(TOKENS[16:], 16, prior=hashes[0]) == hashes[1:]


def test_lmcache_chunks() -> None:
    """lmcache.v1.multiprocess.token_hasher.TokenHasher with its default, blake3."""
    hashes = lmcache_chunk_hashes(TOKENS, 32)
    assert len(hashes) == 3
    assert hashes[0].hex() == "71741d608da18882b36088fb309c8e18381675fdd7cdcf861f6d276850bce590"
    assert hashes[2].hex() == "af9bcd6f0dcf94aebf24bc183820c9eb120cec7d7396c4557c8350733535186e"
    as_vllm = lmcache_chunk_hashes(TOKENS, 16, algorithm="sha256_cbor")
    assert as_vllm == vllm_block_hashes(TOKENS, 16, algorithm="sha256_cbor")


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        # test_vectors.json of the BLAKE3 team: input byte i is i mod 251, one block to several chunks
        (0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
        (1, "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"),
        (1024, "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7"),
        (1025, "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444"),
        (3073, "7124b49501012f81cc7f11ca069ec9226cecb8a2c850cfe644e327d22d3e1cd3"),
    ],
)
def test_blake3_in_python(length: int, expected: str) -> None:
    assert blake3_in_python(bytes(index % 251 for index in range(length))).hex() == expected


def test_a_hash_covers_all_that_is_before_it() -> None:
    other = [TOKENS[0] + 1, *TOKENS[1:]]
    for hashes_of in (vllm_block_hashes, sglang_page_hashes, lmcache_chunk_hashes):
        pairs = zip(hashes_of(TOKENS, 16), hashes_of(other, 16), strict=True)
        assert all(one != another for one, another in pairs)
        assert hashes_of(TOKENS[:47], 16) == hashes_of(TOKENS, 16)[:2]
        assert hashes_of(TOKENS[:15], 16) == []


def test_a_chunk_is_named_by_its_last_block() -> None:
    hashes = vllm_block_hashes(TOKENS, 16)
    assert vllm_offload_keys(hashes) == [each + bytes(4) for each in hashes]
    assert vllm_offload_keys(hashes[:5], 2, group=3) == [
        hashes[1] + b"\x00\x00\x00\x03",
        hashes[3] + b"\x00\x00\x00\x03",
    ]


def test_sizes_that_make_no_sense() -> None:
    with pytest.raises(ValueError):
        vllm_block_hashes(TOKENS, 0)
    with pytest.raises(ValueError):
        vllm_offload_keys([], 0)
