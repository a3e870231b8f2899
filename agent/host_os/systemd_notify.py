"""What a service tells systemd: that it is up, that it ends, that it is alive (sd_notify(3)).

A datagram of lines `NAME=value` goes to the Unix socket that `NOTIFY_SOCKET` names; `@` begins a name of the
abstract name space. Without that variable nothing is sent. A datagram that cannot be sent is logged, and the
service goes on.
"""

import logging
import os
import socket
from collections.abc import Mapping

log = logging.getLogger(__name__)

READY = "READY=1"
STOPPING = "STOPPING=1"
ALIVE = "WATCHDOG=1"


def notify(*lines: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Send the lines as one message; True where a listener has it."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address[0] not in "/@":
        log.warning("NOTIFY_SOCKET is %r, of a kind that is not known here; nothing is sent", address)
        return False
    if address[0] == "@":
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            # A manager that reads no more must not stop the one that it supervises.
            sender.setblocking(False)
            sender.sendto("\n".join(lines).encode(), address)
    except OSError as error:
        log.warning("systemd was not told %s: %s", lines[0], error.strerror)
        return False
    return True


def watchdog_seconds(environment: Mapping[str, str] = os.environ) -> float | None:
    """How often to send `ALIVE`: half the watchdog's time; None without one. A child that inherited the
    variables is not meant: `WATCHDOG_PID` names another process."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    try:
        microseconds = int(environment.get("WATCHDOG_USEC", "0"))
    except ValueError:
        return None
    return microseconds / 2e6 if microseconds > 0 else None
