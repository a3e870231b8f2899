"""Files that hold DH-HMAC-CHAP secrets: mode 0600 or refused, and never quoted in an error.

A *secret file* is one line, `DHHC-1:hh:BASE64:`. A *hosts file*, for an enclosure, has a line for each host
that has to authenticate, and `#` begins a comment:

    HOST_NQN HOST_SECRET [CONTROLLER_SECRET]
"""

from pathlib import Path
from typing import Final

from nvmeof.authentication.private_files import SecretFileError as SecretFileError  # part of this face
from nvmeof.authentication.private_files import read_private, write_private
from nvmeof.authentication.secret import ALL_GROUPS, ALL_HASHES, Credentials, DhchapSecret, parse_secret
from nvmeof.wire.authentication import GroupId, HashId
from nvmeof.wire.fabrics import encode_nqn

MAX_FILE_BYTES: Final = 1 << 20
"""Enough for more than a thousand hosts, which is as many controllers as a target has."""

MAX_HOSTS: Final = 1024


def _read(path: Path) -> str:
    try:
        return read_private(path, MAX_FILE_BYTES).decode("ascii")
    except UnicodeDecodeError:
        raise SecretFileError(f"{path} holds no DH-HMAC-CHAP secret", "it is text") from None


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
    """The credentials of the hosts of an enclosure, by NQN. Raises `SecretFileError`."""
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
    write_private(path, secret.text() + "\n")
