"""What the first process and a reader tell each other about a guest's queues, over two kinds of sockets that
keep messages apart. Both ends run the same program as one user.

The *link*, one for each guest and reader, has lines of JSON with descriptors. The reader says `READY` once.
Then each message of the first process has one answer, `Done` or `Refused`.

    Run        serve a queue; with it CARRY, KICK, CALL, WORDS and the memory that its numbers name
    Stop       end after the request at hand; `Done.base` is the available idx to go on from
    UseCall    call the driver through another descriptor, or through none
    UseMemory  the guest's memory is another, of the descriptors with it

The *carrying socket*, one for each run of a queue, is asked by the reader's thread of that queue, one
question at a time. All fields are little-endian:

    serve      u8 1, u8 again, u16 head, u32 0, u64 taking, u64 handle
               answered by u8 0, u32 written; behind it what is bound in that session then, if handle is not 0
    look       u8 2, u8 0, u16 0, u32 0, u64 0, u64 handle
               answered by what is bound in that session: u64 version, names of volumes, rows
    bad        the answer where the ring cannot be followed: u8 1, then words
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from agent.fs.guest_sessions import Binding, Bound
from agent.virtio.memory_table import REGIONS_MAX
from agent.virtio.vhost_user import Region
from host_shim.control_wire import KEY_BYTES, TICKETS_MAX, VOLUME_NAME_BYTES_MAX

FIRST_DESCRIPTORS: Final = 4
"""Of a `Run`, before those of memory: CARRY, KICK, CALL and WORDS."""
DESCRIPTORS_MAX: Final = FIRST_DESCRIPTORS + REGIONS_MAX + 4
LINE_BYTES_MAX: Final = 32 << 10
SERVE: Final = 1
LOOK: Final = 2
QUESTION: Final = struct.Struct("<BBHIQQ")
"""Which, again, head, 0, the number of the taking, and the handle of a session."""
_WRITTEN: Final = struct.Struct("<xI")
_BAD: Final = b"\x01"
_ROW: Final = struct.Struct(f"<HBxQ{KEY_BYTES}s")
_NAME: Final = struct.Struct("<B")
_VERSION: Final = struct.Struct("<Q")
ANSWER_BYTES_MAX: Final = (
    _WRITTEN.size + _VERSION.size + TICKETS_MAX * (_ROW.size + _NAME.size + VOLUME_NAME_BYTES_MAX)
)


class BadMessage(Exception):
    """The other process says what makes no sense."""


class Place(NamedTuple):
    """Bytes of one of the descriptors of memory that come along, by its number among them."""

    memory: int
    offset: int
    size: int


class PlacedRegion(NamedTuple):
    """A region of guest memory, as vhost-user has it, and where its bytes are."""

    guest_address: int
    size: int
    user_address: int
    place: Place

    @property
    def region(self) -> Region:
        return Region(self.guest_address, self.size, self.user_address, 0)


@dataclass(frozen=True, slots=True)
class Run:
    """Serve the queue `index` from the available idx `base` on. `features` are virtio's."""

    index: int
    size: int
    base: int
    features: int
    descriptors: Place
    available: Place
    used: Place
    inflight: Place
    regions: Sequence[PlacedRegion]


@dataclass(frozen=True, slots=True)
class Stop:
    index: int


@dataclass(frozen=True, slots=True)
class UseCall:
    index: int
    is_there: bool


@dataclass(frozen=True, slots=True)
class UseMemory:
    regions: Sequence[PlacedRegion]


Message: TypeAlias = Run | Stop | UseCall | UseMemory


@dataclass(frozen=True, slots=True)
class Done:
    base: int | None = None
    """Of a `Stop`; None: the queue did not run."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The front-end is to blame."""

    words: str


Answer: TypeAlias = Done | Refused
READY: Final = b'"ready"'
_MESSAGES: Final[dict[str, type[Message]]] = {each.__name__: each for each in (Run, Stop, UseCall, UseMemory)}


def encode_message(message: Message) -> bytes:
    return json.dumps({type(message).__name__: asdict(message)}).encode()


def decode_message(line: bytes) -> Message:
    """Raises BadMessage."""
    try:
        ((name, found),) = json.loads(line).items()
        for place in ("descriptors", "available", "used", "inflight"):
            if place in found:
                found[place] = Place(*map(int, found[place]))
        if "regions" in found:
            found["regions"] = [_region(each) for each in found["regions"]]
        return _MESSAGES[name](**found)
    except (ValueError, TypeError, KeyError, AttributeError) as wrong:
        raise BadMessage(f"no message: {wrong}") from None


def _region(found: Sequence[Any]) -> PlacedRegion:
    guest_address, size, user_address, place = found
    return PlacedRegion(int(guest_address), int(size), int(user_address), Place(*map(int, place)))


def encode_answer(answer: Answer) -> bytes:
    return json.dumps(answer.words if isinstance(answer, Refused) else [answer.base]).encode()


def decode_answer(line: bytes) -> Answer:
    """Raises BadMessage."""
    try:
        found = json.loads(line)
        if isinstance(found, str):
            return Refused(found)
        (base,) = found
        return Done(None if base is None else int(base))
    except (ValueError, TypeError) as wrong:
        raise BadMessage(f"no answer: {wrong}") from None


def encode_written(count: int, bound: Bound | None = None) -> bytes:
    return _WRITTEN.pack(count) + (b"" if bound is None else encode_bound(bound))


def encode_bad(words: str) -> bytes:
    return _BAD + words.encode()


def decode_written(answer: bytes) -> tuple[int, Bound | None] | str:
    """Bytes that were written into a chain, and what is bound, where that was asked; words where the ring
    cannot be followed. Raises BadMessage."""
    if answer.startswith(_BAD):
        return answer[1:].decode(errors="replace")
    if len(answer) < _WRITTEN.size:
        raise BadMessage(f"{len(answer)} bytes to say how many were written")
    count: int = _WRITTEN.unpack_from(answer)[0]
    return count, decode_bound(answer[_WRITTEN.size :]) if len(answer) > _WRITTEN.size else None


def encode_bound(bound: Bound) -> bytes:
    """Names of volumes come each behind its length, and 0 behind the last; then a row for each binding."""
    bindings = bound.bindings
    names = sorted({each.volume for each in bindings})[:255]
    numbers = {name: number for number, name in enumerate(names)}
    parts = [_VERSION.pack(bound.version)]
    for name in names:
        parts += [_NAME.pack(len(name.encode())), name.encode()]
    parts.append(_NAME.pack(0))
    parts += [
        _ROW.pack(each.ticket, numbers[each.volume], each.serial, each.key)
        for each in bindings
        if each.volume in numbers
    ]
    return b"".join(parts)


def decode_bound(answer: bytes) -> Bound:
    """Raises BadMessage."""
    try:
        (version,) = _VERSION.unpack_from(answer)
        names, at = [], _VERSION.size
        while size := answer[at]:
            names.append(answer[at + 1 : at + 1 + size].decode())
            at += 1 + size
        rows = _ROW.iter_unpack(memoryview(answer)[at + 1 :])
        return Bound(
            version, [Binding(ticket, serial, names[number], key) for ticket, number, serial, key in rows]
        )
    except (IndexError, ValueError, struct.error) as wrong:
        raise BadMessage(f"no bindings: {wrong}") from None
