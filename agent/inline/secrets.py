"""Key material, and the file of the root key.

A `SecretKey` has no repr, no str, no telling equality and no pickle: it cannot end up in a log line by
accident. One key wraps another (RFC 5649, AES key wrap with padding) under a key that is derived from it for
one purpose and context; unwrapping with a wrong key, or in another context, fails as a whole and yields
nothing. What wraps what:

    root key  ──wraps──►  key of each tenant  ──wraps──►  secret of each volume

What is wrapped lies in the pool map, on flash; the contexts: agent/pool/map/document.py. Nobody asks more of
the root key than to wrap and unwrap. So a PKCS#11 token (C_WrapKey, C_UnwrapKey) or Vault's transit engine
could stand behind the calls of `RootKey`.

The root key file is text, one line, mode 0600:

    g35-root-key-1:<base64 of 32 bytes>:<first 8 hex digits of its SHA-256>

The digits catch a truncated paste; 32 bits of a hash of 256 random bits tell an attacker nothing of use.
"""

import base64
import binascii
import enum
import hashlib
import os
from pathlib import Path
from typing import NoReturn

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from cryptography.hazmat.primitives.keywrap import (
    InvalidUnwrap,
    aes_key_unwrap_with_padding,
    aes_key_wrap_with_padding,
)

from agent.errors import ConfigError
from nvmeof.authentication.private_files import SecretFileError, read_private, write_private

_PREFIX = "g35-root-key-1"
ROOT_KEY_BYTES = 32
ROOT_KEY_FILE_BYTES_MAX = 4096
TENANT_KEY_BYTES = 32
VOLUME_SECRET_BYTES = 96
OF_A_POOL = (
    "a pool opens with the key that it was formatted with, and with no other: bring that file back from "
    "where you keep its copy, or name it (agent.key_file)"
)
"""What to do about a missing root key where a pool is there: a new one would open nothing."""
"""32 bytes for placement, 64 for the data: XTS takes them all, GCM the first half."""


class SecretKey:
    """Bytes that must not be seen. `reveal` is the only way to them, and is easy to search for."""

    __slots__ = ("_bytes",)

    def __init__(self, key: bytes) -> None:
        self._bytes = bytes(key)

    def reveal(self) -> bytes:
        return self._bytes

    def __len__(self) -> int:
        return len(self._bytes)

    def __repr__(self) -> str:
        return "<secret>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret key is not pickled")

    def derive(self, label: str, context: bytes = b"", length: int = 32) -> "SecretKey":
        """A key for one purpose (HKDF-Expand, RFC 5869): `label` names it, `context` binds it."""
        info = b"g35/" + label.encode() + b"\0" + context
        return SecretKey(HKDFExpand(hashes.SHA256(), length, info).derive(self._bytes))

    def fingerprint(self) -> bytes:
        """Eight bytes that name the key without giving it away; they stand in the clear in every slot."""
        return self.derive("fingerprint", length=8).reveal()


class WrongKey(Exception):
    """What was wrapped does not open with this key. Nothing of it has been revealed."""


class Purpose(enum.StrEnum):
    """The kind of a wrapped key, so that no kind is taken for another."""

    TENANT = "tenant wrap"
    VOLUME = "volume wrap"
    MAP = "map seal"


_LENGTHS = {Purpose.TENANT: TENANT_KEY_BYTES, Purpose.VOLUME: VOLUME_SECRET_BYTES, Purpose.MAP: 32}


def wrap_secret(wrapping: SecretKey, purpose: Purpose, context: bytes, secret: SecretKey) -> bytes:
    """A key, safe to lie on flash; `context` (whose it is) must be the same to unwrap."""
    return aes_key_wrap_with_padding(wrapping.derive(purpose, context).reveal(), secret.reveal())


def unwrap_secret(wrapping: SecretKey, purpose: Purpose, context: bytes, wrapped: bytes) -> SecretKey:
    """The key again. Raises WrongKey where key, purpose, context or bytes are not those of the wrapping."""
    try:
        secret = aes_key_unwrap_with_padding(wrapping.derive(purpose, context).reveal(), wrapped)
    except (InvalidUnwrap, ValueError):
        raise WrongKey("what is wrapped does not open with this key") from None
    if len(secret) != _LENGTHS[purpose]:
        raise WrongKey("what is wrapped has a length that no version of g35 has used")
    return SecretKey(secret)


def new_volume_secret() -> SecretKey:
    return SecretKey(os.urandom(VOLUME_SECRET_BYTES))


def new_tenant_key() -> SecretKey:
    return SecretKey(os.urandom(TENANT_KEY_BYTES))


def create_root_key(path: Path) -> None:
    """Write a fresh root key to `path`, which must not exist. Raises ConfigError where it cannot."""
    key = os.urandom(ROOT_KEY_BYTES)
    text = f"{_PREFIX}:{base64.b64encode(key).decode()}:{hashlib.sha256(key).hexdigest()[:8]}\n"
    try:
        write_private(path, text)
    except SecretFileError as refused:
        raise ConfigError(f"the root key: {refused.message}", refused.advice) from None


def load_root_key(path: Path, if_missing: str = OF_A_POOL) -> SecretKey:
    """The root key in `path`. Raises ConfigError for a missing, exposed or damaged file.

    `if_missing`: what to do where it is missing.
    """
    try:
        path.lstat()
        text = read_private(path, ROOT_KEY_FILE_BYTES_MAX)
    except FileNotFoundError:
        raise ConfigError(f"there is no root key at {path}", if_missing) from None
    except OSError as error:
        raise ConfigError(f"cannot open the root key {path}: {error.strerror}", "check the file") from None
    except SecretFileError as refused:
        raise ConfigError(f"the root key: {refused.message}", refused.advice) from None
    damaged = ConfigError(f"{path} holds no root key of g35", "restore the file from where you keep it")
    try:
        prefix, body, check = text.decode("ascii").strip().split(":")
        key = base64.b64decode(body, validate=True)
    except (UnicodeDecodeError, ValueError, binascii.Error):
        raise damaged from None
    if prefix != _PREFIX or len(key) != ROOT_KEY_BYTES or hashlib.sha256(key).hexdigest()[:8] != check:
        raise damaged
    return SecretKey(key)


class RootKey:
    """A root key in the memory of this process. A subclass may leave it where it is."""

    def __init__(self, key: SecretKey, origin: str) -> None:
        self._key = key
        self._origin = origin

    def wrap(self, purpose: Purpose, context: bytes, secret: SecretKey) -> bytes:
        """`secret`, safe to lie on flash, bound to its purpose and to whose it is."""
        return wrap_secret(self._key, purpose, context, secret)

    def unwrap(self, purpose: Purpose, context: bytes, wrapped: bytes) -> SecretKey:
        """The secret again. Raises WrongKey where another key, purpose or context wrapped it."""
        return unwrap_secret(self._key, purpose, context, wrapped)

    def describe(self) -> str:
        """Which key it is, for people; nothing secret."""
        return f"{self._origin} (fingerprint {self._key.fingerprint().hex()})"


def root_key_in(path: Path, if_missing: str = OF_A_POOL) -> RootKey:
    """The root key in a file. See `load_root_key`."""
    return RootKey(load_root_key(path, if_missing), str(path))
