"""The PDUs of NVMe/TCP (NVMe/TCP Transport 1.0, 3.6), one record each, encoded and decoded for both roles.

Every PDU begins with eight bytes:

    0      type        `PduType`
    1      flags       bit 0 HDGSTF, 1 DDGSTF, 2 LAST_PDU, 3 SUCCESS
    2      HLEN        bytes of header, this one included, digest not
    3      PDO         where the data begin, counted from the PDU's first byte; 0 without data
    4..7   PLEN        bytes of the whole PDU, digests included

then, little-endian throughout:

    ICReq        8 PFV u16, 10 HPDA u8, 11 DGST u8, 12 MAXR2T u32 (0's based)           HLEN = PLEN = 128
    ICResp       8 PFV u16, 10 CPDA u8, 11 DGST u8, 12 MAXH2CDATA u32                   HLEN = PLEN = 128
    H2CTermReq, C2HTermReq   8 FES u16, 10 FEI u32, 24.. the header that was wrong      HLEN 24, PLEN 24..152
    CapsuleCmd   8 SQE                                                                  HLEN 72
    CapsuleResp  8 CQE                                                                  HLEN 24
    H2CData      8 CCCID u16, 10 TTAG u16, 12 DATAO u32, 16 DATAL u32                   HLEN 24
    C2HData      8 CCCID u16, 12 DATAO u32, 16 DATAL u32                                HLEN 24
    R2T          8 CCCID u16, 10 TTAG u16, 12 R2TO u32, 16 R2TL u32                     HLEN 24

The header digest follows HLEN at once, the data digest ends the PDU; between header (digest) and data there
may be padding up to the alignment that the receiver asked for (HPDA, CPDA).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

from nvmeof.errors import FatalErrorStatus, MalformedPdu, RemoteProtocolError
from nvmeof.limits import MAX_HEADER_DATA_OFFSET, MAX_PDU_DATA, MAX_TERMINATION_BYTES
from nvmeof.tcp.crc32c import Buffer, crc32c
from nvmeof.wire.cqe import CQE, Cqe, decode_cqe_untrusted
from nvmeof.wire.sqe import SQE, Sqe, decode_sqe_untrusted

COMMON: Final = struct.Struct("<BBBBI")
INITIALIZE: Final = struct.Struct("<HBBI112x")
TERMINATE: Final = struct.Struct("<HI10x")
DATA: Final = struct.Struct("<HHII4x")
_WHOLE_DATA: Final = struct.Struct("<BBBBIHHII4x")
_WHOLE_COMMAND: Final = struct.Struct("<BBBBI64s")
_WHOLE_COMPLETION: Final = struct.Struct("<BBBBI16s")
DIGEST: Final = struct.Struct("<I")
assert _WHOLE_DATA.size == COMMON.size + DATA.size
assert COMMON.size == 8
assert COMMON.size + INITIALIZE.size == 128
assert COMMON.size + TERMINATE.size == COMMON.size + DATA.size == COMMON.size + CQE.size == 24
assert COMMON.size + SQE.size == 72

SMALLEST_PDU: Final = 24
COMMAND_PDU: Final = 72
"""Of a CapsuleCmd, without its data."""

ADMIN_IN_CAPSULE_BYTES: Final = 8192
"""Data in a capsule of the admin queue. NVMe/TCP fixes it, whatever IOCCSZ says."""

FLAG_HEADER_DIGEST: Final = 0x01
FLAG_DATA_DIGEST: Final = 0x02
FLAG_LAST: Final = 0x04
FLAG_SUCCESS: Final = 0x08
_ANY_DIGEST: Final = FLAG_HEADER_DIGEST | FLAG_DATA_DIGEST


class PduType(IntEnum):
    IC_REQ = 0x00
    IC_RESP = 0x01
    H2C_TERM_REQ = 0x02
    C2H_TERM_REQ = 0x03
    CAPSULE_CMD = 0x04
    CAPSULE_RESP = 0x05
    H2C_DATA = 0x06
    C2H_DATA = 0x07
    R2T = 0x09


FROM_HOST: Final = frozenset({PduType.IC_REQ, PduType.H2C_TERM_REQ, PduType.CAPSULE_CMD, PduType.H2C_DATA})
FROM_CONTROLLER: Final = frozenset(
    {PduType.IC_RESP, PduType.C2H_TERM_REQ, PduType.CAPSULE_RESP, PduType.C2H_DATA, PduType.R2T}
)

HEADER_BYTES: Final = {
    PduType.IC_REQ: 128,
    PduType.IC_RESP: 128,
    PduType.H2C_TERM_REQ: 24,
    PduType.C2H_TERM_REQ: 24,
    PduType.CAPSULE_CMD: 72,
    PduType.CAPSULE_RESP: 24,
    PduType.H2C_DATA: 24,
    PduType.C2H_DATA: 24,
    PduType.R2T: 24,
}
_HEADER_BYTES: Final = [HEADER_BYTES.get(kind, 0) for kind in range(256)]  # type: ignore[call-overload]
NEVER_DIGESTED: Final = [kind <= PduType.C2H_TERM_REQ for kind in range(256)]
"""By type: the first words and the last ones of a connection."""
_WITH_DATA: Final = [kind in (PduType.CAPSULE_CMD, PduType.H2C_DATA, PduType.C2H_DATA) for kind in range(256)]
# Types that come with every command: a member of an enumeration is looked up by its name each time.
CAPSULE_CMD: Final[int] = PduType.CAPSULE_CMD.value
_CAPSULE_RESP: Final[int] = PduType.CAPSULE_RESP.value
_H2C_DATA: Final[int] = PduType.H2C_DATA.value
_C2H_DATA: Final[int] = PduType.C2H_DATA.value
_R2T: Final[int] = PduType.R2T.value


class Digests(NamedTuple):
    """Which digests a connection has, in both directions."""

    header: bool = False
    data: bool = False


NO_DIGESTS: Final = Digests()


@dataclass(frozen=True, slots=True)
class ICReq:
    """The host's first words. `data_alignment` is HPDA and `max_r2t` is MAXR2T, both 0's based as sent:
    data for the host begin at a multiple of (HPDA + 1) * 4 bytes; MAXR2T + 1 R2Ts a command."""

    header_digest: bool = False
    data_digest: bool = False
    max_r2t: int = 0
    data_alignment: int = 0
    version: int = 0


@dataclass(frozen=True, slots=True)
class ICResp:
    """The controller's answer. `max_h2c_data` bounds the data of one H2CData PDU, in bytes."""

    header_digest: bool = False
    data_digest: bool = False
    max_h2c_data: int = 0
    data_alignment: int = 0
    version: int = 0


@dataclass(frozen=True, slots=True)
class TermReq:
    """The connection is over, and why. `header` is the beginning of the PDU that was wrong."""

    from_host: bool
    fatal_error_status: int
    information: int = 0
    header: bytes = b""


# Of those of which every command has one, `__init__` is written out, here and below: what `dataclass` and
# `NamedTuple` write themselves is interpreted.
@dataclass(init=False, slots=True)
class CapsuleCmd:
    """A command, with `data_length` bytes of its data in the capsule."""

    sqe: Sqe
    data_length: int

    def __init__(self, sqe: Sqe, data_length: int = 0) -> None:
        self.sqe = sqe
        self.data_length = data_length


@dataclass(init=False, slots=True)
class CapsuleResp:
    """A completion."""

    cqe: Cqe

    def __init__(self, cqe: Cqe) -> None:
        self.cqe = cqe


class H2CData(NamedTuple):
    """Data of the host for command `cid`, from `offset` on: an answer to R2T `ttag`."""

    cid: int
    ttag: int
    offset: int
    data_length: int
    last: bool = True


@dataclass(init=False, slots=True)
class C2HData:
    """`data_length` bytes for the host, `offset` into command `cid`. `success` replaces the completion."""

    cid: int
    offset: int
    data_length: int
    last: bool
    success: bool

    def __init__(
        self, cid: int, offset: int, data_length: int, last: bool = True, success: bool = False
    ) -> None:
        self.cid = cid
        self.offset = offset
        self.data_length = data_length
        self.last = last
        self.success = success


class R2T(NamedTuple):
    """The controller is ready for `length` bytes of command `cid` from `offset` on."""

    cid: int
    ttag: int
    offset: int
    length: int


EncodedPdu: TypeAlias = ICReq | ICResp | TermReq | CapsuleResp | H2CData | C2HData | R2T
"""All but a command's capsule, which a host packs in one go (`host/tcp_queue.py`)."""
Pdu: TypeAlias = EncodedPdu | CapsuleCmd
DataPdu: TypeAlias = CapsuleCmd | H2CData | C2HData


def alignment_bytes(data_alignment: int) -> int:
    return (data_alignment + 1) * 4


def _head(kind: PduType, flags: int, body: bytes, data: int, digests: Digests, alignment: int) -> bytes:
    hlen = COMMON.size + len(body)
    start = hlen + (4 if digests.header else 0)
    offset = 0
    end = start
    if digests.header:
        flags |= FLAG_HEADER_DIGEST
    if data:
        end = offset = -(-start // alignment) * alignment
        if digests.data:
            flags |= FLAG_DATA_DIGEST
    plen = end + data + (4 if data and digests.data else 0)
    raw = COMMON.pack(kind, flags, hlen, offset, plen) + body
    if digests.header:
        raw += DIGEST.pack(crc32c(raw))
    return raw.ljust(end, b"\0")


def encode_header(pdu: EncodedPdu, digests: Digests = NO_DIGESTS, alignment: int = 4) -> bytes:
    """Everything that precedes the data of a PDU, header digest and padding included.

    `alignment` is the receiver's, in bytes. The data themselves and their digest are the sender's to add
    (`encode_pdu`), so that they are never copied.
    """
    match pdu:
        case CapsuleResp(cqe):
            return _head(PduType.CAPSULE_RESP, 0, cqe.encode(), 0, digests, alignment)
        case C2HData(cid, offset, length, last, success):
            flags = (FLAG_LAST if last else 0) | (FLAG_SUCCESS if success else 0)
            body = DATA.pack(cid, 0, offset, length)
            return _head(PduType.C2H_DATA, flags, body, length, digests, alignment)
        case H2CData(cid, ttag, offset, length, last):
            body = DATA.pack(cid, ttag, offset, length)
            return _head(PduType.H2C_DATA, FLAG_LAST if last else 0, body, length, digests, alignment)
        case R2T(cid, ttag, offset, length):
            return _head(PduType.R2T, 0, DATA.pack(cid, ttag, offset, length), 0, digests, alignment)
        case ICReq():
            word = pdu.header_digest | pdu.data_digest << 1
            body = INITIALIZE.pack(pdu.version, pdu.data_alignment, word, pdu.max_r2t)
            return _head(PduType.IC_REQ, 0, body, 0, NO_DIGESTS, 4)
        case ICResp():
            word = pdu.header_digest | pdu.data_digest << 1
            body = INITIALIZE.pack(pdu.version, pdu.data_alignment, word, pdu.max_h2c_data)
            return _head(PduType.IC_RESP, 0, body, 0, NO_DIGESTS, 4)
        case TermReq():
            kind = PduType.H2C_TERM_REQ if pdu.from_host else PduType.C2H_TERM_REQ
            wrong = pdu.header[: MAX_TERMINATION_BYTES - SMALLEST_PDU]
            head = COMMON.pack(kind, 0, SMALLEST_PDU, 0, SMALLEST_PDU + len(wrong))
            return head + TERMINATE.pack(pdu.fatal_error_status, pdu.information) + wrong


def encode_pdu(
    pdu: EncodedPdu, digests: Digests = NO_DIGESTS, alignment: int = 4, data: Sequence[Buffer] = ()
) -> list[Buffer]:
    """A whole PDU as buffers for scatter/gather. `data` together have the length that the PDU states."""
    parts: list[Buffer] = [encode_header(pdu, digests, alignment), *data]
    if data and digests.data:
        digest = 0
        for part in data:
            digest = crc32c(part, digest)
        parts.append(DIGEST.pack(digest))
    return parts


PLAIN_COMPLETION: Final = COMMON.pack(_CAPSULE_RESP, 0, SMALLEST_PDU, 0, SMALLEST_PDU)
"""What precedes the entry of a CapsuleResp without a digest."""


def plain_answer(cid: int, length: int, *, success: bool) -> bytes:
    """The header of the only C2HData of a command, without digests, for a receiver that wants its data at
    once behind it: what `encode_header` makes of that."""
    flags = FLAG_LAST | FLAG_SUCCESS if success else FLAG_LAST
    start = SMALLEST_PDU
    return _WHOLE_DATA.pack(_C2H_DATA, flags, start, start, start + length, cid, 0, 0, length)


def plain_answer_untrusted(raw: Buffer, position: int) -> C2HData | None:
    """The C2HData at `position` if it is one without digests, with its data at once behind its header. None:
    it is something else, or wrong. As `decode_frame_untrusted` and `decode_pdu_untrusted`, by one look."""
    kind: int
    flags: int
    hlen: int
    start: int
    total: int
    cid: int
    offset: int
    length: int
    kind, flags, hlen, start, total, cid, _, offset, length = _WHOLE_DATA.unpack_from(raw, position)
    is_plain = kind == _C2H_DATA and hlen == start == SMALLEST_PDU and not flags & _ANY_DIGEST
    if not is_plain or total != SMALLEST_PDU + length or not 0 < length <= MAX_PDU_DATA:
        return None
    return C2HData(cid, offset, length, flags & FLAG_LAST != 0, flags & FLAG_SUCCESS != 0)


def plain_completion_untrusted(raw: Buffer, position: int) -> CapsuleResp | None:
    """Likewise the CapsuleResp at `position` if it is one without a digest."""
    kind: int
    flags: int
    hlen: int
    total: int
    entry: bytes
    kind, flags, hlen, _, total, entry = _WHOLE_COMPLETION.unpack_from(raw, position)
    is_plain = kind == _CAPSULE_RESP and hlen == total == SMALLEST_PDU and not flags & FLAG_HEADER_DIGEST
    return CapsuleResp(decode_cqe_untrusted(entry)) if is_plain else None


def plain_command_untrusted(raw: Buffer, position: int) -> CapsuleCmd | None:
    """Likewise the CapsuleCmd at `position` if it is one without digests, with its data, if any, at once
    behind its header."""
    kind: int
    flags: int
    hlen: int
    start: int
    total: int
    entry: bytes
    kind, flags, hlen, start, total, entry = _WHOLE_COMMAND.unpack_from(raw, position)
    length = total - COMMAND_PDU
    if kind != CAPSULE_CMD or hlen != COMMAND_PDU or flags & _ANY_DIGEST or not 0 <= length <= MAX_PDU_DATA:
        return None
    if length and start != COMMAND_PDU:
        return None
    return CapsuleCmd(decode_sqe_untrusted(entry), length)


@dataclass(init=False, slots=True)
class Frame:
    """The eight common bytes of a PDU, checked: what is where."""

    kind: int
    flags: int
    header_bytes: int
    """HLEN."""
    data_offset: int
    """Bytes before the data; without data, bytes of the whole PDU."""
    data_length: int
    total: int
    """PLEN."""

    def __init__(
        self, kind: int, flags: int, header_bytes: int, data_offset: int, data_length: int, total: int
    ) -> None:
        self.kind = kind
        self.flags = flags
        self.header_bytes = header_bytes
        self.data_offset = data_offset
        self.data_length = data_length
        self.total = total


def decode_frame_untrusted(
    raw: Buffer, position: int = 0, digests: Digests = NO_DIGESTS, allowed: frozenset[PduType] | None = None
) -> Frame:
    """The common header at `position`, checked against itself and against the connection's digests.

    `allowed` are the types that the peer's role may send; one of the others is a sequence error, one that
    does not exist an invalid field.
    """
    kind, flags, hlen, offset, plen = COMMON.unpack_from(raw, position)
    expected = _HEADER_BYTES[kind]
    if not expected:
        raise MalformedPdu(f"there is no PDU type {kind:#04x}", information=0)
    if allowed is not None and kind not in allowed:
        raise MalformedPdu(
            f"{PduType(kind).name} is not for the peer to send",
            fatal_error_status=FatalErrorStatus.SEQUENCE_ERROR,
        )
    if hlen != expected:
        raise MalformedPdu(f"HLEN of {PduType(kind).name} is {hlen}, not {expected}", information=2)
    if NEVER_DIGESTED[kind]:
        if flags & (FLAG_HEADER_DIGEST | FLAG_DATA_DIGEST):
            raise MalformedPdu(f"{PduType(kind).name} has no digests", information=1)
        if kind <= PduType.IC_RESP:
            if plen != expected:
                raise MalformedPdu(f"PLEN of {PduType(kind).name} is {plen}", information=4)
        elif not SMALLEST_PDU <= plen <= MAX_TERMINATION_BYTES:
            raise MalformedPdu(f"PLEN of {PduType(kind).name} is {plen}", information=4)
        return Frame(kind, flags, hlen, plen, 0, plen)
    start = hlen
    if digests.header:
        start = hlen + 4
    if (flags & FLAG_HEADER_DIGEST != 0) != digests.header:
        raise MalformedPdu("the header-digest flag differs from what was agreed", information=1)
    if not _WITH_DATA[kind] or plen == start:
        if plen != start or kind in (_H2C_DATA, _C2H_DATA):
            raise MalformedPdu(f"PLEN of {PduType(kind).name} is {plen}", information=4)
        return Frame(kind, flags, hlen, start, 0, plen)
    if (flags & FLAG_DATA_DIGEST != 0) != digests.data:
        raise MalformedPdu("the data-digest flag differs from what was agreed", information=1)
    if not start <= offset <= MAX_HEADER_DATA_OFFSET or offset & 3:
        raise MalformedPdu(f"data cannot begin at {offset}", information=3)
    length = plen - offset - (4 if digests.data else 0)
    if not 0 < length <= MAX_PDU_DATA:
        raise MalformedPdu(f"PLEN of {PduType(kind).name} is {plen} with data at {offset}", information=4)
    return Frame(kind, flags, hlen, offset, length, plen)


def decode_pdu_untrusted(frame: Frame, raw: Buffer) -> Pdu:
    """The record of a PDU from its header.

    `raw` has exactly `frame.header_bytes` bytes; of a termination request, all of `frame.total`.
    The header digest is not part of it and has been checked by the caller (`receiver.py`).
    """
    kind, flags, length = frame.kind, frame.flags, frame.data_length
    if kind == _C2H_DATA:
        cid, _, offset, stated = DATA.unpack_from(raw, 8)
        if stated != length:
            raise MalformedPdu(f"DATAL is {stated}, but the PDU carries {length} bytes", information=16)
        return C2HData(cid, offset, length, flags & FLAG_LAST != 0, flags & FLAG_SUCCESS != 0)
    if kind == _CAPSULE_RESP:
        return CapsuleResp(decode_cqe_untrusted(raw[8:24]))
    if kind == CAPSULE_CMD:
        return CapsuleCmd(decode_sqe_untrusted(raw[8:72]), length)
    if kind == _H2C_DATA:
        cid, ttag, offset, stated = DATA.unpack_from(raw, 8)
        if stated != length:
            raise MalformedPdu(f"DATAL is {stated}, but the PDU carries {length} bytes", information=16)
        return H2CData(cid, ttag, offset, length, flags & FLAG_LAST != 0)
    if kind == _R2T:
        cid, ttag, offset, wanted = DATA.unpack_from(raw, 8)
        return R2T(cid, ttag, offset, wanted)
    if kind in (PduType.IC_REQ, PduType.IC_RESP):
        version, alignment, word, value = INITIALIZE.unpack_from(raw, 8)
        if alignment > 31:
            raise MalformedPdu(f"a data alignment of {alignment}", information=10)
        if word & ~3:
            raise MalformedPdu(
                f"unknown digests {word:#04x}",
                fatal_error_status=FatalErrorStatus.UNSUPPORTED_PARAMETER,
                information=11,
            )
        known = ICReq if kind == PduType.IC_REQ else ICResp
        return known(word & 1 != 0, word & 2 != 0, value, alignment, version)
    status, information = TERMINATE.unpack_from(raw, 8)
    return TermReq(kind == PduType.H2C_TERM_REQ, status, information, bytes(raw[SMALLEST_PDU:]))


def termination_for(error: RemoteProtocolError, *, from_host: bool, header: bytes = b"") -> bytes | None:
    """The termination request that answers a peer's error; None when it deserves none.

    `header` is as much as is known of the PDU that was wrong.
    """
    if error.fatal_error_status is None:
        return None
    return encode_header(TermReq(from_host, error.fatal_error_status, error.information, header))
