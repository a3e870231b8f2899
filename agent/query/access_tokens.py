"""Tokens by which a tenant's routers prove themselves: a file of mode 0600, a token a line.

Several lines are several tokens of the same tenant, so that one can be replaced by another. Only digests are
kept in memory. Errors quote nothing of a file.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.errors import ConfigError
from nvmeof.authentication.private_files import SecretFileError, read_private, write_private

FILE_BYTES_MAX: Final = 1 << 14
TOKENS_MAX: Final = 16
"""Of one tenant."""
TOKEN_BYTES_MAX: Final = 256
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{32,256}")
"""A bearer token's characters (RFC 6750, 2.1), and enough of them to be no word."""


@dataclass(frozen=True, slots=True)
class Token:
    digest: bytes = field(repr=False)
    tenant: str


def new_tokens_file(path: Path) -> None:
    """Make one token in a new file of mode 0600. Raises ConfigError; a file is never overwritten."""
    try:
        write_private(path, secrets.token_urlsafe(32) + "\n")
    except SecretFileError as refused:
        raise ConfigError(refused.message, refused.advice) from None


def read_tokens_file(path: Path, tenant: str) -> list[Token]:
    """The tokens of a tenant. Raises ConfigError."""
    advice = "make one with `g35 key make-query`"
    try:
        raw = read_private(path, FILE_BYTES_MAX)
    except SecretFileError as refused:
        raise ConfigError(refused.message, refused.advice) from None
    lines = raw.decode("ascii", "replace").split()
    if not 1 <= len(lines) <= TOKENS_MAX:
        raise ConfigError(f"{path} has {len(lines)} tokens; it must have 1 to {TOKENS_MAX}", advice)
    if not all(_TOKEN.fullmatch(line) for line in lines):
        raise ConfigError(f"{path} has a line that is no token: 32 to 256 letters, digits, -._~+/=", advice)
    return [Token(_digest(line.encode()), tenant) for line in lines]


def tenant_of(presented: bytes, tokens: Iterable[Token]) -> str | None:
    """Whose token it is. The time that takes tells nothing of the tokens, nor of which it is."""
    digest, found = _digest(presented), None
    for token in tokens:
        if hmac.compare_digest(digest, token.digest):
            found = token.tenant
    return found


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
