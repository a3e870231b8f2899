"""What a reader's S3 door asks the first process of its agent, over sockets that keep messages apart.

A message is one line of JSON, behind which a `Carry` has bytes. Both ends run the same program as one user.
Asks go over links of which each has one ask under way: `Find` is answered by `Found`, `Refused` or
`ELSEWHERE`; `Done` and `Lost` by nothing. A `Carry` goes over a socket of its own, with a descriptor, and is
answered there by `Carried`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

from agent.fs.files.sealed_reads import BlockRange
from agent.s3.index import StoredObject

MESSAGE_BYTES_MAX: Final = 192 << 10
"""A socket of the kernel's usual size takes it."""
BLOCKS_MAX: Final = 2000
"""Of one answer, some 60 bytes each: 8 GiB of blocks of 4 MiB. The first process sends longer ones."""


class BadMessage(Exception):
    """The other process says what makes no sense."""


@dataclass(frozen=True, slots=True)
class Find:
    """Look an object up; `holds`: and keep its bytes until `Done` names the hold."""

    tenant: str
    bucket: str
    key: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Done:
    """Readers are done with these holds."""

    holds: Sequence[int]


@dataclass(frozen=True, slots=True)
class Lost:
    """Bytes of an object could not be had here: the first process is to answer for it."""

    tenant: str
    object_id: int


Ask: TypeAlias = Find | Done | Lost


@dataclass(frozen=True, slots=True)
class Found:
    """`volumes`: the identifier of the volume by capacity. `blocks`: all bytes of the object, in order; none,
    and no `hold`, where they were not asked for."""

    found: StoredObject
    hold: int = 0
    volumes: Mapping[int, str] | None = None
    blocks: Sequence[BlockRange] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """An S3Error."""

    code: str
    message: str


class Elsewhere:
    """The first process is to answer the request."""


ELSEWHERE: Final = Elsewhere()
Reply: TypeAlias = Found | Refused | Elsewhere


@dataclass(frozen=True, slots=True)
class Carry:
    """A request of a client at `peer`, which begins with `received`. The descriptor beside it leads to
    the client."""

    number: int
    peer: str
    received: bytes


@dataclass(frozen=True, slots=True)
class Carried:
    """The request of this number is answered. `goes_on`: the client may send another."""

    number: int
    goes_on: bool


def encode_ask(ask: Ask) -> bytes:
    if isinstance(ask, Find):
        return _line({"find": [ask.tenant, ask.bucket, ask.key, ask.holds]})
    if isinstance(ask, Done):
        return _line({"done": list(ask.holds)})
    return _line({"lost": [ask.tenant, ask.object_id]})


def decode_ask(message: bytes) -> Ask:
    """Raises BadMessage."""
    try:
        found = json.loads(message)
        if "find" in found:
            tenant, bucket, key, holds = found["find"]
            return Find(str(tenant), str(bucket), str(key), bool(holds))
        if "done" in found:
            return Done([int(hold) for hold in found["done"]])
        tenant, object_id = found["lost"]
        return Lost(str(tenant), int(object_id))
    except (ValueError, KeyError, TypeError) as wrong:
        raise BadMessage(f"no question: {wrong}") from None


def encode_reply(reply: Reply) -> bytes:
    if isinstance(reply, Elsewhere):
        return _line({"elsewhere": True})
    if isinstance(reply, Refused):
        return _line({"refused": [reply.code, reply.message]})
    return _line(
        {
            "found": asdict(reply.found),
            "hold": reply.hold,
            "volumes": list((reply.volumes or {}).items()),
            "blocks": [[each[0].hex(), *each[1:]] for each in reply.blocks],
        }
    )


def decode_reply(message: bytes) -> Reply:
    """Raises BadMessage."""
    try:
        found = json.loads(message)
        if "elsewhere" in found:
            return ELSEWHERE
        if "refused" in found:
            code, text = found["refused"]
            return Refused(str(code), str(text))
        return Found(
            StoredObject(**found["found"]),
            int(found["hold"]),
            {int(capacity): str(volume) for capacity, volume in found["volumes"]},
            [BlockRange(bytes.fromhex(name), *map(int, rest)) for name, *rest in found["blocks"]],
        )
    except (ValueError, KeyError, TypeError) as wrong:
        raise BadMessage(f"no answer: {wrong}") from None


def encode_carry(carry: Carry) -> bytes:
    return _line({"carry": [carry.number, carry.peer]}) + carry.received


def decode_carry(message: bytes) -> Carry:
    """Raises BadMessage."""
    line, _, received = message.partition(b"\n")
    try:
        number, peer = json.loads(line)["carry"]
        return Carry(int(number), str(peer), received)
    except (ValueError, KeyError, TypeError) as wrong:
        raise BadMessage(f"no request: {wrong}") from None


def encode_carried(carried: Carried) -> bytes:
    return _line({"carried": [carried.number, carried.goes_on]})


def decode_carried(message: bytes) -> Carried:
    """Raises BadMessage."""
    try:
        number, goes_on = json.loads(message)["carried"]
        return Carried(int(number), bool(goes_on))
    except (ValueError, KeyError, TypeError) as wrong:
        raise BadMessage(f"no answer: {wrong}") from None


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
