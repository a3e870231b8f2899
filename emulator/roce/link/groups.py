"""The multicast groups of a UDP port: a socket for each, beside the port's own.

A socket bound to a NIC's address receives no datagram of a group. A socket bound to the group's address and
the same port receives these and nothing else; SO_REUSEADDR lets each NIC of a machine have one. Datagrams to
a group leave by the port's own socket, on the interface of its address (Linux:
`ip_route_output_key_hash_rcu`); the system copies them to each member on this machine too. The loopback
device needs neither a route nor the MULTICAST flag.
"""

import errno
import os
import select
import socket
from typing import Final

from emulator.roce.link.base import MAX_DATAGRAM, Received
from emulator.roce.nic.verbs import Address

IP_MULTICAST_ALL: Final = 49
"""Of linux/in.h; Python's socket module lacks it."""

GROUP_BUFFER_BYTES: Final = 1 << 20
"""Asked for, for each group; others than root get what net.core.rmem_max allows."""


class GroupSockets:
    """The groups that a port at `ip` has joined. IPv4 alone. Bounded by the NIC (`Limits.max_mcast_grp`)."""

    def __init__(self, ip: str, port: int) -> None:
        self._ip = ip
        self._port = port
        self._sockets: dict[str, socket.socket] = {}
        self._group_of: dict[int, str] = {}
        self._buffer = memoryview(bytearray(MAX_DATAGRAM))
        self._poll = select.epoll()
        self._process_id = os.getpid()

    def __len__(self) -> int:
        return len(self._sockets)

    def fileno(self) -> int:
        """Readable while anything waits at any of the sockets: one descriptor for all of them, and the same
        from beginning to end."""
        return self._poll.fileno()

    def join(self, group: str) -> None:
        """Receive datagrams of `group`. OSError: EOPNOTSUPP over IPv6, or the system's."""
        if ":" in self._ip:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        if group in self._sockets:
            return
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, GROUP_BUFFER_BYTES)
            # Else it also gets packets by an interface where only other programs have joined the group.
            sock.setsockopt(socket.IPPROTO_IP, IP_MULTICAST_ALL, 0)
            sock.bind((group, self._port))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, self._membership(group))
            self._poll.register(sock.fileno(), select.EPOLLIN)
        except BaseException:
            sock.close()
            raise
        self._sockets[group] = sock
        self._group_of[sock.fileno()] = group

    def leave(self, group: str) -> None:
        """Leave `group`; datagrams that wait are lost. No effect where it was not joined."""
        sock = self._sockets.pop(group, None)
        if sock is not None:
            del self._group_of[sock.fileno()]
            # A child of a fork has these sockets, too. What it lets go stays its parent's; what the parent
            # lets go ends, though the child still has a descriptor of it.
            if os.getpid() == self._process_id:
                self._poll.unregister(sock.fileno())
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_DROP_MEMBERSHIP, self._membership(group))
            sock.close()

    def _membership(self, group: str) -> bytes:
        """struct ip_mreq: the interface is that of the port's address."""
        return socket.inet_aton(group) + socket.inet_aton(self._ip)

    def receive(self) -> Received | None:
        """The next datagram of any group, in turn; None where there is none. Never waits."""
        for descriptor, _ in self._poll.poll(0, 1):
            group = self._group_of[descriptor]
            try:
                count, source = self._sockets[group].recvfrom_into(self._buffer)
            except OSError:
                return None  # damaged on its way: the system has dropped it when it looked at the checksum
            return Received(self._buffer[:count], max(1, count), Address(source[0], source[1]), group)
        return None

    def close(self) -> None:
        """Leave all groups. Closing twice is fine."""
        for group in list(self._sockets):
            self.leave(group)
        self._poll.close()
