"""The three suites: what goes in comes out, what was changed does not, and no tweak or nonce repeats."""

from __future__ import annotations

import random

import pytest

from agent.inline.cipher_suites import HEADER_UNIT, SALT_BYTES, SUITES, AesGcm, AesXts, Place, Plain
from agent.inline.secrets import SecretKey
from tests.support.pool.memory_pool import fixed_secret, nguid_of

DATA_KEY = SecretKey(fixed_secret().reveal()[32:])
SIZES = (16, 4016, 4096, 1 << 16, 1 << 20)
sealing = pytest.mark.parametrize("suite", [AesGcm, AesXts, Plain], ids=lambda suite: suite.name)


@sealing
@pytest.mark.parametrize("size", SIZES)
def test_round_trip_and_every_kind_of_change(suite, size: int, seed: int) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(seed + size)
    engine = suite(DATA_KEY)
    plain = rng.randbytes(size)
    salt = rng.randbytes(SALT_BYTES)
    place = Place(nguid_of(0), 5)
    sealed = bytearray(size)
    proof = engine.slot(salt, place).seal_unit(3, plain, memoryview(sealed), b"bound")
    assert len(proof) == 16
    if suite is not Plain:
        assert bytes(sealed) != plain
    out = bytearray(size)

    def opens(data=sealed, number=3, bound=b"bound", proof=proof, key=DATA_KEY, where=place) -> bool:  # type: ignore[no-untyped-def]
        return suite(key).slot(salt, where).open_unit(number, data, memoryview(out), bound, proof)

    assert opens()
    assert bytes(out) == plain
    for _ in range(8):
        damaged = bytearray(sealed)
        damaged[rng.randrange(size)] ^= 1 << rng.randrange(8)
        assert not opens(data=damaged)
    for bit in range(128):
        wrong = bytearray(proof)
        wrong[bit // 8] ^= 1 << bit % 8
        assert not opens(proof=bytes(wrong))
    assert not opens(number=4)
    assert not opens(bound=b"other")
    if suite is not Plain:
        assert not opens(key=SecretKey(fixed_secret(36).reveal()[32:]))
    if suite is AesXts:
        assert not opens(where=Place(nguid_of(0), 6))
        assert not opens(where=Place(nguid_of(1), 5))


def test_gcm_never_uses_a_key_and_nonce_twice(seed: int) -> None:
    rng = random.Random(seed)
    engine = AesGcm(DATA_KEY)
    plain = bytes(64)
    seen = set()
    for _ in range(200):
        salt = rng.randbytes(SALT_BYTES)
        cipher = engine.slot(salt, Place(nguid_of(0), 0))
        for number in (*range(4), HEADER_UNIT):
            sealed = bytearray(64)
            cipher.seal_unit(number, plain, memoryview(sealed), b"")
            seen.add(bytes(sealed))
    assert len(seen) == 200 * 5, "two equal keystreams"


def test_xts_has_one_tweak_for_each_place() -> None:
    """Equal plain text at any two places (namespace, slot, unit) seals to different bytes throughout."""
    engine = AesXts(DATA_KEY)
    plain = bytes(8192)
    seen: dict[bytes, tuple[int, int, int]] = {}
    blocks = 0
    for member in range(3):
        for slot in (0, 1, 2, 63, 64, 1 << 20, 1 << 32, 1 << 40):
            cipher = engine.slot(bytes(SALT_BYTES), Place(nguid_of(member), slot))
            for number in (0, 1, 63, HEADER_UNIT):
                sealed = bytearray(8192)
                cipher.seal_unit(number, plain, memoryview(sealed), b"")
                for at in range(0, 8192, 16):
                    seen[bytes(sealed[at : at + 16])] = (member, slot, number)
                    blocks += 1
    assert len(seen) == blocks, "a tweak came twice"


def test_xts_seals_a_unit_as_one_data_unit() -> None:
    """OpenSSL restarts the tweak at every update: two equal halves would seal to two equal halves."""
    engine = AesXts(DATA_KEY)
    sealed = bytearray(8192)
    engine.slot(bytes(SALT_BYTES), Place(nguid_of(0), 1)).seal_unit(0, bytes(8192), memoryview(sealed), b"")
    assert sealed[:4096] != sealed[4096:]


def test_suite_names_and_numbers_stay() -> None:
    """Numbers stand in every slot on flash and names in every pool map."""
    assert {name: suite.number for name, suite in SUITES.items()} == {
        "aes-256-gcm": 1,
        "aes-256-xts+crc64": 2,
        "plain+crc64": 3,
    }


def test_engines_show_no_key() -> None:
    for suite in SUITES.values():
        engine = suite(DATA_KEY)
        cipher = engine.slot(bytes(SALT_BYTES), Place(nguid_of(0), 1))
        for text in (repr(engine), str(engine), repr(cipher)):
            assert DATA_KEY.reveal().hex() not in text
            assert repr(DATA_KEY.reveal())[2:20] not in text
