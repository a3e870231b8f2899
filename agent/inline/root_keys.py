"""Who holds the root key of a pool, and what wraps what.

    root key  ──wraps──►  key of each tenant  ──wraps──►  secret of each volume

The root key wraps and unwraps, and that is all that anybody asks of it. So it may stay where it is: a file
today; a PKCS#11 token (C_WrapKey, C_UnwrapKey) or Vault's transit engine could stand behind the same three
calls, with purpose and context as the derivation or the associated data. What is wrapped lies in the pool
map, on flash. What the context is: agent/pool/map/key_contexts.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from agent.inline.secrets import Purpose, SecretKey, load_root_key, unwrap_secret, wrap_secret


class RootKey(Protocol):
    """A root key, wherever it is held."""

    def wrap(self, purpose: Purpose, context: bytes, secret: SecretKey) -> bytes:
        """`secret`, safe to lie on flash, bound to what it is for and whose it is."""
        ...

    def unwrap(self, purpose: Purpose, context: bytes, wrapped: bytes) -> SecretKey:
        """The secret again. Raises WrongKey where it is not this key's, or of another purpose or context."""
        ...

    def describe(self) -> str:
        """Which key it is, for people; nothing secret."""
        ...


class HeldRootKey:
    """A root key in the memory of this process."""

    def __init__(self, key: SecretKey, origin: str) -> None:
        self._key = key
        self._origin = origin

    def wrap(self, purpose: Purpose, context: bytes, secret: SecretKey) -> bytes:
        return wrap_secret(self._key, purpose, context, secret)

    def unwrap(self, purpose: Purpose, context: bytes, wrapped: bytes) -> SecretKey:
        return unwrap_secret(self._key, purpose, context, wrapped)

    def describe(self) -> str:
        return f"{self._origin} (fingerprint {self._key.fingerprint().hex()})"


def root_key_in(path: Path) -> HeldRootKey:
    """The root key in a file. Raises ConfigError for a missing, exposed or damaged one."""
    return HeldRootKey(load_root_key(path), str(path))
