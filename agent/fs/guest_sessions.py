"""What the processes of an agent share of one guest's control sessions, in memory of their own.

The first process keeps the sessions. A reader that serves a queue of the guest asks it once which keys are
bound to the tickets of a session, and remembers that until the session's version is another. What became of
each get goes the other way:

1. A guest's request binds keys to tickets of a session. The first process gives each binding a serial, raises
   the session's version, and answers.
2. A READ of a ticket comes to a reader. Where the session's version is not the one that it remembers, it asks
   what is bound; it may have been told with the answer to that request.
3. It serves the value, tells what became of the get by the serial, and answers.
4. Who asks the first process for the outcome has what was told. A READ behind a value that was served whole
   is its end, whatever is stored under the key by then.

Each word is written and read whole. What a process writes here before the guest has an answer, any process
sees that has the guest's next request. The rings order that: one fence before the index that completes a
request, one behind the index by which the next is found (agent/fs/virtiofs/device_queue.py). So do messages
between processes. A request that the guest sends without waiting may meet an outcome as it is told. For
that, length and outcome have a fence of their own between them, on both sides.

    0      is live        u64    1: the guest has said INIT
    8      versions       u64 x 256, of sessions by their handle
    4096   outcomes       u64 x 4096, of gets by the serial of their binding: serial << 8 | outcome
    36864  lengths        u32 x 4096, of the values of these gets
    53248  marks          u8 x 4096, of keys by their bytes: 1 where the next get is the first process'
"""

import mmap
import threading
import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from agent.host_os.shared_memory import shared_memory
from agent.virtio.memory_barrier import ordering_fence

VERSIONS: Final = 256
"""A power of two: what stands above the lowest bits of a guest's handle does not matter."""
OUTCOMES: Final = 4096
"""So many gets may lie between one and the question what became of it. Then that is not known, a miss."""
MARKS: Final = 4096
_OUTCOMES_AT: Final = 4096
_LENGTHS_AT: Final = _OUTCOMES_AT + 8 * OUTCOMES
_MARKS_AT: Final = _LENGTHS_AT + 4 * OUTCOMES
TOTAL_BYTES: Final = _MARKS_AT + MARKS
_OUTCOME_BITS: Final = 8
_OUTCOME_MASK: Final = (1 << _OUTCOME_BITS) - 1


class Binding(NamedTuple):
    """A key that is bound to a ticket, to be read. No two bindings of an agent have one serial."""

    ticket: int
    serial: int
    volume: str
    key: bytes


class Bound(NamedTuple):
    """What is bound to the tickets of a session, as of this version of it."""

    version: int
    bindings: Sequence[Binding]


class GuestWords:
    """The memory as one process sees it. Safe from any thread."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: of TOTAL_BYTES of shared memory, which may be closed then. Raises OSError."""
        whole = memoryview(mmap.mmap(descriptor, TOTAL_BYTES, mmap.MAP_SHARED))
        self._words: Final = whole[:_OUTCOMES_AT].cast("Q")
        self._outcomes: Final = whole[_OUTCOMES_AT:_LENGTHS_AT].cast("Q")
        self._lengths: Final = whole[_LENGTHS_AT:_MARKS_AT].cast("I")
        self._marks: Final = whole[_MARKS_AT:TOTAL_BYTES]
        self._lock: Final = threading.Lock()

    @property
    def is_live(self) -> bool:
        return self._words[0] == 1

    def say_live(self, is_live: bool) -> None:
        self._words[0] = int(is_live)

    def version_of(self, handle: int) -> int:
        """That of the session which is open under the handle, the guest's or this agent's own: they differ by
        the epoch, which stands far above the lowest bits."""
        return self._words[1 + handle % VERSIONS]

    def raise_version(self, handle: int) -> None:
        """The session's tickets are others now; to be said before anybody hears of it."""
        with self._lock:
            self._words[1 + handle % VERSIONS] += 1

    def tell(self, serial: int, outcome: int, length: int = 0) -> None:
        """What became of the get of a binding, of a whole value; before the guest has its answer."""
        self._lengths[serial % OUTCOMES] = length
        ordering_fence()
        self._outcomes[serial % OUTCOMES] = serial << _OUTCOME_BITS | outcome

    def outcome_of(self, serial: int, unknown: int = -1) -> int:
        """What a reader has told of this binding; `unknown` where none has, or it was long ago."""
        told = self._outcomes[serial % OUTCOMES]
        return told & _OUTCOME_MASK if told >> _OUTCOME_BITS == serial else unknown

    def ended_before(self, serial: int, within: int) -> bool:
        """Whether a reader has served the whole value of this binding, which ends before that byte. What is
        stored under its key by now may be longer, and is no part of what was served."""
        if self.outcome_of(serial) < 0:
            return False
        ordering_fence()
        return 0 < self._lengths[serial % OUTCOMES] <= within

    def may_have_ended(self, serial: int, within: int) -> bool:
        """The same as far as is known: a later binding may have the place of this one."""
        is_forgotten = self._outcomes[serial % OUTCOMES] >> _OUTCOME_BITS > serial
        return is_forgotten or self.ended_before(serial, within)

    def mark(self, key: bytes) -> None:
        """The first process is bringing the key's value into its memory: it serves the next get."""
        self._marks[zlib.crc32(key) % MARKS] = 1

    def take_mark(self, key: bytes) -> bool:
        """Whether the get of this key is the first process'. Another key may have the same mark."""
        at = zlib.crc32(key) % MARKS
        if not self._marks[at]:
            return False
        self._marks[at] = 0
        return True


def shared_words() -> int:
    """A descriptor of new shared memory for one guest. Raises OSError."""
    return shared_memory("g35-guest-sessions", TOTAL_BYTES)
