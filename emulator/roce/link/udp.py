"""A plain UDP socket as a RoCEv2 port, with segmentation offload both ways. Read `base.py` first.

Which IPv4 identification a datagram gets matters, because the ICRC covers it and is computed before the
kernel writes the header. An unconnected socket with IP_MTU_DISCOVER = IP_PMTUDISC_DO sends identification 0
with DF set (Linux: `__ip_select_ident` is skipped for such packets of unconnected sockets), so a datagram by
itself is always right. A burst sent with UDP_SEGMENT is one packet of identification 0 until the kernel
(`inet_gso_segment`) or a NIC cuts it and numbers the pieces 0, 1, 2, ... So:

* from a loopback address to another nobody cuts before the receiver's socket, where identifications are out
  of sight: all are 0, as the one packet that a sniffer sees has it too;
* to every other address, segment i of a burst carries identification i. A kernel's rxe sees it so wherever
  the burst is cut. The sender's stack or NIC cuts it, or, where veth passes it on whole, the receiving kernel
  before rxe's tunnel socket. That socket does not announce that it takes GSO packets (`udp_rcv_segment`). An
  emulated peer that gets the burst whole (UDP_GRO) sees no identifications, and solves the ICRC for them.

A destination that refuses the offload (no checksum offload on its interface, a segment larger than its MTU)
loses that one burst, which the transport sends again, and gets single datagrams of identification 0 from then
on. Over IPv6 there is no identification and nothing of this matters.
"""

import errno
import fcntl
import ipaddress
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from emulator.roce.link import messages
from emulator.roce.link.base import MAX_DATAGRAM, LinkCounters, Received
from emulator.roce.link.groups import GroupSockets
from emulator.roce.link.messages import name_of
from emulator.roce.nic.verbs import ROCE_PORT, Address, Burst

UDP_NO_CHECK6_RX: Final = 102
IP_MTU_DISCOVER: Final = 10
IPV6_MTU_DISCOVER: Final = 23
PMTUDISC_DO: Final = 2
IP_RECVERR: Final = 11
IPV6_RECVERR: Final = 25
IP_RECVTOS: Final = 13
IPV6_RECVTCLASS: Final = 66
SO_SNDBUFFORCE: Final = 32
SO_RCVBUFFORCE: Final = 33
"""Of linux/udp.h, linux/in.h, linux/in6.h and asm-generic/socket.h; Python's socket module lacks them."""

SOCKET_BUFFER_BYTES: Final = 16 << 20
"""Asked for in both directions. Root gets it; other users are bounded by net.core.rmem_max and wmem_max."""

MAX_BACKLOG: Final = 256
"""Bursts kept while the socket takes none, so at most 16 MiB; the transport's windows are far below."""

MAX_SEGMENTS: Final = 64
"""Datagrams of one burst: UDP_MAX_SEGMENTS of older kernels."""

MAX_DESTINATIONS: Final = 4096
"""Destinations remembered as refusing the offload."""

MERGED_BURSTS: Final = 5
"""Bursts that fit into the receive buffer. Rows of one message that come one after the other are given as one
burst of up to so many, which saves the receiver's work for each. Where segments are numbered they stay apart,
for each burst begins with 0 again. More would fall out of the processor's cache."""

VOLLEY_BURSTS: Final = 8
"""Bursts that one call sends at most."""

_SIZE: Final = struct.Struct("=H")
_BUFFER_BYTES: Final = 1 << 16

MAX_VIEWS: Final = 64
"""Parts of the receive buffer of which the view is remembered."""

_Arrival: TypeAlias = tuple[int, int, int, Address, bool]
"""Where in the receive buffer it begins, where it ends, segment size, source, whether it was marked."""


def _most_of(segment_size: int) -> int:
    """Bytes of such datagrams that one call takes."""
    return segment_size * max(1, min(MAX_SEGMENTS, MAX_DATAGRAM // segment_size))


_NOBODY_THERE: Final = {
    errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN,
    errno.EADDRNOTAVAIL, errno.EPERM, errno.EACCES,
}  # fmt: skip
MAX_REPORTS: Final = 64
"""Errors that one call takes from the socket. A peer can cause more reports of datagrams that reached no
port: the rest waits for the next call, and the device's lock is free meanwhile. If all are of another kind
(no socket, a sandbox without recvmmsg), they stay for good, and go to the thread that drives."""

_TOLD_BY_PEERS: Final = {
    errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.EACCES,
    errno.ENOPROTOOPT, errno.EMSGSIZE, errno.EOPNOTSUPP, errno.ENONET, errno.EPROTO,
}  # fmt: skip
"""What ICMP messages become at a socket (Linux: icmp_err_convert, icmpv6_err_convert)."""

_OFFLOAD_REFUSED: Final = {errno.EINVAL, errno.EIO, errno.EMSGSIZE, errno.EOPNOTSUPP, errno.ENOPROTOOPT}


class UdpLink:
    """The UDP port 4791 of one address. `offload` False sends every datagram by itself. See `Link`.

    With `ecn` it sends datagrams that a switch may mark (IP ECN, ECT(0)), and says of received ones whether
    one did. The kernel merges only datagrams whose marks are equal (UDP_GRO).

    Raises OSError where the address cannot be bound (it is not this machine's, another NIC or the kernel's
    rxe has the port).
    """

    def __init__(self, ip: str, port: int = ROCE_PORT, *, offload: bool = True, ecn: bool = False) -> None:
        self.counters = LinkCounters()
        self._ecn = ecn
        self.on_no_offload: Callable[[str], None] | None = None
        """Called when `numbers_segments` has changed for an address: it takes no segmentation offload."""
        self._offload = offload
        self._waiting: deque[tuple[bytes, int, Address]] = deque()
        self._controls: dict[int, list[tuple[int, int, bytes]]] = {}
        self._no_offload: set[str] = set()
        self._inbox = messages.Inbox(MERGED_BURSTS, _BUFFER_BYTES)
        self._outbox = messages.Outbox(VOLLEY_BURSTS)
        self._buffer = self._inbox.memory
        self._views: dict[tuple[int, int], memoryview] = {}
        self._stride = _BUFFER_BYTES
        """Bytes of a whole burst as they come now."""
        self._held: deque[_Arrival] = deque()
        """Bursts that were received and not given."""
        self._last_name = bytearray()
        self._source = Address("", 0)
        self._ipv6 = ":" in ip
        self._socket = socket.socket(socket.AF_INET6 if self._ipv6 else socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._configure(self._socket)
            self._socket.bind((ip, port))
            bound = self._socket.getsockname()
            self._groups = GroupSockets(bound[0], bound[1])
        except BaseException:
            self._socket.close()
            raise
        self._groups_first = False
        self._descriptor = self._socket.fileno()
        self.address = Address(bound[0], bound[1])
        self._numbers = offload and not self._ipv6 and not ipaddress.ip_address(ip).is_loopback

    def _configure(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if self._ipv6:
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, PMTUDISC_DO)
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVERR, 1)
            # rxe sends the UDP checksum 0, which over IPv6 a socket drops unless told not to (RFC 6935).
            sock.setsockopt(messages.SOL_UDP, UDP_NO_CHECK6_RX, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, PMTUDISC_DO)
            sock.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)
        if self._ecn and self._ipv6:
            sock.setsockopt(socket.IPPROTO_IPV6, messages.IPV6_TCLASS, messages.ECN_CAPABLE)
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVTCLASS, 1)
        elif self._ecn:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, messages.ECN_CAPABLE)
            sock.setsockopt(socket.IPPROTO_IP, IP_RECVTOS, 1)
        sock.setsockopt(messages.SOL_UDP, messages.UDP_GRO, 1)
        for forced, plain in ((SO_RCVBUFFORCE, socket.SO_RCVBUF), (SO_SNDBUFFORCE, socket.SO_SNDBUF)):
            try:
                sock.setsockopt(socket.SOL_SOCKET, forced, SOCKET_BUFFER_BYTES)
            except PermissionError:
                sock.setsockopt(socket.SOL_SOCKET, plain, SOCKET_BUFFER_BYTES)

    def __repr__(self) -> str:
        return f"<UdpLink {self.address.ip} port {self.address.port}>"

    @property
    def receive_buffer_bytes(self) -> int:
        """See `Link`; the kernel's own overhead is included."""
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    @property
    def backlog(self) -> int:
        return len(self._waiting)

    def pending(self) -> Received | None:
        return self._next() if self._held else None

    def fileno(self) -> int:
        return self._socket.fileno()

    def numbers_segments(self, ip: str) -> bool:
        """See `Link`, and the top of this file."""
        return self._numbers and ip not in self._no_offload

    def receive(self) -> Received | None:
        """See `Link`. It also counts reports that a datagram of ours reached no port."""
        if not self._groups:
            return self._next() if self._held or self._receive_some() else None
        # Neither the port's own address nor the groups are kept waiting by a flood for the others.
        self._groups_first = not self._groups_first
        if self._groups_first and (received := self._from_group()) is not None:
            return received
        if self._held or self._receive_some():
            return self._next()
        return None if self._groups_first else self._from_group()

    def _from_group(self) -> Received | None:
        received = self._groups.receive()
        if received is not None:
            self.counters.bursts_received += 1
            self.counters.bytes_received += len(received.data)
        return received

    def groups_fileno(self) -> int:
        return self._groups.fileno()

    def join(self, group: str) -> None:
        """See `Link`, and `groups.py`."""
        self._groups.join(group)

    def leave(self, group: str) -> None:
        self._groups.leave(group)

    def _next(self) -> Received:
        """The first burst that is held, together with those that lie right behind it."""
        held = self._held
        start, end, segment_size, source, marked = held.popleft()
        if end - start > segment_size and not self._numbers:
            while held and not (end - start) % segment_size:
                begins, ends, following, whose, also = held[0]
                if begins != end or following != segment_size or whose is not source or also != marked:
                    break
                held.popleft()
                end = ends
        # The same view each time for the same part of the buffer: the NIC remembers what lies where.
        view = self._views.get((start, end))
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            view = self._views[start, end] = self._buffer[start:end]
        return Received(view, segment_size, source, "", marked)

    def _receive_some(self) -> bool:
        """Take bursts from the socket, as far as there is room; whether there were any."""
        counters, inbox, held = self.counters, self._inbox, self._held
        if inbox.stride != self._stride:
            inbox.lay_out(self._stride)
        strange = 0
        for _ in range(MAX_REPORTS):
            arrived = inbox.receive(self._descriptor)
            if not arrived:
                if inbox.error == errno.EAGAIN or inbox.error == errno.EBADF:
                    return False
                if inbox.error != errno.EINTR:
                    self._read_errors(inbox.error)
                    strange += inbox.error not in _TOLD_BY_PEERS
                continue
            for index in range(arrived):
                start, count, segment_size, name, truncated = inbox.burst(index)
                if truncated:
                    counters.truncated += 1
                    continue
                if name != self._last_name:
                    self._last_name = name
                    self._source = Address(*messages.address_in(name))
                counters.bursts_received += 1
                counters.bytes_received += count
                marked = self._ecn and inbox.is_marked(index)
                held.append((start, start + count, segment_size, self._source, marked))
                if count > segment_size:
                    self._stride = _most_of(segment_size)
            if held:
                return True
        if strange < MAX_REPORTS:
            return False
        raise OSError(inbox.error, f"{os.strerror(inbox.error)}, for good, at the socket of {self!r}")

    def _read_errors(self, number: int) -> None:
        if number in _NOBODY_THERE:
            self.counters.unreachable += 1
        else:
            self.counters.refused += 1
        self._empty_error_queue()

    def _empty_error_queue(self) -> None:
        """Else poll reports it for ever."""
        for _ in range(MAX_REPORTS):
            try:
                self._socket.recvmsg(0, 512, socket.MSG_ERRQUEUE)
            except OSError:
                return

    def send(self, burst: Burst) -> None:
        data, segment_size, destination = burst
        size = len(data)
        most, done = size, 0
        if size > MAX_DATAGRAM:
            most = _most_of(segment_size)
            if not self._waiting and self._offload and destination.ip not in self._no_offload:
                done = self._send_volley(data, most, segment_size, destination)
        for start in range(done, size, most):
            part = data[start : start + most] if most < size else data
            if self._waiting:
                self._keep(part, segment_size, destination)
                continue
            sent = self._send_now(part, segment_size, destination)
            if sent < len(part):
                self.counters.waited += 1
                self._keep(part[sent:], segment_size, destination)

    def _send_volley(self, data: memoryview, most: int, segment_size: int, destination: Address) -> int:
        """Several bursts by one call; how many bytes of them the socket took. The caller sends the others one
        by one, and so meets their errors."""
        outbox = self._outbox
        size = min(len(data), VOLLEY_BURSTS * most)
        try:
            name = name_of(destination.ip, destination.port)
            sent = outbox.send(self._descriptor, data, size, most, segment_size, name)
        except (OSError, TypeError):
            return 0  # an address with a zone; memory that is read-only
        if not sent and outbox.error == errno.ECONNREFUSED:
            # As in `_call`.
            self._read_errors(outbox.error)
        taken = min(size, sent * most)
        self.counters.bursts_sent += sent
        self.counters.bytes_sent += taken
        return taken

    def flush(self) -> None:
        while self._waiting:
            data, segment_size, destination = self._waiting[0]
            sent = self._send_now(memoryview(data), segment_size, destination)
            if sent < len(data):
                self._waiting[0] = (data[sent:], segment_size, destination)
                return
            self._waiting.popleft()

    def _keep(self, data: memoryview, segment_size: int, destination: Address) -> None:
        if len(self._waiting) >= MAX_BACKLOG:
            self.counters.backlog_full += 1
        else:
            self._waiting.append((bytes(data), segment_size, destination))

    def _send_now(self, data: memoryview, segment_size: int, destination: Address) -> int:
        """Bytes that need no further thought: sent, or lost and counted."""
        size = len(data)
        if size <= segment_size or (self._offload and destination.ip not in self._no_offload):
            return self._call(data, segment_size, destination)
        sent = 0
        while sent < size:
            part = data[sent : sent + segment_size]
            if not self._call(part, segment_size, destination):
                break
            sent += len(part)
        return sent

    def _call(self, data: memoryview, segment_size: int, destination: Address, again: bool = True) -> int:
        """One datagram, or several with segmentation offload, by one call."""
        many = len(data) > segment_size
        try:
            if many:
                control = self._controls.get(segment_size)
                if control is None:
                    if len(self._controls) >= MAX_SEGMENTS:
                        self._controls.clear()
                    control = [(messages.SOL_UDP, messages.UDP_SEGMENT, _SIZE.pack(segment_size))]
                    self._controls[segment_size] = control
                self._socket.sendmsg([data], control, 0, destination)
            else:
                self._socket.sendto(data, destination)
        except BlockingIOError:
            return 0
        except OSError as error:
            if again and error.errno == errno.ECONNREFUSED:
                # It is about an earlier datagram, and maybe another peer; this one was not sent.
                self._read_errors(error.errno or 0)
                return self._call(data, segment_size, destination, again=False)
            if many and error.errno in _OFFLOAD_REFUSED:
                self._empty_error_queue()
                self.counters.offload_refused += 1
                self._without_offload(destination.ip)
            elif error.errno != errno.EBADF:
                self._read_errors(error.errno or 0)
        else:
            self.counters.bursts_sent += 1
            self.counters.bytes_sent += len(data)
        return len(data)

    def _without_offload(self, ip: str) -> None:
        if len(self._no_offload) >= MAX_DESTINATIONS:
            self._no_offload.clear()
        self._no_offload.add(ip)
        if self.on_no_offload is not None:
            self.on_no_offload(ip)

    def close(self) -> None:
        self._waiting.clear()
        self._held.clear()
        self._descriptor = -1
        self._groups.close()
        self._socket.close()


def interface_mtu(ip: str) -> int | None:
    """The MTU of the network interface that has this IPv4 address; None where it cannot be found.

    All of 127.0.0.0/8 belongs to the loopback interface, whose own address is but one of them.
    """
    if ":" in ip:
        return None
    packed = socket.inet_aton(ip)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("16s24x", os.fsencode(name))
            try:
                found = fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24]
                if found == packed or (found[0] == packed[0] == 127):
                    return int(struct.unpack_from("=i", fcntl.ioctl(sock, _SIOCGIFMTU, request), 16)[0])
            except OSError:
                continue
    return None


_SIOCGIFADDR: Final = 0x8915
_SIOCGIFMTU: Final = 0x8921
