"""Keys of names: frozen for ever, since values on flash are found by them."""

from __future__ import annotations

import pytest

from host_shim.block_key import checked_key, key_of


def test_the_hash_is_frozen() -> None:
    # BLAKE2b, 16 bytes of digest, personalisation "g35 key"; b2sum has no option for the last.
    assert key_of("block 17").hex() == "644be6482d32217b46373c00dd5e44fa"


def test_text_and_bytes_of_one_name_are_one_key() -> None:
    assert key_of("Ünïcode") == key_of("Ünïcode".encode())
    assert key_of(b"\xff\xfe") == key_of(b"\xff\xfe".decode("utf-8", "surrogateescape"))


@pytest.mark.parametrize("digits", ["00112233445566778899aabbccddeeff", "00112233445566778899AABBCCDDEEFF"])
def test_32_hexadecimal_digits_are_the_key_itself(digits: str) -> None:
    assert key_of(digits).hex() == digits.lower()


@pytest.mark.parametrize(
    "name", ["0" * 31, "0" * 33, "g" * 32, "0x" + "0" * 30, " " * 2 + "0" * 30, "0" * 32 + "\n"]
)
def test_anything_else_is_hashed(name: str) -> None:
    assert len(key_of(name)) == 16
    assert key_of(name) != key_of("0" * 32)


def test_no_name_no_key() -> None:
    with pytest.raises(ValueError, match="empty"):
        key_of("")


def test_a_key_is_checked() -> None:
    assert checked_key(b"k" * 16) == b"k" * 16
    with pytest.raises(ValueError, match="this one 15"):
        checked_key(b"k" * 15)
    with pytest.raises(TypeError, match="bytearray"):
        checked_key(bytearray(16))  # type: ignore[arg-type]
