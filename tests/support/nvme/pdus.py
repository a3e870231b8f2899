"""PDUs as either end sends them: those of `nvmeof.tcp.pdu`, and command capsules, which hosts pack."""

from __future__ import annotations

from collections.abc import Sequence

from nvmeof.tcp import pdu as wire
from nvmeof.tcp.crc32c import Buffer, crc32c
from nvmeof.tcp.pdu import NO_DIGESTS, CapsuleCmd, Digests, Pdu, PduType
from tests.support.nvme.entries import encode_entry


def encode_header(pdu: Pdu, digests: Digests = NO_DIGESTS, alignment: int = 4) -> bytes:
    """Everything that precedes the data."""
    if not isinstance(pdu, CapsuleCmd):
        return wire.encode_header(pdu, digests, alignment)
    entry = encode_entry(pdu.sqe)
    return wire._head(PduType.CAPSULE_CMD, 0, entry, pdu.data_length, digests, alignment)


def encode_pdu(
    pdu: Pdu, digests: Digests = NO_DIGESTS, alignment: int = 4, data: Sequence[Buffer] = ()
) -> list[Buffer]:
    """A PDU ready to be sent."""
    if not isinstance(pdu, CapsuleCmd):
        return wire.encode_pdu(pdu, digests, alignment, data)
    parts: list[Buffer] = [encode_header(pdu, digests, alignment), *data]
    if data and digests.data:
        parts.append(wire.DIGEST.pack(crc32c(b"".join(data))))
    return parts
