"""The congestion notification packet of RoCEv2 (IBTA volume 1, annex A17.9.3).

A receiver of packets that a switch marked (IP ECN 11, congestion experienced) sends it to their sender.

    0       opcode 0x81
    1       solicited event, MigReq, pad count, TVer: all 0
    2..3    P_Key of the marked packet
    4       6 BECN (1)                                          all of it masked in the ICRC
    5..7    the queue pair that sent the marked packet
    8..11   0: no acknowledge request, PSN 0
    12..27  reserved: sent as 0, ignored by the receiver
    28..31  ICRC

Big-endian, but for the ICRC. It is no opcode of a transport service, so `opcodes.py` does not list it.
"""

import struct
from typing import Final, NamedTuple

from emulator.roce.wire.bth import BECN, BTH, LOW_24_BITS, VERSION_MASK
from emulator.roce.wire.flow import Buffer, Flow
from emulator.roce.wire.icrc import ICRC_BYTES, icrc_of
from emulator.roce.wire.malformed import Cause, MalformedPacket

CNP_OPCODE: Final = 0x81

_RESERVED: Final = struct.Struct(">16x")
CNP_BYTES: Final = BTH.size + _RESERVED.size + ICRC_BYTES
assert CNP_BYTES == 32


class Cnp(NamedTuple):
    """A congestion notification: which queue pair is to send less, and the P_Key of what was marked."""

    queue_pair: int
    p_key: int

    def encode(self, flow: Flow) -> bytes:
        """The UDP payload on this flow, ICRC included."""
        raw = BTH.pack(CNP_OPCODE, 0, self.p_key, self.queue_pair | BECN, 0) + _RESERVED.pack()
        return raw + icrc_of(raw, flow).to_bytes(ICRC_BYTES, "little")


def is_cnp_untrusted(datagram: Buffer) -> bool:
    """Whether a UDP payload says that it is one."""
    return len(datagram) > 0 and datagram[0] == CNP_OPCODE


def decode_cnp_untrusted(datagram: Buffer) -> Cnp:
    """The notification in a UDP payload. The caller checks the ICRC. MalformedPacket if there is none."""
    if len(datagram) < CNP_BYTES:
        raise MalformedPacket(Cause.SHORT, f"{len(datagram)} bytes of a CNP")
    if len(datagram) > CNP_BYTES:
        raise MalformedPacket(Cause.UNWANTED_PAYLOAD, f"{len(datagram)} bytes of a CNP")
    code, flags, p_key, destination, _ = BTH.unpack_from(datagram)
    if code != CNP_OPCODE:
        raise MalformedPacket(Cause.OPCODE, f"{code:#04x}")
    if flags & VERSION_MASK:
        raise MalformedPacket(Cause.VERSION, f"TVer {flags & VERSION_MASK}")
    if not destination & LOW_24_BITS:
        raise MalformedPacket(Cause.QUEUE_PAIR_0, "CNP")
    return Cnp(destination & LOW_24_BITS, p_key)
