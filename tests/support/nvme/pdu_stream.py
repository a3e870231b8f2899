"""PDUs out of the bytes of a connection, for tests that look at what was sent."""

from __future__ import annotations

from nvmeof.tcp.crc32c import crc32c
from nvmeof.tcp.pdu import Digests, Pdu, PduType, decode_frame_untrusted, decode_pdu_untrusted

COMMON_HEADER_BYTES = 8
TERMINATIONS = (PduType.H2C_TERM_REQ, PduType.C2H_TERM_REQ)


def take_pdu(
    stream: bytearray, digests: Digests, allowed: frozenset[PduType] | None = None
) -> tuple[Pdu, bytes] | None:
    """Take the first PDU and its data off `stream`; None while it is not whole. Checks its data digest.

    `allowed` are the types that this side may send; None allows all.
    """
    if len(stream) < COMMON_HEADER_BYTES:
        return None
    frame = decode_frame_untrusted(stream, 0, digests, allowed)
    if len(stream) < frame.total:
        return None
    raw = bytes(stream[: frame.total])
    del stream[: frame.total]
    pdu = decode_pdu_untrusted(frame, raw if frame.kind in TERMINATIONS else raw[: frame.header_bytes])
    data = raw[frame.data_offset : frame.data_offset + frame.data_length]
    if data and digests.data:
        assert int.from_bytes(raw[-4:], "little") == crc32c(data)
    return pdu, data
