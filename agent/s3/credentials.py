"""Files of access keys: who may come in by the S3 door, and as which tenant.

The format is that of the AWS tools' credentials file, so that the agent and a client on the same machine may
read one file (AWS_SHARED_CREDENTIALS_FILE). Every section is an access key of the same tenant:

    [default]
    aws_access_key_id = G35...
    aws_secret_access_key = ...

A file that others can read is refused, and nothing of it is ever quoted in an error.
"""

from __future__ import annotations

import configparser
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.errors import ConfigError
from agent.inline.secrets import SecretKey

FILE_BYTES_MAX: Final = 1 << 16
KEYS_MAX: Final = 64
SECRET_BYTES_MIN: Final = 16
_KEY_ID = re.compile(r"[A-Za-z0-9]{4,128}")
_DIGITS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"


@dataclass(frozen=True, slots=True)
class AccessKey:
    """An access key and whose it is; the secret does not show in its repr."""

    key_id: str
    secret: SecretKey = field(repr=False)
    tenant: str


def new_credentials_file(path: Path, profile: str = "default") -> None:
    """Make one access key in a new file of mode 0600. Raises ConfigError; a file is never overwritten."""
    key_id = "G35" + "".join(secrets.choice(_DIGITS) for _ in range(17))
    text = f"[{profile}]\naws_access_key_id = {key_id}\naws_secret_access_key = {secrets.token_urlsafe(30)}\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists, and a secret is never overwritten", "choose another path"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot create {path}: {error.strerror}", "check the folder") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_credentials_file(path: Path, tenant: str) -> list[AccessKey]:
    """The access keys of a tenant. Raises ConfigError."""
    parser = configparser.RawConfigParser(default_section="\0none", strict=True)
    try:
        parser.read_string(_text(path), source="the file")
    except configparser.Error:
        # Its message quotes the line, and the line may be a secret.
        raise ConfigError(f"{path} is no file of credentials", "make one with `g35 key make-s3`") from None
    found = []
    for name in parser.sections():
        key_id = parser.get(name, "aws_access_key_id", fallback="")
        secret = parser.get(name, "aws_secret_access_key", fallback="").encode()
        if _KEY_ID.fullmatch(key_id) is None or len(secret) < SECRET_BYTES_MIN:
            raise ConfigError(
                f"{path}: section {name} has no usable aws_access_key_id and aws_secret_access_key",
                f"a secret has {SECRET_BYTES_MIN} bytes at the least; make one with `g35 key make-s3`",
            )
        found.append(AccessKey(key_id, SecretKey(secret), tenant))
    if not 1 <= len(found) <= KEYS_MAX:
        raise ConfigError(f"{path} has {len(found)} access keys", f"it must have 1 to {KEYS_MAX}")
    return found


def _text(path: Path) -> str:
    try:
        # O_NONBLOCK: a FIFO in its place must not hang us.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}", "check the path") from None
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(f"{path} is no regular file", "name the file of the credentials itself")
        if facts.st_mode & _others_bits(path):
            raise ConfigError(
                f"{path} can be read by others (mode {stat.S_IMODE(facts.st_mode):04o})",
                f"chmod 600 {path}, and think about who may have read it meanwhile",
            )
        text = file.read(FILE_BYTES_MAX + 1)
    if len(text) > FILE_BYTES_MAX or not text.isascii():
        raise ConfigError(f"{path} is no file of credentials", "make one with `g35 key make-s3`")
    return text.decode("ascii")


def _others_bits(path: Path) -> int:
    """The mode bits that must not be set; those of systemd are readable by an ACL, shown as the group's."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    return 0o037 if folder and path.parent == Path(folder) else 0o077
