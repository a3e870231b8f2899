"""The root key of a pool, and what wraps what.

    root key  ──wraps──►  key of each tenant  ──wraps──►  secret of each volume

Nobody asks more of the root key than to wrap and unwrap. So a PKCS#11 token (C_WrapKey, C_UnwrapKey) or
Vault's transit engine could stand behind the same three calls. What is wrapped lies in the pool map, on
flash; the contexts: agent/pool/map/document.py.
"""

from __future__ import annotations

from pathlib import Path

from agent.inline.secrets import Purpose, SecretKey, load_root_key, unwrap_secret, wrap_secret


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


def root_key_in(path: Path) -> RootKey:
    """The root key in a file. Raises ConfigError for a missing, exposed or damaged one."""
    return RootKey(load_root_key(path), str(path))
