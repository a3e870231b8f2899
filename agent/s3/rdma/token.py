"""The headers by which a client asks for RDMA, as bytes and fields; no I/O.

Two forms of `x-amz-rdma-token` are known here. **A queue pair**, when a client connects: 44 bytes in hex,
as AMD's hipObject writes it: transport, number, GID, key, address, length, port, LID, least significant
byte first. **Memory**, in a request for an object: `rc:CONNECTION:ADDRESS:LENGTH:KEY`, all in hex, as
elbencho's RC client writes it. The form of cuObject (`ADDRESS:LENGTH:KEY:LID:NUMBER:...`) is for
Dynamically Connected queue pairs, which only one vendor's devices have. That form and every unknown one are
declined with 501, which clients take as the sign to use plain HTTP.
"""

import re
import struct
from dataclasses import dataclass
from typing import Final

from agent.s3.errors import S3Error
from nvmeof.transport.rdma_direct import PSN_LIMIT, QPN_LIMIT, PairEnd

TOKEN: Final = "x-amz-rdma-token"
PSN: Final = "x-amz-rdma-psn"
SESSION: Final = "x-amz-rdma-session"
REPLY: Final = "x-amz-rdma-reply"
BYTES: Final = "x-amz-rdma-bytes-transferred"
STATUS: Final = "x-amz-rdma-protocol-status"

_PAIR: Final = struct.Struct("<BI16sIQQBH")
_RC: Final = 1
_MEMORY = re.compile(r"rc:([0-9a-f]{32}):([0-9a-f]{1,16}):([0-9a-f]{1,16}):([0-9a-f]{1,8})", re.IGNORECASE)
_PSN = re.compile(r"[0-9a-f]{1,6}", re.IGNORECASE)
_SESSION = re.compile(r"[0-9a-f]{32}", re.IGNORECASE)
_DECLINED: Final = ((REPLY, "501"), (STATUS, "unsupported"))


def declined(why: str) -> S3Error:
    """The refusal that tells a client to use plain HTTP."""
    return S3Error("NotImplemented", why, headers=_DECLINED)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a client, reachable through one of its connections."""

    session: str
    address: int
    length: int
    key: int

    def __str__(self) -> str:
        return f"rc:{self.session}:{self.address:016x}:{self.length:016x}:{self.key:08x}"


def parse_memory(text: str) -> Memory:
    """The memory that a request names. Raises S3Error: 501 for another form, 400 for nonsense."""
    if not text.lower().startswith("rc:"):
        raise declined("RDMA is done here over reliable connections alone. Please use plain HTTP.")
    found = _MEMORY.fullmatch(text)
    if found is None:
        raise S3Error("InvalidArgument", f"{TOKEN} is not rc:CONNECTION:ADDRESS:LENGTH:KEY in hexadecimal.")
    memory = Memory(found[1].lower(), *(int(found[at], 16) for at in (2, 3, 4)))
    if memory.address + memory.length > 1 << 64:
        raise S3Error("InvalidArgument", f"The memory in {TOKEN} ends beyond all addresses.")
    return memory


def parse_session(text: str) -> str:
    """The name of a connection. Raises S3Error."""
    if _SESSION.fullmatch(text) is None:
        raise S3Error("InvalidArgument", f"{SESSION} is not 32 hexadecimal digits.")
    return text.lower()


def encode_pair(end: PairEnd) -> str:
    """A queue pair without memory, in hex."""
    return _PAIR.pack(_RC, end.number, end.gid, 0, 0, 0, 1, 0).hex()


def parse_pair(text: str, psn: str) -> PairEnd:
    """The client's end of a connection. Raises S3Error: 501 for another transport, 400 for nonsense."""
    try:
        data = bytes.fromhex(text) if text.isalnum() else b""
    except ValueError:
        data = b""
    if len(data) != _PAIR.size or len(text) != 2 * _PAIR.size:
        raise declined(f"{TOKEN} is not the {_PAIR.size} bytes of a queue pair in hexadecimal.")
    transport, number, gid, _, _, _, _, _ = _PAIR.unpack(data)
    if transport != _RC:
        raise declined("RDMA is done here over reliable connections alone. Please use plain HTTP.")
    if not 1 < number < QPN_LIMIT:
        raise S3Error("InvalidArgument", f"The queue pair in {TOKEN} has no usable number.")
    if _PSN.fullmatch(psn) is None or int(psn, 16) >= PSN_LIMIT:
        raise S3Error("InvalidArgument", f"{PSN} is not 24 bits in hexadecimal.")
    return PairEnd(number, gid, int(psn, 16))


def parse_reply(reply: str, psn: str) -> PairEnd:
    """The door's end, from its answer to a connect. Raises S3Error."""
    code, colon, token = reply.partition(":")
    if code != "200" or not colon:
        raise S3Error("InvalidArgument", f"{REPLY} is not 200 and a queue pair.")
    return parse_pair(token, psn)
