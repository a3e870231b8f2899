"""What both ends of an NVMe/TCP connection ask of their socket."""

import contextlib
import ipaddress
import socket
from typing import Final

UNPACED: Final = b"reno"
"""A congestion control that sends what the window allows, in every kernel and allowed to everybody."""


def set_options(sock: socket.socket) -> None:
    """No waiting for more to send (TCP_NODELAY), and on a connection within one machine no pacing.

    BBR, which some distributions have as the default, spreads segments in time by a timer for each. On the
    way through the loopback device there is no queue to spare, and the timers cost a tenth of the sender's
    processor time. Not cubic: where a round trip gets longer its HyStart stays with the window it has, and
    there that only says that the receiver had no processor for a moment
    (docs/decisions/0040-payload-by-reference.md). Across a network the administrator's choice stands.
    Raises OSError for a dead socket.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if _is_within_machine(sock):
        with contextlib.suppress(OSError):  # not allowed to this user, or not in this kernel
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)


def _is_within_machine(sock: socket.socket) -> bool:
    here, there = sock.getsockname()[0], sock.getpeername()[0]
    return bool(here == there or ipaddress.ip_address(there.partition("%")[0]).is_loopback)
