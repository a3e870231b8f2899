"""An enclosure as the agent knows it, and one route to it."""

from dataclasses import dataclass, field
from typing import Final

from nvmeof.host.namespaces import NO_ACCESS_REPORT, Access, NamespaceInfo
from nvmeof.transport.base import ControllerInfo
from nvmeof.wire.ana import AnaState
from nvmeof.wire.kv import KvFormat

AVOID_SECONDS: Final = 0.5
AVOID_MOST_SECONDS: Final = 5.0
"""A session that is dead in truth is noticed by its keep-alive before the longest of these is over."""


@dataclass(slots=True, eq=False)
class Enclosure:
    """One enclosure by one path, as the session there last saw it. Only the supervisor writes; `complain` and
    `avoid` are for workers."""

    name: str
    session: ControllerInfo | None = None
    """Present while the session stands: queues may be connected."""
    epoch: int = 0
    """Grows with every new session; a queue of an older epoch is of no use any more."""
    began: int = 0
    """The number of the session among all (agent/pool/write/flush_tracking.py). Set before `epoch`."""
    namespaces: tuple[NamespaceInfo, ...] = ()
    fault: str = "not connected yet"
    reconnects: int = 0
    authentication_failures: int = 0
    """Tries of the supervisor that ended because one of the two could not prove itself."""
    complaints: int = 0
    """How often workers lost a queue of it; the supervisor resets the controller when it grows."""
    nqn: str = ""
    """Of its subsystem, once it was connected: paths to one subsystem lead to the same namespaces."""
    access: Access = field(default_factory=lambda: NO_ACCESS_REPORT)
    """How this path reaches each ANA group of them."""
    avoided_until: float = 0.0
    """Other paths go first until then, in seconds of the channel's clock."""
    avoided_in_a_row: int = 0
    has_other_paths: bool = False
    """Whether this is one of several paths, whatever has become of the others."""
    sent_elsewhere: int = 0
    """Requests that this path left without an answer and that went on by another."""
    is_local: bool = False
    """Whether it is a device of this machine, without a wire (agent/local)."""
    discovered: bool = False
    """Whether a discovery controller lists it, and the configuration does not."""
    address: str = ""
    """IP address or host name of the path; empty where it has no wire."""
    taken: str = ""
    """Of a local namespace that is reached by its export: who has the device."""

    @property
    def subsystem(self) -> str:
        """What paths to one subsystem have in common."""
        return self.nqn or self.name

    def avoid(self, now: float) -> None:
        """It did not answer a request that has another way."""
        pause = min(AVOID_MOST_SECONDS, AVOID_SECONDS * 2 ** min(self.avoided_in_a_row, 8))
        if now >= self.avoided_until:
            # Of many requests that it left alone at once, the first counts.
            self.avoided_in_a_row += 1
            self.avoided_until = now + pause

    def answered(self, now: float) -> None:
        """It answered a request that has another way."""
        if self.avoided_in_a_row and now >= self.avoided_until:
            self.avoided_in_a_row = 0

    def access_to(self, namespace: NamespaceInfo) -> AnaState:
        """How this path reaches a namespace."""
        return self.access.get(namespace.ana_group, AnaState.OPTIMIZED)

    def complain(self, epoch: int) -> None:
        """A worker's queue died under it, or would not connect. A device of this machine has no controller
        that could be reset."""
        if epoch == self.epoch and not self.is_local:
            self.complaints += 1


@dataclass(frozen=True, slots=True)
class Route:
    """The way to one namespace: which enclosure, which NSID there, which block size."""

    enclosure: Enclosure
    nsid: int
    lba_bytes: int
    kv: KvFormat | None = None
    """Present where it is a namespace of keys and values, which has no blocks."""
    used_bytes: int = 0
    """What a KV namespace took up when the session last looked."""
    access: AnaState = AnaState.OPTIMIZED
