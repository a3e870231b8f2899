"""A look at a slot: all of it is read and opened as a get would, and nothing is changed.

A finding comes with a digest of the bytes that did not prove themselves. Damage that lies on a medium is the
same at each look; damage on the way seldom is twice.
"""

import enum
import hashlib
from typing import NamedTuple

from agent.pool.counters import MissCause
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.volume import Found, Volume
from agent.pool.write.slot_copy import SlotVerifier

READ_SECONDS = 1.0
"""For one read. Nobody waits for a look, and a slower drive is none to be judged by what it brings."""
DIGEST_BYTES = 16


class Finding(enum.Enum):
    """What a look at a slot said."""

    GOOD = "good"
    GONE = "holds something else"
    BAD = "does not prove itself"
    UNREADABLE = "the medium does not give it"
    OTHER_KEY = "is under a key that is not known here"
    UNKNOWN = "nothing can be said"


class Look(NamedTuple):
    """What was found, and a digest of what was wrong; empty where nothing was, or no byte came."""

    finding: Finding
    wrong: bytes
    bytes_read: int


def look_at(volume: Volume, channel: IoChannel, found: Found) -> Steps[Look]:
    with SlotVerifier(volume, channel, found, io_seconds=READ_SECONDS) as reader:
        cause = yield from reader.verify()
        wrong = b""
        if reader.wrong is not None:
            wrong = hashlib.blake2b(reader.wrong, digest_size=DIGEST_BYTES).digest()
        return Look(_finding(reader, cause), wrong, reader.bytes_read)


def _finding(reader: SlotVerifier, cause: MissCause | None) -> Finding:
    was_read = reader.wrong is not None or not reader.size
    match cause:
        case None:
            return Finding.GOOD
        case MissCause.CORRUPT:
            return Finding.BAD if was_read else Finding.UNREADABLE
        case MissCause.EVICTED:
            return Finding.GONE
        case MissCause.WRONG_KEY:
            return Finding.OTHER_KEY
    return Finding.UNKNOWN
