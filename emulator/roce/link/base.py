"""The interface of a link: a port that takes and gives bursts, without waiting.

A *burst* is one buffer of datagrams, all of `segment_size` bytes but the last, which may be shorter; one
datagram is a burst too. With segmentation offload a burst is one system call, and often one packet all the
way to the receiver. `Link.send` also takes several bursts in one buffer (a volley) where segments are not
numbered: the link parts it.

The IPv4 identification is part of the ICRC, so the packet writer must know it before the kernel writes it:
`Link.numbers_segments` says which of two conventions holds towards an address (`udp.py` argues why).
"""

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from emulator.roce.nic.verbs import Address, Burst

MAX_DATAGRAM: Final = 65507
"""Bytes of one UDP payload over IPv4, and so of one burst: 65535 less the IP and UDP headers."""


class Received(NamedTuple):
    """One burst that has arrived. `data` is the link's own buffer: valid until the next `receive` or
    `pending`."""

    data: memoryview
    segment_size: int
    source: Address
    group: str = ""
    """The multicast group that it was sent to; empty where that was the link's own address."""
    marked: bool = False
    """A switch has marked all of it (ECN, congestion experienced). Only a link that was told to looks."""


@dataclass(slots=True)
class LinkCounters:
    """Counters of a link; every drop of its own has a cause here."""

    bursts_sent: int = 0
    bytes_sent: int = 0
    bursts_received: int = 0
    bytes_received: int = 0
    waited: int = 0
    """Bursts that the socket did not take at once (EAGAIN)."""
    backlog_full: int = 0
    """Bursts dropped because too many waited already."""
    unreachable: int = 0
    """The network or the peer's port is not there (ENETUNREACH, ICMP port unreachable, ...)."""
    offload_refused: int = 0
    """Bursts dropped because their destination takes no segmentation offload; from then on it gets none."""
    refused: int = 0
    """Bursts that the system refused for any other reason, as being larger than the path's MTU."""
    truncated: int = 0
    """Received datagrams larger than any that exists."""
    wrong_icrc: int = 0
    """Datagrams whose ICRC was wrong in the full check of the raw socket."""
    not_checkable: int = 0
    """Datagrams that the raw socket shows as one packet, without saying how to part them."""


class Link(Protocol):
    """A port on a network. Never blocks; used by one thread at a time."""

    @property
    def counters(self) -> LinkCounters:
        """Its counters."""

    @property
    def address(self) -> Address:
        """Where it can be reached."""

    @property
    def backlog(self) -> int:
        """Bursts that wait to be sent; while there are any, the owner waits for writability too."""

    @property
    def receive_buffer_bytes(self) -> int:
        """Bytes that the system keeps for us while we do not receive; more are lost."""

    def numbers_segments(self, ip: str) -> bool:
        """True: segment i of a burst to `ip` carries IP identification i; False: all of them carry 0."""

    def pending(self) -> Received | None:
        """The next burst that `receive` has already taken from the network, if any. poll() does not report
        these any more, so a receiver that stops asks for all of them."""

    def receive(self) -> Received | None:
        """The next burst, or None if there is none now. It may be several consecutive bursts of one segment
        size. OSError where nothing will ever come again."""

    def send(self, burst: Burst) -> None:
        """Send it, or keep a copy until the socket takes it, or count the cause of its loss. Never raises."""

    def flush(self) -> None:
        """Send bursts that wait, as far as the socket takes them."""

    def fileno(self) -> int:
        """For select and poll; -1 once closed."""

    def groups_fileno(self) -> int:
        """For poll: readable while anything for a multicast group waits; -1 where there can be nothing."""

    def join(self, group: str) -> None:
        """Receive datagrams of a multicast group, too. OSError where that is impossible."""

    def leave(self, group: str) -> None:
        """Receive its datagrams no more."""

    def close(self) -> None:
        """Give everything back. Closing twice is fine."""
