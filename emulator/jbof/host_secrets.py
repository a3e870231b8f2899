"""The enclosure's options about authentication: hosts and their secrets, hashes, Diffie-Hellman groups."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from nvmeof.authentication.credentials import ALL_HASHES, CONTROLLER_GROUPS, Credentials
from nvmeof.authentication.secret_files import SecretFileError, read_hosts_file
from nvmeof.wire.authentication import GroupId, HashId


class HashName(StrEnum):
    """Hashes of DH-HMAC-CHAP."""

    SHA256 = "sha256"
    SHA384 = "sha384"
    SHA512 = "sha512"


class GroupName(StrEnum):
    """DH groups of DH-HMAC-CHAP."""

    NULL = "null"
    FFDHE2048 = "ffdhe2048"
    FFDHE3072 = "ffdhe3072"
    FFDHE4096 = "ffdhe4096"
    FFDHE6144 = "ffdhe6144"
    FFDHE8192 = "ffdhe8192"


def read_host_secrets(
    file: Path | None, hashes: list[HashName] | None, groups: list[GroupName] | None, allowed: list[str]
) -> dict[str, Credentials]:
    """The hosts that have to authenticate, by NQN; `allowed` hosts have to be among them.

    ValueError says what cannot be.
    """
    if file is None:
        if hashes or groups:
            raise ValueError("--dhchap-hash and --dhchap-group want a --host-secret-file")
        return {}
    try:
        found = read_hosts_file(
            file,
            tuple(HashId[each.name] for each in hashes) if hashes else ALL_HASHES,
            tuple(GroupId[each.name] for each in groups) if groups else CONTROLLER_GROUPS,
        )
    except SecretFileError as error:
        raise ValueError(str(error)) from None
    for nqn in allowed:
        if nqn not in found:
            raise ValueError(f"--allow-host {nqn}: {file} has no secret for it")
    return found
