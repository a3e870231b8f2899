"""The ciphers and CRCs against published values: what stands under the suites is what it says it is.

The AES-XTS and AES-GCM vectors are NIST's (CAVP), all that have the sizes of the suites (tests/vectors).
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers import algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from agent.inline import crc64 as crc64_module
from agent.inline.cipher_suites import AesGcm, _GcmSlot, _XtsSlot
from agent.inline.crc64 import crc64, crc64_reference
from agent.inline.secrets import SecretKey

VECTORS = Path(__file__).parents[2] / "vectors"

# C2SP XAES-256-GCM, "Test vectors": key, nonce, derived key, associated data, ciphertext and tag.
XAES = [
    (
        b"\x01" * 32,
        "c8612c9ed53fe43e8e005b828a1631a0bbcb6ab2f46514ec4f439fcfd0fa969b",
        b"",
        "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271",
    ),
    (
        b"\x03" * 32,
        "e9c621d4cdd9b11b00a6427ad7e559aeedd66b3857646677748f8ca796cb3fd8",
        b"c2sp.org/XAES-256-GCM",
        "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d",
    ),
]
XAES_NONCE = b"ABCDEFGHIJKLMNOPQRSTUVWX"

# NVM Command Set Specification 1.0c, 5.2.1.3.4 (the four 4 KiB blocks), and the check value of the
# Rocksoft catalogue.
CRC64 = [
    (b"123456789", 0xAE8B14860A799888),
    (bytes(4096), 0x6482D367EB22B64E),
    (b"\xff" * 4096, 0xC0DDBA7302ECA3AC),
    (bytes(range(256)) * 16, 0x3E729F5F6750449C),
    (bytes(range(255, -1, -1)) * 16, 0x9A2DF64B8E9E517E),
]


def _of_nist(name: str) -> list[dict[str, str]]:
    cases: dict[str, list[dict[str, str]]]
    cases = json.loads(lzma.decompress((VECTORS / "nist_aes.json.xz").read_bytes()))
    return cases[name]


def test_xts_agrees_with_nist() -> None:
    cases = _of_nist("xts")
    assert len(cases) == 600
    for case in cases:
        plain, sealed = bytes.fromhex(case["pt"]), bytes.fromhex(case["ct"])
        slot = _XtsAt(bytes.fromhex(case["key"]), bytes.fromhex(case["i"]))
        out = bytearray(len(plain))
        slot._encrypt(0, plain, memoryview(out))
        assert bytes(out) == sealed
        slot._decrypt(0, sealed, memoryview(out))
        assert bytes(out) == plain


class _XtsAt(_XtsSlot):
    """The suite's own code at a tweak that a vector names."""

    def __init__(self, key: bytes, tweak: bytes) -> None:
        super().__init__(algorithms.AES(key), 0)
        self._tweak = tweak

    def _mode(self, number: int) -> modes.XTS:
        return modes.XTS(self._tweak)


def test_gcm_agrees_with_nist() -> None:
    cases = _of_nist("gcm")
    assert (len(cases), sum("FAIL" in case for case in cases)) == (300, 153)
    for case in cases:
        iv = bytes.fromhex(case["iv"])
        slot = _GcmSlot(bytes.fromhex(case["key"]), iv[:8])
        number = int.from_bytes(iv[8:], "little")
        sealed = bytes.fromhex(case["ct"])
        out = bytearray(len(sealed))
        aad, tag = bytes.fromhex(case["aad"]), bytes.fromhex(case["tag"])
        opened = slot.open_unit(number, sealed, memoryview(out), aad, tag)
        assert opened == ("FAIL" not in case)
        if opened:
            assert bytes(out) == bytes.fromhex(case["pt"])
            again = bytearray(len(out))
            assert slot.seal_unit(number, bytes(out), memoryview(again), aad) == tag
            assert bytes(again) == sealed


@pytest.mark.parametrize(("key", "derived", "aad", "sealed"), XAES)
def test_xaes_vectors_of_c2sp(key: bytes, derived: str, aad: bytes, sealed: str) -> None:
    suite = AesGcm(SecretKey(key + bytes(32)))
    assert suite.derived_key(XAES_NONCE[:12]).hex() == derived
    found = AESGCM(suite.derived_key(XAES_NONCE[:12])).encrypt(XAES_NONCE[12:], b"XAES-256-GCM", aad)
    assert found.hex() == sealed


def test_xaes_accumulated_vectors_of_c2sp() -> None:
    """10,000 random cases from SHAKE-128, hashed (C2SP XAES-256-GCM, "Accumulated randomized tests")."""
    stream = memoryview(hashlib.shake_128(b"").digest(6 << 20))
    at = 0
    result = hashlib.shake_128()

    def take(count: int) -> bytes:
        nonlocal at
        at += count
        return bytes(stream[at - count : at])

    for _ in range(10_000):
        key, nonce = take(32), take(24)
        plain = take(take(1)[0])
        aad = take(take(1)[0])
        derived = AesGcm(SecretKey(key)).derived_key(nonce[:12])
        result.update(AESGCM(derived).encrypt(nonce[12:], plain, aad))
    assert result.hexdigest(32) == "e6b9edf2df6cec60c8cbd864e2211b597fb69a529160cd040d56c0c210081939"


@pytest.mark.parametrize(("data", "value"), CRC64)
def test_crc64_nvme_by_both_engines(data: bytes, value: int) -> None:
    assert crc64_module.engine() == "awscrt", "the fast engine is missing; the judge would judge itself"
    assert crc64(data) == value
    assert crc64_reference(data) == value


def test_crc64_engines_agree_and_continue(seed: int) -> None:
    rng = random.Random(seed)
    for size in (0, 1, 7, 64, 4095, 70_001):
        data = rng.randbytes(size)
        cut = rng.randrange(size + 1)
        assert crc64(data) == crc64_reference(data) == crc64(data[cut:], crc64(data[:cut]))
        assert crc64(memoryview(data)) == crc64(bytearray(data)) == crc64(data)
