"""What a controller announces and what it bounds. One record, given to the `Target` when it is made."""

from dataclasses import dataclass
from typing import Final

from nvmeof.wire.sqe import SQE

NAMESPACE_ID_LIMIT: Final = 1024
"""NN: the largest namespace id."""

MIN_PAGE_BYTES: Final = 4096
"""CAP.MPSMIN; the unit of MDTS."""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Bounds of every controller of one target.

    `max_transfer_bytes` is MDTS and a power of two of at least 4096. `in_capsule_bytes` is the room for a
    write's payload within the command capsule of an I/O queue, a multiple of 16. A payload in the capsule
    saves the round trip of an R2T; a host may send as many as the queue has entries, and each is received
    straight to its place, so a large value costs no memory here.
    """

    max_transfer_bytes: int = 2 << 20
    in_capsule_bytes: int = 16 << 10
    max_queue_entries: int = 1024
    max_io_queues: int = 64
    max_controllers: int = 1024
    max_unproven: int = 64
    """Admin queues that may be connected without having authenticated yet, where their hosts have to."""
    max_guests: int = 256
    """Connections that are of no NVM subsystem's host yet: no Connect, no proof, or discovery alone."""
    max_guests_of_a_peer: int = 128
    """Of these from one address. An agent that starts connects all its queues at a time."""
    unproven_entries: int = 8
    """Commands in flight on a queue that has yet to authenticate: it says one thing after the other."""
    async_event_limit: int = 4
    abort_limit: int = 8
    keep_alive_granularity_s: float = 1.0
    discovery_idle_s: float = 120.0
    """A discovery controller without a keep-alive timer goes after this long in silence, as in Linux."""
    pads_authentication: bool = False
    """Answer Authentication Receive with as many bytes as the host allocates, zeros behind the message, as
    Linux's target does. The specification wants the message alone, as SPDK's target sends it."""

    def __post_init__(self) -> None:
        transfer = self.max_transfer_bytes
        if transfer < MIN_PAGE_BYTES or transfer & (transfer - 1):
            raise ValueError(f"max_transfer_bytes is a power of two of at least {MIN_PAGE_BYTES}")
        if self.in_capsule_bytes % 16 or not 0 <= self.in_capsule_bytes <= 64 << 20:
            raise ValueError("in_capsule_bytes is a multiple of 16, at most 64 MiB")
        if not 32 <= self.max_queue_entries <= 4096:
            raise ValueError("max_queue_entries is between 32 and 4096")
        if not 1 <= self.max_io_queues <= 1024:
            raise ValueError("max_io_queues is between 1 and 1024")

    @property
    def mdts(self) -> int:
        """MDTS: the power of two of pages."""
        return (self.max_transfer_bytes // MIN_PAGE_BYTES).bit_length() - 1

    @property
    def ioccsz(self) -> int:
        """IOCCSZ: the size of a command capsule in units of 16 bytes."""
        return (SQE.size + self.in_capsule_bytes) // 16
