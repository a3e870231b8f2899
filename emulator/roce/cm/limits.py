"""Every bound and time of the connection manager in one place, with the reason."""

from dataclasses import dataclass
from typing import Final

from emulator.roce.wire.extended import exponential_seconds

MAX_CONNECTIONS: Final = 4096
"""Connections of one NIC in any state, time-wait included; as many as it has queue pairs."""

MAX_LISTENERS: Final = 1024

MAX_BACKLOG: Final = 1024
"""Requests that one listener lets wait for `accept` or `reject`; more are dropped, and come again."""

MAX_OUTPUT: Final = 4096
"""Messages that wait to be sent; more are dropped, as if the network had lost them."""

MAX_SERVICE_WAIT_S: Final = 16.0
"""The longest wait that an MRA gets. Linux asks for 68 s; to send the message again meanwhile does no
harm."""

MRA_EXPONENT: Final = 22
"""The wait that our MRA asks for: 17 s."""

ACK_DELAY_EXPONENT: Final = 18
"""The local CA ACK delay: 1.07 s. This device is a process, and may get no processor for so long (decision
48). A peer adds it to its ACK time-out, so it does not take a late answer for a lost one."""

MAX_GROUPS: Final = 64
"""Multicast groups that one datagram service joins; as many as the NIC has."""

EPHEMERAL_PORTS: Final = range(32768, 61000)
"""The range of ephemeral ports, as Linux has it."""

REQ_CONSUMER_BYTES: Final = 56
"""Private data of a REQ, less the header of the RDMA IP CM service (annex A11)."""


@dataclass(frozen=True, slots=True)
class CmTimes:
    """Time-outs of one NIC. Linux takes 20 and 15: a minute until a silent peer is given up.

    Ours are shorter: a lost message is likelier than a peer that needs seconds, and such a peer can send an
    MRA.
    """

    response_exponent: int = 17
    """4.096 us * 2^17 = 0.54 s to wait for each answer."""
    tries: int = 15
    """How often a message is sent again; four bits."""
    ack_exponent: int = 16
    """Local ACK time-out that is proposed: 0.27 s. Queue pairs of this device take 0.54 s, their least, and
    give up after 4.3 s (`nic/retry.py`)."""
    disconnect_tries: int = 4
    """DREQ is sent again so often. A peer that is gone should not be waited for."""

    @property
    def time_wait_s(self) -> float:
        """Until nothing of an old connection can still be on its way (IBTA 12.9.8.4)."""
        return 2 * exponential_seconds(self.ack_exponent)
