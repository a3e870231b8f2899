"""The bytes of a control session: what a client and the agent say to each other through one open file.

`/.g35/session` in the mount is the door. Every open of it is a session of its own. In a session

* a request is one write(2) at offset 0, at most `REQUEST_BYTES_MAX` long;
* its answer is what the next read(2) at offset 0 returns, whole. Requests with `FLAG_NO_ANSWER` have
  none. Answers wait in the order of the requests, `ANSWERS_MAX` of them at most;
* values move at *tickets*. A GET or PUT request binds numbers of the client's choosing to keys, and
  from then on the value of ticket t lies at file offset `data_offset(t)`: pread(2) there reads it,
  pwrite(2) there writes it. A read that returns nothing is a miss. A write becomes visible with its
  last byte: the write(2) that delivers it returns once the value is sealed and on flash.

So a get is two requests to the kernel and one round trip on the fabric, and many gets are one request more
than values.

A value of up to `AT_ONCE_BYTES` can be had by one request: fgetxattr(2) on the session's file with the name
`value_xattr(volume, key)`. ENODATA is a miss, ERANGE a value that is longer than the buffer (Linux says E2BIG
where the buffer has `AT_ONCE_BYTES`); EOPNOTSUPP comes from an agent that learns from the order of gets in a
session.

Layout of a request, little-endian:
     0  4  magic "g35q"
     4  2  version
     6  2  operation
     8  4  request id, echoed in the answer
    12  4  number of keys
    16  4  first ticket (GET, PUT)
    20  4  time to live in seconds, 0 for the volume's own (PUT, PIN; in one that has none a pin lasts until
           the value is deleted); of PRESTAGE the milliseconds after which it is of no use, 0 for none
    24  2  length of the volume's name in bytes
    26  2  flags
    28  4  zero
    32  …  the volume's name in UTF-8, then 16 bytes a key (OUTCOME: none, the number says how many tickets;
           REPORT: a `PrefixReport` in the place of each two keys), then (PUT) a 4-byte value length a key
Layout of an answer, little-endian:
     0  4  magic "g35a"
     4  2  version
     6  2  operation
     8  4  request id
    12  4  errno of the whole request, 0 where it was understood
    16  4  bytes that follow
    20 12  zero
    32  …  EXISTS, DELETE, PRESTAGE, PIN, OUTCOME: one byte a key (`Outcome`); STATS: JSON in UTF-8
The agent imports this file and nothing else of host_shim, so both sides speak one definition.
"""

import enum
import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

VERSION: Final = 1
SESSION_PATH: Final = ".g35/session"
PROCESS_FOLDER: Final = "process-"
"""How the names begin of the folders beside the session that lead to other processes of the agent. Each has a
mount of its own there, with a SESSION_PATH, and serves gets."""
SESSION_FILE_BYTES: Final = 1 << 62
"""The size that stat shows, by which a session is told from any other file of its name. Data offsets lie
below it, so that the kernel never takes a write for one that extends the file, which it would let in only one
at a time."""
REQUEST_MAGIC: Final = b"g35q"
ANSWER_MAGIC: Final = b"g35a"
KEY_BYTES: Final = 16
KEYS_MAX: Final = 4096
"""Keys in one request. 4,096 blocks of 512 tokens are two million tokens of prefix."""
VOLUME_NAME_BYTES_MAX: Final = 64
TICKETS_MAX: Final = 4096
"""Tickets of one session; each costs the agent well under a kilobyte while it is bound."""
ANSWERS_MAX: Final = 64
NAME_FORM_BYTES_MAX: Final = 4096
"""Of each part of a `NameForm`."""
TICKET_SHIFT: Final = 32
VALUE_BYTES_MAX: Final = 1 << 24
AT_ONCE_BYTES: Final = 1 << 16
"""What Linux lets the value of an extended attribute have (XATTR_SIZE_MAX)."""
FLAG_NO_ANSWER: Final = 0x0001

_REQUEST: Final = struct.Struct("<4sHHIIIIHHI")
_ANSWER: Final = struct.Struct("<4sHHIII12x")
assert _REQUEST.size == 32
assert _ANSWER.size == 32
HEADER_BYTES: Final = 32
REQUEST_BYTES_MAX: Final = HEADER_BYTES + VOLUME_NAME_BYTES_MAX + KEYS_MAX * (KEY_BYTES + 4)
ANSWER_BYTES_MAX: Final = 1 << 20


class Operation(enum.IntEnum):
    """What a request asks for."""

    EXISTS = 1
    GET = 2
    PUT = 3
    PRESTAGE = 4
    PIN = 5
    DELETE = 6
    STATS = 7
    OUTCOME = 8
    REPORT = 9


_OPERATIONS: Final = {operation.value: operation for operation in Operation}


class Outcome(enum.IntEnum):
    """What became of one key; every miss has exactly one cause."""

    HIT = 0
    NEVER_STORED = 1
    EVICTED = 2
    EXPIRED = 3
    CORRUPT = 4
    WRONG_KEY = 5
    LATE = 6
    ENCLOSURE_DOWN = 7
    G4_LATE = 8
    G4_LOST = 9
    G4_CORRUPT = 10
    STARTED = 16
    """Prestage: on its way into the agent's memory."""
    REFUSED = 17
    """Prestage, pin or put: a bound is reached or the volume does not allow it; nothing was changed."""
    UNKNOWN = 18
    """Outcome: the ticket is not bound, or nothing was moved at it yet."""


class MalformedControl(Exception):
    """The bytes are no control message; the text says why."""


class Request:
    """One request, checked. `lengths` has one entry a key for PUT and is empty otherwise.

    OUTCOME asks about tickets and carries no keys: its `keys` are empty bytes, one for each ticket.
    """

    # No dataclass: its `__init__` would be interpreted, and the agent has one for every put.
    def __init__(
        self,
        operation: Operation,
        request_id: int,
        volume: str,
        keys: tuple[bytes, ...] = (),
        first_ticket: int = 0,
        ttl_seconds: int = 0,
        flags: int = 0,
        lengths: tuple[int, ...] = (),
    ) -> None:
        self.operation = operation
        self.request_id = request_id
        self.volume = volume
        self.keys = keys
        self.first_ticket = first_ticket
        self.ttl_seconds = ttl_seconds
        self.flags = flags
        self.lengths = lengths

    def encode(self) -> bytes:
        name = self.volume.encode()
        head = _REQUEST.pack(
            REQUEST_MAGIC,
            VERSION,
            self.operation,
            self.request_id,
            len(self.keys),
            self.first_ticket,
            self.ttl_seconds,
            len(name),
            self.flags,
            0,
        )
        return b"".join((head, name, *self.keys, struct.pack(f"<{len(self.lengths)}I", *self.lengths)))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a read(2) at offset 0 returns."""

    operation: int
    request_id: int
    errno: int
    body: bytes

    def encode(self) -> bytes:
        head = _ANSWER.pack(
            ANSWER_MAGIC, VERSION, self.operation, self.request_id, self.errno, len(self.body)
        )
        return head + self.body


_REPORT: Final = struct.Struct("<IIIIIBBxxiI")
REPORT_BYTES: Final = 2 * KEY_BYTES
assert _REPORT.size == REPORT_BYTES
REPORTS_MAX: Final = KEYS_MAX // 2
_REPORT_COUNT_MAX: Final = (1 << 32) - 1
_REPORT_SAVED_MAX: Final = (1 << 31) - 1


class PrefixReport(NamedTuple):
    """What a connector's request asked for and got, for the agent's counters. Counts are blocks.

    Layout, little-endian: 5 counts of 4 bytes, the cause, whether the saving is known, 2 zero, 4 bytes of
    milliseconds saved (signed), 4 of milliseconds that loading took.
    """

    asked: int
    found: int
    usable: int
    stored: int
    loaded: int
    cause: Outcome
    """Of the first hole; HIT where there is none, UNKNOWN where no agent said."""
    saved_ms: int | None
    """What loading saved against computing; below 0: what it cost. None: not known."""
    load_ms: int

    def encode(self) -> bytes:
        counts = (min(each, _REPORT_COUNT_MAX) for each in self[:5])
        saved = max(-_REPORT_SAVED_MAX, min(_REPORT_SAVED_MAX, self.saved_ms or 0))
        return _REPORT.pack(
            *counts, self.cause, self.saved_ms is not None, saved, min(self.load_ms, _REPORT_COUNT_MAX)
        )


def decode_report_untrusted(data: bytes) -> PrefixReport:
    """A report out of REPORT_BYTES. Bad bytes raise MalformedControl, and nothing else."""
    if len(data) != REPORT_BYTES:
        raise MalformedControl(f"a report has {REPORT_BYTES} bytes, not {len(data)}")
    asked, found, usable, stored, loaded, cause, is_known, saved, load = _REPORT.unpack(data)
    if cause > Outcome.G4_CORRUPT and cause != Outcome.UNKNOWN:
        raise MalformedControl(f"{cause} is no cause of a hole")
    if not usable <= found <= asked:
        raise MalformedControl("a report of more blocks found than asked for, or usable than found")
    return PrefixReport(
        asked, found, usable, stored, loaded, Outcome(cause), saved if is_known else None, load
    )


_HEX_KEY: Final = re.compile(rb"[0-9a-fA-F]{32}")
_KEY_PERSONALITY: Final = b"g35 key"


def key_of_name(name: str | bytes) -> bytes:
    """The 16-byte key of any name: 32 hexadecimal digits are the key itself, all else is hashed.

    The hash is BLAKE2b with 128 bits of output. `/kv/<volume>/<name>` and the client agree by this one
    function. Raises ValueError for an empty name.
    """
    raw = name.encode("utf-8", "surrogateescape") if isinstance(name, str) else bytes(name)
    if not raw:
        raise ValueError("an empty name has no key")
    if _HEX_KEY.fullmatch(raw):
        return bytes.fromhex(raw.decode())
    return hashlib.blake2b(raw, digest_size=KEY_BYTES, person=_KEY_PERSONALITY).digest()


def name_of(*fields: bytes | str | int) -> bytes:
    """One name of several fields; lists of fields that differ never make the same name."""
    parts = []
    for field in fields:
        raw = field if isinstance(field, bytes) else str(field).encode("utf-8", "surrogateescape")
        parts += [len(raw).to_bytes(4, "little"), raw]
    return b"".join(parts)


def key_of_long_name(name: bytes) -> bytes:
    """The 16-byte key under which the pool has the value of a name of any length."""
    return hashlib.blake2b(name, digest_size=KEY_BYTES, person=b"g35 block").digest()


class NameForm:
    """How the connector of an engine makes names of the engine's hashes: all but the hash is the same.

    A router that has hashes and this form asks for the same keys.
    """

    def __init__(
        self, before: bytes = b"", after: bytes = b"", *, tail: bytes = b"", is_text: bool = False
    ) -> None:
        """`before`, `after`: the fields beside the hash, by `name_of`. `tail` ends the field that the hash
        is in. `is_text`: the field has the hash's hexadecimal digits."""
        self.before = before
        self.after = after
        self.tail = tail
        self.is_text = is_text

    def name(self, block_hash: bytes) -> bytes:
        if self.is_text:
            block_hash = block_hash.hex().encode()
        field = block_hash + self.tail
        return self.before + len(field).to_bytes(4, "little") + field + self.after

    def describe(self) -> dict[str, str | bool]:
        """As JSON has it, for `decode_name_form_untrusted`."""
        return {
            "before": self.before.hex(),
            "tail": self.tail.hex(),
            "after": self.after.hex(),
            "text": self.is_text,
        }


def decode_name_form_untrusted(found: object) -> NameForm:
    """A form out of JSON. Raises MalformedControl for what is none."""
    if not isinstance(found, dict) or not found.keys() <= {"before", "tail", "after", "text"}:
        raise MalformedControl("a form of names has before, tail, after and text, and nothing else")
    parts = []
    for key in ("before", "after", "tail"):
        digits = found.get(key, "")
        if not isinstance(digits, str) or len(digits) > 2 * NAME_FORM_BYTES_MAX:
            raise MalformedControl(f"{key} is no text of up to {2 * NAME_FORM_BYTES_MAX} digits")
        parts.append(_unhexed(digits, key))
    is_text = found.get("text", False)
    if not isinstance(is_text, bool):
        raise MalformedControl("text is true or false")
    return NameForm(parts[0], parts[1], tail=parts[2], is_text=is_text)


def _unhexed(digits: str, what: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        raise MalformedControl(f"{what} is not in hexadecimal") from None


_VALUE_XATTR: Final = b"user.g35."


def value_xattr(volume: str, key: bytes) -> bytes:
    """The extended attribute of the session's file that is a key's value: the key in hex, then the volume."""
    return b"%b%b.%b" % (_VALUE_XATTR, key.hex().encode(), volume.encode())


def decode_value_xattr_untrusted(name: bytes) -> tuple[str, bytes]:
    """Volume and key of such a name. Raises MalformedControl for any other."""
    digits, dot, volume = name[len(_VALUE_XATTR) :].partition(b".")
    if not name.startswith(_VALUE_XATTR) or not dot or not _HEX_KEY.fullmatch(digits):
        raise MalformedControl("not the name of a value")
    try:
        return volume.decode(), bytes.fromhex(digits.decode())
    except UnicodeDecodeError:
        raise MalformedControl("the volume's name is not UTF-8") from None


def data_offset(ticket: int) -> int:
    """Where in the session file the value of a ticket begins."""
    return (ticket + 1) << TICKET_SHIFT


def ticket_at(offset: int) -> tuple[int, int]:
    """The ticket that a file offset belongs to (-1: the control channel) and the offset in its value."""
    return (offset >> TICKET_SHIFT) - 1, offset & ((1 << TICKET_SHIFT) - 1)


def binds_reads(head: bytes) -> bool:
    """Whether the HEADER_BYTES of a request look like one that binds keys to tickets, to be read."""
    magic, version, number, *_ = _REQUEST.unpack(head)
    return bool(magic == REQUEST_MAGIC and version == VERSION and number == Operation.GET.value)


def decode_request_untrusted(data: bytes | bytearray | memoryview) -> Request:
    """A request out of the bytes of one write(2). Bad bytes raise MalformedControl, and nothing else."""
    if len(data) < HEADER_BYTES:
        raise MalformedControl(f"a request has {HEADER_BYTES} bytes of header, this one {len(data)} in all")
    magic, version, number, request_id, count, first_ticket, ttl_seconds, name_bytes, flags, zero = (
        _REQUEST.unpack_from(data)
    )
    if magic != REQUEST_MAGIC:
        raise MalformedControl("no request: the first four bytes are not 'g35q'")
    if version != VERSION:
        raise MalformedControl(f"version {version} of the control wire; this agent speaks {VERSION}")
    operation = _OPERATIONS.get(number)
    if operation is None:
        raise MalformedControl(f"unknown operation {number}")
    if count > KEYS_MAX:
        raise MalformedControl(f"{count} keys in one request; {KEYS_MAX} is the most")
    if name_bytes > VOLUME_NAME_BYTES_MAX:
        raise MalformedControl(f"a volume's name of {name_bytes} bytes; {VOLUME_NAME_BYTES_MAX} is the most")
    if flags & ~FLAG_NO_ANSWER or zero:
        raise MalformedControl("unknown flags, or a reserved field that is not zero")
    has_tickets = operation in (Operation.GET, Operation.PUT, Operation.OUTCOME)
    if has_tickets and first_ticket + count > TICKETS_MAX:
        raise MalformedControl(f"tickets up to {first_ticket + count}; a session has {TICKETS_MAX}")
    has_lengths = operation is Operation.PUT
    expected = HEADER_BYTES + name_bytes + count * (KEY_BYTES + (4 if has_lengths else 0))
    if operation is Operation.OUTCOME:
        expected = HEADER_BYTES + name_bytes
    if len(data) != expected:
        raise MalformedControl(f"{len(data)} bytes where the header announces {expected}")
    try:
        volume = bytes(data[HEADER_BYTES : HEADER_BYTES + name_bytes]).decode()
    except UnicodeDecodeError:
        raise MalformedControl("the volume's name is not UTF-8") from None
    keys_start = HEADER_BYTES + name_bytes
    if operation is Operation.OUTCOME:
        keys: tuple[bytes, ...] = (b"",) * count
    else:
        starts = range(keys_start, keys_start + count * KEY_BYTES, KEY_BYTES)
        keys = tuple([bytes(data[at : at + KEY_BYTES]) for at in starts])
    lengths: tuple[int, ...] = ()
    if has_lengths:
        lengths = struct.unpack_from(f"<{count}I", data, keys_start + count * KEY_BYTES)
        for length in lengths:
            if not 0 < length <= VALUE_BYTES_MAX:
                raise MalformedControl(f"a value has 1 to {VALUE_BYTES_MAX} bytes")
    return Request(operation, request_id, volume, keys, first_ticket, ttl_seconds, flags, lengths)


def decode_answer_untrusted(data: bytes | bytearray | memoryview) -> Answer:
    """An answer out of the bytes of one read(2). Bad bytes raise MalformedControl, and nothing else."""
    if len(data) < HEADER_BYTES:
        raise MalformedControl(f"an answer has {HEADER_BYTES} bytes of header, this one {len(data)} in all")
    magic, version, operation, request_id, errno, body_bytes = _ANSWER.unpack_from(data)
    if magic != ANSWER_MAGIC or version != VERSION:
        raise MalformedControl("no answer of this version of the control wire")
    if len(data) - HEADER_BYTES < body_bytes:
        raise MalformedControl(f"{len(data) - HEADER_BYTES} bytes of body where {body_bytes} are announced")
    body = bytes(data[HEADER_BYTES : HEADER_BYTES + body_bytes])
    return Answer(operation, request_id, errno, body)


_OUTCOMES: Final = {each.value: each for each in Outcome}
"""`Outcome(value)` takes twenty times as long: 2.5 ms of 4,096 keys, for which an event loop would wait."""


def outcomes(body: Sequence[int]) -> list[Outcome]:
    """One `Outcome` a key out of an answer's body. Raises MalformedControl for an unknown one."""
    try:
        return list(map(_OUTCOMES.__getitem__, body))
    except KeyError as unknown:
        raise MalformedControl(f"{unknown} is no outcome") from None
