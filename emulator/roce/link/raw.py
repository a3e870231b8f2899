"""A RoCEv2 port that checks the ICRC in full; it needs raw sockets (CAP_NET_RAW).

A UDP socket does not show the identification of the IP header, which the ICRC covers; solving for it leaves
16 bits of strength. A raw socket shows the whole header, so all 32 bits are checked. It gets copies. The UDP
socket stays open to send, and to keep the kernel from ICMP port-unreachable answers; its own small receive
buffer overflows.

Meant for peers that send each datagram by itself, as a kernel's rxe does. Segmentation offload of an emulated
peer may show up here as one packet without the places of its parts; such packets are counted and dropped.
IPv4 alone: IPv6 has no identification and needs nothing of this.
"""

import errno
import os
import socket
import struct
from typing import Final

from emulator.roce.link.base import Received
from emulator.roce.link.messages import CONGESTION_EXPERIENCED, ECN_BITS
from emulator.roce.link.udp import SO_RCVBUFFORCE, SOCKET_BUFFER_BYTES, UdpLink
from emulator.roce.nic.verbs import ROCE_PORT, Address
from emulator.roce.wire.bth import BTH
from emulator.roce.wire.flow import DONT_FRAGMENT, flow_of
from emulator.roce.wire.icrc import ICRC_BYTES, icrc_of

HEADERS: Final = struct.Struct(">BxHHH4x4s4sHHH2x")
"""Version and length, total length, identification, flags; source, destination; UDP ports and length."""
assert HEADERS.size == 28

MAX_PACKET_BYTES: Final = 4096 + 256
"""No single RoCEv2 packet is longer: 4096 bytes of payload and all headers there are."""

_SMALL_BUFFER: Final = 4096


class RawCheckedLink(UdpLink):
    """`UdpLink` that receives by a raw socket. Raises PermissionError where it may not, ValueError (IPv6)."""

    def __init__(self, ip: str, port: int = ROCE_PORT, *, ecn: bool = False) -> None:
        if ":" in ip:
            raise ValueError("IPv6 has no identification: UdpLink checks its ICRC in full")
        raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP)
        try:
            raw.setblocking(False)
            raw.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, SOCKET_BUFFER_BYTES)
            raw.bind((ip, 0))
            super().__init__(ip, port, ecn=ecn)
        except BaseException:
            raw.close()
            raise
        self._raw = raw
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)

    @property
    def receive_buffer_bytes(self) -> int:
        return self._raw.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    def fileno(self) -> int:
        return self._raw.fileno()

    def receive(self) -> Received | None:
        """See `Link`: the next datagram whose ICRC is right."""
        counters = self.counters
        while True:
            try:
                count = self._raw.recv_into(self._buffer)
            except OSError:
                return None  # there is none, or the link is closed
            received = self._checked(self._buffer[:count])
            if received is not None:
                counters.bursts_received += 1
                counters.bytes_received += len(received.data)
                return received

    def _checked(self, packet: memoryview) -> Received | None:
        """The payload of a single, intact IP packet for this port; None for any other."""
        if len(packet) < HEADERS.size:
            return None
        version, _, identification, flags, source, _, source_port, port, udp_bytes = HEADERS.unpack_from(
            packet
        )
        if version != 0x45 or port != self.address.port:
            return None  # for another socket; or with options, of which RoCE knows nothing
        if len(packet) > MAX_PACKET_BYTES:
            self.counters.not_checkable += 1
            return None
        payload = packet[HEADERS.size :]
        if udp_bytes != len(packet) - 20 or len(payload) < BTH.size + ICRC_BYTES:
            self.counters.wrong_icrc += 1
            return None
        peer = Address(socket.inet_ntoa(source), source_port)
        flow = flow_of(peer.ip, self.address.ip, source_port)
        right = icrc_of(payload[:-ICRC_BYTES], flow, identification)
        if flags != DONT_FRAGMENT or right != int.from_bytes(payload[-ICRC_BYTES:], "little"):
            self.counters.wrong_icrc += 1
            return None
        marked = self._ecn and packet[1] & ECN_BITS == CONGESTION_EXPERIENCED
        return Received(payload, len(payload), peer, "", marked)

    def groups_fileno(self) -> int:
        """See `Link`: there are no groups."""
        return -1

    def join(self, group: str) -> None:
        """The raw socket gets what is for its own address: no group can be joined (EOPNOTSUPP)."""
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def close(self) -> None:
        self._raw.close()
        super().close()
