"""A DH-HMAC-CHAP secret, and its representation as text (NVMe Base 2.0, in-band authentication).

    DHHC-1:hh:BASE64:        BASE64 of the secret (32, 48 or 64 bytes) and its CRC-32, little-endian

hh says how the secret becomes the key that responses are made with: 00 as it is, 01, 02, 03 as
HMAC-SHA-256, -384, -512 of the name of whom it belongs to and "NVMe-over-Fabrics". A transformed key that
leaks serves for that one name.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
import zlib
from typing import Final, NoReturn

from nvmeof.wire.authentication import HashId

LENGTHS: Final = (32, 48, 64)
_PREFIX: Final = "DHHC-1"
_SUFFIX: Final = b"NVMe-over-Fabrics"

HASH_NAMES: Final = {HashId.SHA256: "sha256", HashId.SHA384: "sha384", HashId.SHA512: "sha512"}
"""Names that `hashlib` and `hmac` know."""


class DhchapSecret:
    """A secret that must not be seen: no repr, no str, no pickle. `text` and `key_for` are the ways to it.

    `transform` is None (00), or the hash of the transformation.
    """

    __slots__ = ("_secret", "transform")

    def __init__(self, secret: bytes, transform: HashId | None = None) -> None:
        if len(secret) not in LENGTHS:
            raise ValueError(f"a DH-HMAC-CHAP secret has 32, 48 or 64 bytes, not {len(secret)}")
        self._secret = bytes(secret)
        self.transform = transform

    def __repr__(self) -> str:
        return "<DH-HMAC-CHAP secret>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled")

    def text(self) -> str:
        """The representation, for a file of mode 0600 and nothing else."""
        check = zlib.crc32(self._secret).to_bytes(4, "little")
        body = base64.b64encode(self._secret + check).decode()
        return f"{_PREFIX}:{self.transform or 0:02x}:{body}:"

    def key_for(self, nqn: str) -> bytes:
        """The key of responses by `nqn`, whose secret this is."""
        if self.transform is None:
            return self._secret
        return hmac.digest(self._secret, nqn.encode() + _SUFFIX, HASH_NAMES[self.transform])

    def same_as(self, other: DhchapSecret) -> bool:
        """Whether both hold the same bytes, however they are transformed."""
        return hmac.compare_digest(self._secret, other._secret)


def new_secret(length: int = 32, transform: HashId | None = HashId.SHA256) -> DhchapSecret:
    """A fresh one. ValueError for a length that there is not."""
    return DhchapSecret(secrets.token_bytes(length), transform)


def parse_secret(text: str) -> DhchapSecret:
    """A secret from its representation. ValueError says what is wrong, and nothing of what was read."""
    parts = text.strip().split(":")
    if len(parts) != 4 or parts[0] != _PREFIX or parts[3]:
        raise ValueError("a DH-HMAC-CHAP secret is written DHHC-1:hh:BASE64:")
    if parts[1] not in ("00", "01", "02", "03"):
        raise ValueError("the hash of a DH-HMAC-CHAP secret is 00, 01, 02 or 03")
    try:
        raw = base64.b64decode(parts[2], validate=True)
    except (ValueError, binascii.Error):
        raise ValueError("the middle of the DH-HMAC-CHAP secret is not base64") from None
    secret, check = raw[:-4], raw[-4:]
    if len(secret) not in LENGTHS:
        raise ValueError("a DH-HMAC-CHAP secret has 32, 48 or 64 bytes")
    if zlib.crc32(secret).to_bytes(4, "little") != check:
        raise ValueError("the DH-HMAC-CHAP secret is damaged: its CRC does not fit")
    transform = int(parts[1])
    return DhchapSecret(secret, HashId(transform) if transform else None)
