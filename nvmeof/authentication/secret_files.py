"""Files that hold DH-HMAC-CHAP secrets: mode 0600 or refused, and never quoted in an error.

A *secret file* is one line, `DHHC-1:hh:BASE64:`. A *hosts file*, for an enclosure, has a line for each host
that has to authenticate, and `#` begins a comment:

    HOST_NQN HOST_SECRET [CONTROLLER_SECRET]
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from nvmeof.authentication.credentials import ALL_GROUPS, ALL_HASHES, Credentials
from nvmeof.authentication.secret import DhchapSecret, parse_secret
from nvmeof.errors import NvmeofError
from nvmeof.wire.authentication import GroupId, HashId
from nvmeof.wire.fabrics import encode_nqn

MAX_FILE_BYTES: Final = 1 << 20
"""Enough for more than a thousand hosts, which is as many controllers as a target has."""

MAX_HOSTS: Final = 1024


class SecretFileError(NvmeofError):
    """A file of secrets is not usable: ours to mend. `advice` says how."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(f"{message}; {advice}")
        self.message = message
        self.advice = advice


def _others_bits(path: Path) -> int:
    """The mode bits that must not be set. A credential of systemd is root's and readable by an ACL, which the
    mode shows as the group's; its folder is closed to others.
    """
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    return 0o037 if folder and path.parent == Path(folder) else 0o077


def _read(path: Path) -> str:
    try:
        # O_NONBLOCK: a FIFO in its place must not hang us.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SecretFileError(f"cannot open {path}: {error.strerror}", "check the path") from None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise SecretFileError(f"{path} is no regular file", "name the file of the secret itself")
        if facts.st_mode & _others_bits(path):
            raise SecretFileError(
                f"{path} can be read by others (mode {stat.S_IMODE(facts.st_mode):04o})",
                f"chmod 600 {path}, and think about who may have read it meanwhile",
            )
        if facts.st_size > MAX_FILE_BYTES:
            raise SecretFileError(f"{path} has {facts.st_size} bytes", "name the file of the secret")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(MAX_FILE_BYTES).decode("ascii")
    except UnicodeDecodeError:
        raise SecretFileError(f"{path} holds no DH-HMAC-CHAP secret", "it is text") from None
    finally:
        os.close(descriptor)


def read_secret_file(path: Path) -> DhchapSecret:
    """The secret in a file of one line. Raises `SecretFileError`."""
    try:
        return parse_secret(_read(path))
    except ValueError as error:
        raise SecretFileError(f"{path}: {error}", "make one with `g35 key make-dhchap`") from None


def read_credentials(host: Path, controller: Path | None) -> Credentials:
    """What a host authenticates with: its secret's file, and the subsystem's. Raises `SecretFileError`."""
    secrets = read_secret_file(host), None if controller is None else read_secret_file(controller)
    try:
        return Credentials(*secrets)
    except ValueError as error:
        raise SecretFileError(f"{host} and {controller}: {error}", "make a second secret") from None


def read_hosts_file(
    path: Path,
    hashes: tuple[HashId, ...] = ALL_HASHES,
    groups: tuple[GroupId, ...] = ALL_GROUPS,
) -> dict[str, Credentials]:
    """The hosts of an enclosure and what they authenticate with, by NQN. Raises `SecretFileError`."""
    found: dict[str, Credentials] = {}
    for number, line in enumerate(_read(path).splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            if not 2 <= len(words) <= 3:
                raise ValueError("a line is HOST_NQN HOST_SECRET [CONTROLLER_SECRET]")
            encode_nqn(words[0])
            if words[0] in found:
                raise ValueError("the host is there twice")
            if len(found) == MAX_HOSTS:
                raise ValueError(f"there are more than {MAX_HOSTS} hosts")
            secrets = [parse_secret(word) for word in words[1:]]
            controller = secrets[1] if len(secrets) > 1 else None
            found[words[0]] = Credentials(secrets[0], controller, hashes, groups)
        except ValueError as error:
            raise SecretFileError(f"{path} line {number}: {error}", "mend the line") from None
    if not found:
        raise SecretFileError(f"{path} names no host", "add a line for each host that may connect")
    return found


def write_secret_file(path: Path, secret: DhchapSecret) -> None:
    """Write a secret to a new file of mode 0600. Raises `SecretFileError`; a file is never overwritten."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise SecretFileError(
            f"{path} exists, and a secret is never overwritten", "choose another path"
        ) from None
    except OSError as error:
        raise SecretFileError(f"cannot create {path}: {error.strerror}", "check the folder") from None
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secret.text() + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise SecretFileError(f"cannot write {path}: {error.strerror}", "check the disk") from None
