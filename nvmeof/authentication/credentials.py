"""What one pair of host and subsystem authenticates with. Both roles hold the same record."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field
from typing import Final

from nvmeof.authentication.secret import DhchapSecret
from nvmeof.wire.authentication import GroupId, HashId

ALL_HASHES: Final = tuple(HashId)
ALL_GROUPS: Final = tuple(GroupId)
"""What a host offers: the controller chooses, and the kernel's chooses NULL unless it is told otherwise."""

CONTROLLER_GROUPS: Final = (GroupId.FFDHE2048, GroupId.FFDHE3072, GroupId.FFDHE4096)
"""What a controller agrees to, in order. Not NULL, because the host's offer is not authenticated and anybody
in between could take the others out of it; nor the two largest, because a stranger makes us compute."""


class Numbers:
    """Sequence numbers and transaction ids of one side, from any thread.

    Both begin at random and go up by one. Sequence number 0 is reserved: it says "no challenge".
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sequence = secrets.randbits(32)
        self._transaction = secrets.randbits(16)

    def next_sequence(self) -> int:
        """1 to 2^32 - 1."""
        with self._lock:
            self._sequence = self._sequence + 1 & 0xFFFF_FFFF or 1
            return self._sequence

    def next_transaction(self) -> int:
        """0 to 2^16 - 1."""
        with self._lock:
            self._transaction = self._transaction + 1 & 0xFFFF
            return self._transaction


@dataclass(frozen=True, slots=True, eq=False)
class Credentials:
    """The host's secret and, for both ways, the subsystem's.

    `hashes` and `groups` are what is agreed to, for a controller in order of preference. ValueError where
    both secrets are the same bytes: who knows the one could then answer for the other.
    """

    host_secret: DhchapSecret
    controller_secret: DhchapSecret | None = None
    hashes: tuple[HashId, ...] = ALL_HASHES
    groups: tuple[GroupId, ...] = ALL_GROUPS
    numbers: Numbers = field(default_factory=Numbers, repr=False)

    def __post_init__(self) -> None:
        if self.controller_secret is not None and self.host_secret.same_as(self.controller_secret):
            raise ValueError("host and controller have the same secret; each needs one of its own")
        if not self.hashes or not self.groups:
            raise ValueError("at least one hash and one DH group (it may be null) are needed")
