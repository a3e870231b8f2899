"""DH-HMAC-CHAP secrets, their representation as text, and the credentials of a host and a subsystem (NVMe
Base 2.0, in-band authentication).

    DHHC-1:hh:BASE64:        BASE64 of the secret (32, 48 or 64 bytes) and its CRC-32, little-endian

hh says how the secret becomes the key that responses are made with: 00 as it is, 01, 02, 03 as HMAC-SHA-256,
-384, -512 of the name of whom it belongs to and "NVMe-over-Fabrics". A transformed key that leaks serves for
that one name.
"""

import base64
import binascii
import hmac
import secrets
import threading
import zlib
from dataclasses import dataclass, field
from typing import Final, NoReturn

from nvmeof.wire.authentication import GroupId, HashId

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

    def same_as(self, other: "DhchapSecret") -> bool:
        """Whether both hold the same bytes, however they are transformed."""
        return hmac.compare_digest(self._secret, other._secret)


def new_secret(length: int = 32, transform: HashId | None = HashId.SHA256) -> DhchapSecret:
    """A fresh one. ValueError for a length that there is not."""
    return DhchapSecret(secrets.token_bytes(length), transform)


def parse_secret(text: str) -> DhchapSecret:
    """A secret from its representation. ValueError names the fault, and quotes nothing."""
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


ALL_HASHES: Final = tuple(HashId)
ALL_GROUPS: Final = tuple(GroupId)
"""What a host offers: the controller chooses, and the kernel's chooses NULL unless it is told otherwise."""

CONTROLLER_GROUPS: Final = (GroupId.FFDHE2048, GroupId.FFDHE3072, GroupId.FFDHE4096)
"""What a controller agrees to, in order. Not NULL, because the host's offer is not authenticated and anybody
in between could take the others out of it; nor the two largest, because a stranger makes us compute."""


class Numbers:
    """Sequence numbers and transaction ids of one side, from any thread.

    Both begin at random and go up by one. Sequence number 0 is reserved: it says "no challenge".
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sequence = secrets.randbits(32)
        self._transaction = secrets.randbits(16)

    def next_sequence(self) -> int:
        """1 to 2^32 - 1."""
        with self._lock:
            self._sequence = self._sequence + 1 & 0xFFFF_FFFF or 1
            return self._sequence

    def next_transaction(self) -> int:
        """0 to 2^16 - 1."""
        with self._lock:
            self._transaction = self._transaction + 1 & 0xFFFF
            return self._transaction


@dataclass(frozen=True, slots=True, eq=False)
class Credentials:
    """The host's secret and, for both ways, the subsystem's.

    `hashes` and `groups` are acceptable, for a controller in order of preference. ValueError where
    both secrets are the same bytes: who knows the one could then answer for the other.
    """

    host_secret: DhchapSecret
    controller_secret: DhchapSecret | None = None
    hashes: tuple[HashId, ...] = ALL_HASHES
    groups: tuple[GroupId, ...] = ALL_GROUPS
    numbers: Numbers = field(default_factory=Numbers, repr=False)

    def __post_init__(self) -> None:
        if self.controller_secret is not None and self.host_secret.same_as(self.controller_secret):
            raise ValueError("host and controller have the same secret; each needs one of its own")
        if not self.hashes or not self.groups:
            raise ValueError("at least one hash and one DH group (it may be null) are needed")
