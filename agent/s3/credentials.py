"""Files of access keys for the S3 door.

The format is that of the AWS tools' credentials file, so that the agent and a client on the same machine may
share one (AWS_SHARED_CREDENTIALS_FILE). Every section is an access key of the same tenant:

    [default]
    aws_access_key_id = G35...
    aws_secret_access_key = ...

A file that others can read is refused. Errors quote nothing of a file.
"""

import configparser
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.errors import ConfigError
from agent.inline.secrets import SecretKey
from nvmeof.authentication.private_files import SecretFileError, read_private, write_private

FILE_BYTES_MAX: Final = 1 << 16
KEYS_MAX: Final = 64
SECRET_BYTES_MIN: Final = 16
_KEY_ID = re.compile(r"[A-Za-z0-9]{4,128}")
_DIGITS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"


@dataclass(frozen=True, slots=True)
class AccessKey:
    """An access key of a tenant; its repr hides the secret."""

    key_id: str
    secret: SecretKey = field(repr=False)
    tenant: str


def new_credentials_file(path: Path) -> None:
    """Make one access key in a new file of mode 0600. Raises ConfigError; a file is never overwritten."""
    key_id = "G35" + "".join(secrets.choice(_DIGITS) for _ in range(17))
    text = f"[default]\naws_access_key_id = {key_id}\naws_secret_access_key = {secrets.token_urlsafe(30)}\n"
    try:
        write_private(path, text)
    except SecretFileError as refused:
        raise ConfigError(refused.message, refused.advice) from None


def read_credentials_file(path: Path, tenant: str) -> list[AccessKey]:
    """The access keys of a tenant. Raises ConfigError."""
    parser = configparser.RawConfigParser(default_section="\0none", strict=True)
    try:
        parser.read_string(_text(path), source="the file")
    except configparser.Error:
        # Its message quotes the line, and the line may be a secret.
        raise ConfigError(f"{path} is no file of credentials", "make one with `g35 key make-s3`") from None
    found: list[AccessKey] = []
    for name in parser.sections():
        key_id = parser.get(name, "aws_access_key_id", fallback="")
        secret = parser.get(name, "aws_secret_access_key", fallback="").encode()
        if _KEY_ID.fullmatch(key_id) is None or len(secret) < SECRET_BYTES_MIN:
            raise ConfigError(
                f"{path}: section {name} has no usable aws_access_key_id and aws_secret_access_key",
                f"a secret has {SECRET_BYTES_MIN} bytes at the least; make one with `g35 key make-s3`",
            )
        if any(key.key_id == key_id for key in found):
            raise ConfigError(f"{path} has one access key in two sections, {name} among them", "remove one")
        found.append(AccessKey(key_id, SecretKey(secret), tenant))
    if not 1 <= len(found) <= KEYS_MAX:
        raise ConfigError(f"{path} has {len(found)} access keys", f"it must have 1 to {KEYS_MAX}")
    return found


def _text(path: Path) -> str:
    try:
        text = read_private(path, FILE_BYTES_MAX)
    except SecretFileError as refused:
        raise ConfigError(refused.message, refused.advice) from None
    if not text.isascii():
        raise ConfigError(f"{path} is no file of credentials", "make one with `g35 key make-s3`")
    return text.decode("ascii")
