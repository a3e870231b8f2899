"""What two processes of an agent tell each other of slots that one lends and the other writes.

A reader (agent/service/reader.py) has the bytes of a call's values, and the first process decides. Each
message of the reader has one answer, and a link carries one call at a time:

    ASK      a volume, and keys and lengths of values      PLACES  for each value a `LentSlot` or an `End`
    WRITTEN  of some of these slots the `Fate`             ENDED   of these values the `End`

All numbers are little-endian. A message that makes no sense raises `BadMessage`, and nothing else.
"""

import struct
from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Final, NamedTuple, TypeAlias

from agent.pool.counters import MissCause
from agent.pool.errors import BadPut, PutRefused
from agent.pool.format.directory import KEY_BYTES

VALUES_MAX: Final = 64
"""Of one call."""
_KIND: Final = struct.Struct("<BB")
_ASK: Final = struct.Struct("<16sIIB")
_VALUE: Final = struct.Struct(f"<{KEY_BYTES}sI")
_PLACE: Final = struct.Struct("<BB16sQQQ8sI")
_WRITTEN: Final = struct.Struct("<BB")
_ENDED: Final = struct.Struct("<BB")
MESSAGE_BYTES_MAX: Final = _KIND.size + _ASK.size + VALUES_MAX * max(_VALUE.size, _PLACE.size)
_NO_CAUSE: Final = 0xFF
_MILLISECONDS: Final = 1000
_NONE: Final = (bytes(16), 0, 0, 0, bytes(8), 0)


class BadMessage(Exception):
    """The bytes are no message of this kind."""


class Kind(IntEnum):
    ASK = 1
    PLACES = 2
    WRITTEN = 3
    ENDED = 4


class Fate(Enum):
    """What became of the write of a slot."""

    WRITTEN = 0
    """The enclosure has answered that it is there."""
    FAILED = 1
    """The enclosure has answered that it is not: nothing of it lands any more."""
    UNKNOWN = 2
    """It was sent, and has no answer: it may land yet."""
    NOT_SENT = 3


class End(Enum):
    """What became of a value."""

    STORED = 0
    THERE_BEFORE = 1
    UNTRIED = 2
    """Nothing was done: it wants a put of its own."""
    REFUSED = 3
    BAD = 4
    """By the caller's fault."""
    ELSEWHERE = 5
    """Of every value of a call: no slot is lent for the volume now."""


class Value(NamedTuple):
    key: bytes
    length: int


class Ask(NamedTuple):
    volume_id: bytes
    seconds: float
    """For all of the values."""
    ttl_seconds: int
    values: Sequence[Value]
    is_patient: bool = True
    """It may wait for enclosures as long as a put may. Else it gives way (agent/remote/long_waits.py)."""


class LentSlot(NamedTuple):
    """A slot to be written, and by which key and as whose write the value is sealed."""

    nguid: bytes
    number: int
    """Of the slot in its namespace, as the cipher sees it."""
    offset: int
    """In bytes, from the namespace's start."""
    generation: int
    fingerprint: bytes
    """Of the data key."""
    expiry: int


Ended: TypeAlias = tuple[End, MissCause | None]
"""The cause of what was refused."""


def encode_ask(ask: Ask) -> bytes:
    head = _KIND.pack(Kind.ASK, len(ask.values))
    seconds = max(0, min(0xFFFFFFFF, round(ask.seconds * _MILLISECONDS)))
    return b"".join(
        [
            head,
            _ASK.pack(ask.volume_id, seconds, ask.ttl_seconds, ask.is_patient),
            *[_VALUE.pack(*each) for each in ask.values],
        ]
    )


def decode_ask(message: bytes) -> Ask:
    """Raises BadMessage."""
    count = _count(message, Kind.ASK, _VALUE, _ASK.size)
    volume_id, milliseconds, ttl_seconds, patience = _ASK.unpack_from(message, _KIND.size)
    values = [Value(*each) for each in _VALUE.iter_unpack(message[_KIND.size + _ASK.size :])]
    if not count or not all(value.length for value in values):
        raise BadMessage("a call without values, or a value without bytes")
    if patience > 1:
        raise BadMessage(f"{patience} for yes or no")
    return Ask(volume_id, milliseconds / _MILLISECONDS, ttl_seconds, values, patience == 1)


def encode_places(places: Sequence[LentSlot | Ended]) -> bytes:
    parts = [_KIND.pack(Kind.PLACES, len(places))]
    for place in places:
        if isinstance(place, LentSlot):
            parts.append(_PLACE.pack(_NO_CAUSE, _NO_CAUSE, *place))
        else:
            parts.append(_PLACE.pack(*_end_bytes(place), *_NONE))
    return b"".join(parts)


def decode_places(message: bytes, count: int) -> list[LentSlot | Ended]:
    """Of so many values. Raises BadMessage."""
    if _count(message, Kind.PLACES, _PLACE) != count:
        raise BadMessage("not a place for each value")
    places: list[LentSlot | Ended] = []
    for end, cause, *place in _PLACE.iter_unpack(message[_KIND.size :]):
        places.append(LentSlot(*place) if end == _NO_CAUSE else _ended(end, cause))
    return places


def encode_written(fates: Sequence[tuple[int, Fate]]) -> bytes:
    return _KIND.pack(Kind.WRITTEN, len(fates)) + b"".join(
        [_WRITTEN.pack(number, fate.value) for number, fate in fates]
    )


def decode_written(message: bytes) -> list[tuple[int, Fate]]:
    """Raises BadMessage."""
    _count(message, Kind.WRITTEN, _WRITTEN)
    found = list(_WRITTEN.iter_unpack(message[_KIND.size :]))
    try:
        fates = [(number, Fate(fate)) for number, fate in found]
    except ValueError as unknown:
        raise BadMessage(str(unknown)) from None
    if not fates or len({number for number, _ in fates}) != len(fates):
        raise BadMessage("a value that is told of twice, or none")
    return fates


def encode_ended(ends: Sequence[Ended]) -> bytes:
    return _KIND.pack(Kind.ENDED, len(ends)) + b"".join([_ENDED.pack(*_end_bytes(each)) for each in ends])


def decode_ended(message: bytes, count: int) -> list[Ended]:
    """Of so many values. Raises BadMessage."""
    if _count(message, Kind.ENDED, _ENDED) != count:
        raise BadMessage("not an end for each value")
    return [_ended(end, cause) for end, cause in _ENDED.iter_unpack(message[_KIND.size :])]


def end_of(refused: PutRefused | BadPut) -> Ended:
    if isinstance(refused, PutRefused):
        return End.REFUSED, refused.cause
    return End.BAD, None


def refusal_of(ended: Ended) -> PutRefused | BadPut:
    """What the process says that decides, as an error of this one."""
    end, cause = ended
    why = "the first process of the agent has refused it"
    return PutRefused(why, cause) if end is End.REFUSED else BadPut(why)


def _end_bytes(ended: Ended) -> tuple[int, int]:
    end, cause = ended
    return end.value, _NO_CAUSE if cause is None else cause.value


def _ended(end: int, cause: int) -> Ended:
    try:
        return End(end), None if cause == _NO_CAUSE else MissCause(cause)
    except ValueError as unknown:
        raise BadMessage(str(unknown)) from None


def _count(message: bytes, kind: Kind, each: struct.Struct, before: int = 0) -> int:
    """How many a message has of what it lists. Raises BadMessage for one of another kind or length."""
    if len(message) < _KIND.size + before:
        raise BadMessage(f"{len(message)} bytes")
    found, count = _KIND.unpack_from(message)
    if found != kind or count > VALUES_MAX or len(message) != _KIND.size + before + count * each.size:
        raise BadMessage(f"{len(message)} bytes of kind {found}, where {kind.name} was due")
    return int(count)
