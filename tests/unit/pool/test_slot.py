"""One slot: its bytes, and that nothing but exactly what was asked for ever opens."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.inline.cipher_suites import Place
from agent.inline.secrets import SecretKey
from agent.pool.counters import MissCause
from agent.pool.format.sealed_slot import HEADER_BYTES, SlotCodec
from tests.support.pool.memory_pool import SUITES, TENANT, VOLUME_ID, fixed_secret, nguid_of

VECTORS = Path(__file__).parents[2] / "vectors" / "pool.json"
KEY = bytes(range(0x40, 0x50))
PLACE = Place(nguid_of(0), 77)
DATA_KEY = SecretKey(fixed_secret().reveal()[32:])
every_suite = pytest.mark.parametrize("suite", SUITES)


def codec(suite: str, *, unit_bytes: int = 1 << 16, data_key: SecretKey = DATA_KEY) -> SlotCodec:
    return SlotCodec(TENANT, VOLUME_ID, data_key, suite, unit_bytes)


def sealed_slot(
    suite: str,
    value: bytes,
    *,
    key: bytes = KEY,
    generation: int = 0x0102030405060708,
    place: Place = PLACE,
    expiry: int = 0x71727374,
    using: SlotCodec | None = None,
) -> bytearray:
    used = using or codec(suite)
    sealer = used.seal(key, generation, place)
    body = bytearray(used.padded(len(value)))
    assert sealer.seal(0, memoryview(value), memoryview(body)) == len(body)
    return bytearray(sealer.header(len(value), expiry=expiry, stored_us=0x2122232425262728)) + body


def opened_value(
    suite: str,
    slot: bytes | bytearray,
    *,
    key: bytes = KEY,
    generation: int | None = 0x0102030405060708,
    place: Place = PLACE,
    using: SlotCodec | None = None,
) -> bytes | MissCause:
    used = using or codec(suite)
    view = memoryview(bytearray(slot))
    found = used.open(view[:HEADER_BYTES], key, place, generation)
    if isinstance(found, MissCause):
        return found
    out = bytearray()
    for number in range(-(-found.length // used.unit_bytes)):
        at = number * used.unit_bytes
        sealed = view[HEADER_BYTES + at : HEADER_BYTES + min(at + used.unit_bytes, used.padded(found.length))]
        into = bytearray(len(sealed))
        if not found.open_unit(number, sealed, memoryview(into)):
            return MissCause.CORRUPT
        out += into
    return bytes(out[: found.length])


@every_suite
def test_golden_slots_open(suite: str) -> None:
    """Bytes frozen when the format was: what an older g35 wrote is read, and to the same value."""
    golden = json.loads(VECTORS.read_text())["slots"][suite]
    slot = bytes.fromhex(golden["header"]) + bytes.fromhex(golden["body"])
    assert opened_value(suite, slot).hex() == golden["value"]  # type: ignore[union-attr]
    found = codec(suite).open(memoryview(slot)[:HEADER_BYTES], KEY, PLACE)
    assert not isinstance(found, MissCause)
    assert found.key == KEY
    assert found.generation == 0x0102030405060708
    assert (found.length, found.expiry, found.stored_us) == (100, 0x71727374, 0x2122232425262728)


@every_suite
@pytest.mark.interpreted
def test_golden_slots_are_written_the_same(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = json.loads(VECTORS.read_text())["slots"][suite]
    monkeypatch.setattr("agent.pool.format.sealed_slot.new_salt", lambda *_: bytes(range(0xA0, 0xA0 + 24)))
    slot = sealed_slot(suite, bytes.fromhex(golden["value"]))
    assert slot[:HEADER_BYTES].hex() == golden["header"]
    assert slot[HEADER_BYTES:].hex() == golden["body"]


@every_suite
@pytest.mark.parametrize("size", [1, 100, 4096, 65535, 65536, 65537, 200_000])
def test_round_trip(suite: str, size: int, seed: int) -> None:
    value = random.Random(seed + size).randbytes(size)
    assert opened_value(suite, sealed_slot(suite, value)) == value


@every_suite
def test_every_flipped_bit_of_the_header_is_a_miss(suite: str) -> None:
    """All 32,768 bits, one after the other."""
    slot = sealed_slot(suite, b"a value of a few bytes")
    used = codec(suite)
    causes = dict.fromkeys(MissCause, 0)
    header = memoryview(slot)[:HEADER_BYTES]
    for bit in range(HEADER_BYTES * 8):
        header[bit // 8] ^= 1 << bit % 8
        found = used.open(header, KEY, PLACE, 0x0102030405060708)
        header[bit // 8] ^= 1 << bit % 8
        assert isinstance(found, MissCause), f"bit {bit} of the header went unnoticed"
        causes[found] += 1
    assert causes[MissCause.WRONG_KEY] == 64, "the fingerprint"
    assert causes[MissCause.CORRUPT] == HEADER_BYTES * 8 - 64
    assert opened_value(suite, slot) == b"a value of a few bytes"


@every_suite
def test_every_flipped_byte_of_the_value_is_a_miss(suite: str, seed: int) -> None:
    """One bit in each byte of a padded value, the padding included."""
    rng = random.Random(seed)
    value = rng.randbytes(5000)
    slot = sealed_slot(suite, value)
    used = codec(suite)
    found = used.open(memoryview(slot)[:HEADER_BYTES], KEY, PLACE)
    assert not isinstance(found, MissCause)
    into = bytearray(8192)
    for at in range(HEADER_BYTES, len(slot)):
        bit = 1 << rng.randrange(8)
        slot[at] ^= bit
        assert not found.open_unit(0, memoryview(slot)[HEADER_BYTES:], memoryview(into)), f"byte {at}"
        slot[at] ^= bit
    assert opened_value(suite, slot) == value


@every_suite
def test_every_mix_of_two_writes_is_a_miss(suite: str, seed: int) -> None:
    """Torn at every 4 KiB, both ways round; the two writes differ in key, generation or only in salt."""
    rng = random.Random(seed)
    value, other = rng.randbytes(150_000), rng.randbytes(150_000)
    first = sealed_slot(suite, value)
    seconds = {
        "the same value again": sealed_slot(suite, value),
        "another value": sealed_slot(suite, other),
        "another generation": sealed_slot(suite, value, generation=9),
        "another key": sealed_slot(suite, other, key=bytes(16)),
    }
    for what, second in seconds.items():
        for cut in range(4096, len(first), 4096):
            for torn in (first[:cut] + second[cut:], second[:cut] + first[cut:]):
                served = opened_value(suite, torn)
                if suite != "aes-256-gcm" and what in ("the same value again", "another generation"):
                    # The same text at the same place seals to the same bytes; the header decides.
                    assert served == value or isinstance(served, MissCause)
                else:
                    assert isinstance(served, MissCause), f"{what}, torn at {cut}"


@every_suite
def test_blank_truncated_and_swapped_parts_are_misses(suite: str, seed: int) -> None:
    value = random.Random(seed).randbytes(150_000)
    slot = sealed_slot(suite, value)
    assert opened_value(suite, bytes(len(slot))) is MissCause.EVICTED
    for cut in (0, 1, 64, 4095):
        torn = slot[:cut] + bytes(len(slot) - cut)
        assert isinstance(opened_value(suite, torn), MissCause)
    for at in range(HEADER_BYTES, len(slot), 4096):
        hole = bytearray(slot)
        hole[at : at + 4096] = bytes(4096)
        assert isinstance(opened_value(suite, hole), MissCause), f"a hole at {at}"
    swapped = bytearray(slot)
    swapped[4096:69632], swapped[69632:135168] = slot[69632:135168], slot[4096:69632]
    assert opened_value(suite, swapped) is MissCause.CORRUPT


@every_suite
def test_what_is_anothers_does_not_open(suite: str) -> None:
    slot = sealed_slot(suite, b"x" * 5000)
    assert opened_value(suite, slot, key=bytes(16)) is MissCause.EVICTED
    assert opened_value(suite, slot, generation=8) is MissCause.EVICTED
    assert opened_value(suite, slot, generation=None) == b"x" * 5000
    other_key = codec(suite, data_key=SecretKey(fixed_secret(9).reveal()[32:]))
    assert opened_value(suite, slot, using=other_key) is MissCause.WRONG_KEY
    for tenant, volume in ((bytes(16), VOLUME_ID), (TENANT, bytes(16))):
        other = SlotCodec(tenant, volume, DATA_KEY, suite, 1 << 16)
        assert opened_value(suite, slot, using=other) is MissCause.CORRUPT
    for name in SUITES:
        if name != suite:
            assert opened_value(name, slot) is MissCause.CORRUPT
    assert opened_value(suite, slot, using=codec(suite, unit_bytes=1 << 17)) is MissCause.CORRUPT
    if suite == "aes-256-xts+crc64":
        assert opened_value(suite, slot, place=Place(nguid_of(0), 78)) is MissCause.CORRUPT
        assert opened_value(suite, slot, place=Place(nguid_of(1), 77)) is MissCause.CORRUPT


@every_suite
@given(data=st.data())
def test_any_header_opens_or_is_a_miss(suite: str, data: st.DataObject) -> None:
    """Random blocks, and whole headers with a piece overwritten: never an exception, never a value."""
    block = bytearray(sealed_slot(suite, b"v" * 10)[:HEADER_BYTES])
    at = data.draw(st.integers(0, HEADER_BYTES - 1))
    piece = data.draw(st.binary(min_size=1, max_size=80))
    damaged = (block[:at] + piece + block[at + len(piece) :])[:HEADER_BYTES]
    found = codec(suite).open(memoryview(damaged), KEY, PLACE, 0x0102030405060708)
    assert isinstance(found, MissCause) == (damaged != block)


def test_a_unit_is_sealed_once_and_a_header_needs_them_all() -> None:
    used = codec("aes-256-gcm")
    sealer = used.seal(KEY, 1, PLACE)
    into = memoryview(bytearray(1 << 17))
    sealer.seal(1, memoryview(bytes(65536)), into)
    with pytest.raises(ValueError, match="sealed already"):
        sealer.seal(1, memoryview(bytes(65536)), into)
    with pytest.raises(ValueError, match="not the units"):
        sealer.header(1 << 17, expiry=0, stored_us=0)
    sealer.seal(0, memoryview(bytes(65536)), into)
    assert len(sealer.header(1 << 17, expiry=0, stored_us=0)) == HEADER_BYTES
    with pytest.raises(ValueError, match="not the units"):
        sealer.header(1 << 17, expiry=0, stored_us=1)
    with pytest.raises(ValueError, match="sealed already"):
        sealer.seal(2, memoryview(bytes(65536)), into)


@every_suite
@pytest.mark.parametrize("length", [1, 5000, 1 << 16, 150_000, 3 << 16])
@pytest.mark.parametrize("room", [0, 15, 16, 4096])
def test_what_lies_behind_a_value_does_not_matter(suite: str, length: int, room: int) -> None:
    used, value = codec(suite), random.Random(length).randbytes(length)
    sealer, size = used.seal(KEY, 9, PLACE), HEADER_BYTES + used.padded(length)
    buffer = bytearray(b"\xa5") * (size + room)
    assert sealer.seal(0, memoryview(value), memoryview(buffer)[HEADER_BYTES:]) == size - HEADER_BYTES
    sealer.header_into(memoryview(buffer), length, 0, 1)
    assert buffer[size + 16 :] == b"\xa5" * max(0, room - 16)
    assert opened_value(suite, buffer[:size], generation=9) == value


@pytest.mark.parametrize("unit_bytes", [0, 4096, 32768, 65537, 3 << 16, 1 << 21])
def test_units_of_other_sizes_are_refused(unit_bytes: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        codec("aes-256-gcm", unit_bytes=unit_bytes)


def test_the_clear_part_of_a_slot_names_neither_tenant_nor_key() -> None:
    for suite in SUITES[:2]:
        slot = bytes(sealed_slot(suite, b"\x5a" * 70_000))
        for secret in (TENANT, VOLUME_ID, KEY, b"\x5a" * 16, DATA_KEY.reveal()[:16]):
            assert secret not in slot
