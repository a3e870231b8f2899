"""What the agent authenticates with to each enclosure, out of the files that the configuration names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from agent.config.configuration import EnclosureSection, FabricSection
from nvmeof.authentication.credentials import Credentials
from nvmeof.authentication.secret_files import read_credentials

SecretFinder: TypeAlias = Callable[[EnclosureSection], Credentials | None]
"""Raises `SecretFileError`."""


def secret_finder(fabric: FabricSection) -> SecretFinder:
    """Reads the files with every call, so that a secret is replaced without stopping the agent.

    The files of an enclosure's own section go before those of `[fabric]`, both together.
    """

    def find(section: EnclosureSection) -> Credentials | None:
        chosen = section if section.host_secret_file is not None else fabric
        if chosen.host_secret_file is None:
            return None
        return read_credentials(chosen.host_secret_file, chosen.controller_secret_file)

    return find


def no_secrets(section: EnclosureSection) -> Credentials | None:
    """For enclosures that ask for none."""
    return None
