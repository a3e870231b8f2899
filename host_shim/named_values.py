"""Values under names of any length: what the engines' connectors store and load blocks with.

A key of the pool has 128 bits, an engine's name of a block more. So every value begins with a label: the
name's hash at 256 bits and the value's length. A load whose label differs is a miss: two names that meet at
one key, or a value that broke off, are never taken for the block.

Layout of the label, little-endian:
     0  4  magic "g35v"
     4  4  version
     8  8  length of what follows the label
    16 32  BLAKE2b of the name, 256 bits
    48 16  zero
Label and block are one value of the pool, moved by one system call; so a slot has to be `LABEL_BYTES` longer
than a block. Nothing here raises for the pool's sake: an engine's scheduler must live on without its cache.
"""

import errno
import hashlib
import logging
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from host_shim.arguments import Buffer, bytes_of
from host_shim.connector_jobs import within
from host_shim.connector_options import ConnectorOptions
from host_shim.control_session import Session
from host_shim.control_wire import (
    KEYS_MAX,
    TICKETS_MAX,
    VALUE_BYTES_MAX,
    Outcome,
    PrefixReport,
    key_of_long_name,
    name_of,
)
from host_shim.pool import Pool, UnknownVolume, ValueTooLong, whole_seconds
from host_shim.prefix_records import Speeds, leading_hits
from host_shim.session_files import Refusal

__all__ = ["LABEL_BYTES", "NamedValues", "key_of_long_name", "label_of", "name_of"]

_log = logging.getLogger(__name__)

_LABEL = struct.Struct("<4sIQ32s16x")
LABEL_BYTES = 64
assert _LABEL.size == LABEL_BYTES
LABEL_MAGIC = b"g35v"
LABEL_VERSION = 1
_BATCH_MAX = min(KEYS_MAX, TICKETS_MAX)
_COMPLAINTS_MAX = 16
CHECK_SECONDS = 5.0
WARN_AGAIN_SECONDS = 600.0
"""How often it is said again that there never was a pool behind the mount."""
T = TypeVar("T")


def label_of(name: bytes, length: int) -> bytes:
    """What a value of `length` bytes begins with."""
    return _LABEL.pack(LABEL_MAGIC, LABEL_VERSION, length, _proof_of(name))


def _proof_of(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=32, person=b"g35 label").digest()


class NamedValues:
    """One volume of a pool by long names. Any thread; every call may wait for the pool."""

    def __init__(self, pool: Pool, volume: str, ttl: float | None = None) -> None:
        self._pool = pool
        self.mount = pool.mount
        self._volume = pool.volume(volume)
        self._ttl_seconds = whole_seconds(ttl)
        self._warn_again_at = -math.inf
        self._complaints: set[str] = set()
        self._own = threading.local()
        self._reports = True
        self.agent_seen = False
        """Whether the last call found an agent; for status pages, which must not wait."""

    @classmethod
    def opened(cls, options: ConnectorOptions, block_bytes: int = 0) -> "NamedValues":
        """A connector's values. ValueError says what a person has to change. Waits CHECK_SECONDS at most."""
        values = cls(Pool(options.mount, parallel=options.parallel), options.volume, options.ttl)
        why = within(CHECK_SECONDS, lambda: values.why_unusable(block_bytes), None)
        if why is not None:
            values.close()
            raise ValueError(why)
        return values

    def beside(self, volume: str) -> "NamedValues":
        """Another volume's values by the same sessions, which close with these. ValueError as in `opened`."""
        values = NamedValues(self._pool, volume, self._ttl_seconds or None)
        why = within(CHECK_SECONDS, values.why_unusable, None)
        if why is not None:
            raise ValueError(why)
        return values

    def close(self) -> bool:
        return self._pool.close()

    def why_unusable(self, block_bytes: int = 0) -> str | None:
        """What a person has to change before blocks of this length can be stored; None also without an
        agent."""
        try:
            found = self._volume.stats()
        except UnknownVolume as unknown:
            return str(unknown)
        self.agent_seen = bool(found)
        self._warn_of_no_pool()
        kind = found.get("kind", "kv")
        if kind != "kv":
            return f"volume {self._volume.name!r} is of kind {kind}; blocks go into one of kind kv"
        room = int(found.get("value_bytes", VALUE_BYTES_MAX)) - LABEL_BYTES
        if block_bytes > room:
            return (
                f"a block of {block_bytes} bytes and its label of {LABEL_BYTES} do not fit into the slots of "
                f"volume {self._volume.name!r}: {room + LABEL_BYTES} bytes"
            )
        return None

    def store(self, names: Sequence[bytes], values: Sequence[Sequence[Buffer | bytes]]) -> list[bool]:
        """Store values, each given as the parts it consists of; which of them are on flash now."""
        whole = _all_views(names, values)
        stored: list[bool] = []
        for start in range(0, len(names), _BATCH_MAX):
            end = start + _BATCH_MAX
            stored += self._store_batch(names[start:end], whole[start:end])
        return stored

    def load(
        self, names: Sequence[bytes], rooms: Sequence[Sequence[Buffer]], *, exact: bool = True
    ) -> list[int | None]:
        """Load values into the parts of their rooms, one after another; their lengths, None for a miss.

        After a miss the room may hold anything. With `exact` a value shorter than its room is a miss. A value
        of another name or length is deleted: the first write wins, so the block could never be stored beside
        it.
        """
        whole = _all_views(names, rooms)
        if any(part.readonly for room in whole for part in room):
            raise TypeError("the room of a load must be writable")
        found: list[int | None] = []
        for start in range(0, len(names), _BATCH_MAX):
            end = start + _BATCH_MAX
            found += self._load_batch(names[start:end], whole[start:end], exact)
        return found

    def exists(self, names: Sequence[bytes], *, prestage: bool = False) -> list[bool]:
        """Which names have a value, in one round trip; only `load` proves that it is the name's own.

        `prestage`: and have the agent bring those into its memory.
        """
        return [each is Outcome.HIT for each in self.lookup(names, prestage=prestage)]

    def lookup(self, names: Sequence[bytes], *, prestage: bool = False) -> list[Outcome | None]:
        """As `exists`, with the cause where a name has no value; None where no agent was there to say."""
        found = self._ask_all(self._volume.lookup, names, None)
        if prestage and Outcome.HIT in found:
            self.prestage([name for name, one in zip(names, found, strict=True) if one is Outcome.HIT])
        return found

    def lookup_leading(self, names: Sequence[bytes], *, prestage: bool = False) -> list[Outcome | None]:
        """As `lookup`, up to the first hole and, behind it, as far as one request goes. What lies further
        is not asked for, and has UNKNOWN."""
        found: list[Outcome | None] = []
        for start in range(0, len(names), _BATCH_MAX):
            found += self.lookup(names[start : start + _BATCH_MAX])
            if any(each is not Outcome.HIT for each in found):
                break
        run = leading_hits(found)
        if prestage and run:
            self.prestage(names[:run])
        return found + [Outcome.UNKNOWN] * (len(names) - len(found))

    def speeds(self) -> Speeds:
        """What the agent's recompute gate measured and was told; empty where it has none."""
        try:
            gate = self._volume.stats().get("gate") or {}
            return Speeds(gate.get("bytes_per_s"), gate.get("recomputed_bytes_per_s"))
        except (Refusal, LookupError, RuntimeError, AttributeError):
            return Speeds()

    def report(self, reports: Sequence[PrefixReport]) -> None:
        """Tell the agent what became of requests. An agent that does not take it is not told again."""
        try:
            self._reports = self._reports and self._volume.report(reports)
        except (LookupError, RuntimeError):
            self._reports = False

    def prestage(self, names: Sequence[bytes]) -> list[bool]:
        """Ask the agent to bring values into its memory; which are there or on their way."""
        return self._ask_all(self._volume.prestage, names, False)

    def forget(self, names: Sequence[bytes]) -> list[bool]:
        """Delete values; which of them were there."""
        return self._ask_all(self._volume.delete, names, False)

    def room(self, size: int) -> memoryview:
        """Memory for blocks into which an agent on this machine puts them itself (`Pool.memory`)."""
        return self._pool.memory(size)

    def _label(self) -> memoryview:
        """This thread's room for a label: beside blocks in registered memory it has to be in such, too."""
        found: memoryview | None = getattr(self._own, "label", None)
        if found is None:
            found = self._own.label = self._pool._memory.small(LABEL_BYTES)
        return found

    def _ask_all(self, ask: Callable[[Sequence[bytes]], list[T]], names: Sequence[bytes], none: T) -> list[T]:
        try:
            found = ask([key_of_long_name(name) for name in names])
            self._warn_of_no_pool()
            return found
        except (Refusal, LookupError, RuntimeError) as refused:
            self._complain(refused)
            return [none] * len(names)

    def _store_batch(self, names: Sequence[bytes], values: Sequence[list[memoryview]]) -> list[bool]:
        stored = [False] * len(names)
        wanted = [index for index, value in enumerate(values) if _fits(value)]
        if len(wanted) < len(values):
            self._complain(ValueTooLong(f"a block is empty, or longer than {VALUE_BYTES_MAX - LABEL_BYTES}"))

        def move(session: Session) -> None:
            bound = self._bound(session, wanted, names, values)

            def write(ticket: int) -> None:
                if session.dead:
                    return
                at = bound[ticket]
                label = self._label()
                label[:] = label_of(names[at], _length(values[at]))
                try:
                    session.write_parts(ticket, [label, *values[at]])
                except Refusal:
                    return  # what this value's enclosure says of it; the others go on
                stored[at] = True

            self._pool._share(write, len(bound))

        self._on_session(move)
        return stored

    def _on_session(self, move: Callable[[Session], None]) -> None:
        """Call `move` with a session, if there is an agent. What the pool refuses is logged."""
        try:
            with (loan := self._pool._lender.lend()), loan as session:
                self.agent_seen = session is not None
                if session is None:
                    self._warn_of_no_pool()
                    return
                lent = session
                move(lent)
            self.agent_seen = not lent.dead
        except (Refusal, RuntimeError) as refused:
            self._complain(refused)

    def _bound(
        self,
        session: Session,
        wanted: list[int],
        names: Sequence[bytes],
        values: Sequence[list[memoryview]],
    ) -> list[int]:
        """Bind tickets to the values at `wanted` that fit; which these are."""
        keys = [key_of_long_name(names[at]) for at in wanted]
        whole = [_length(values[at]) + LABEL_BYTES for at in wanted]
        fitting = session.bind_writes_that_fit(self._volume.name, keys, whole, self._ttl_seconds)
        if len(fitting) < len(wanted):
            self._complain(OSError(errno.EFBIG, "a block is longer than the slots"))
        return [wanted[number] for number in fitting]

    def _load_batch(
        self, names: Sequence[bytes], rooms: Sequence[list[memoryview]], exact: bool
    ) -> list[int | None]:
        found: list[int | None] = [None] * len(names)
        strange: list[bytes] = []

        def move(session: Session) -> None:
            def read(ticket: int) -> None:
                if session.dead:
                    return
                label = self._label()
                try:
                    length, proved = _read_one(session, ticket, names[ticket], label, rooms[ticket])
                except Refusal as refused:
                    self._complain(refused)
                    return  # the others go on
                if proved and (not exact or length == _length(rooms[ticket])):
                    found[ticket] = length
                elif proved is not None:
                    strange.append(names[ticket])

            session.bind_reads(self._volume.name, [key_of_long_name(name) for name in names])
            self._pool._share(read, len(names))

        self._on_session(move)  # after an agent's end too: a value that was whole before carries its proof
        if strange:
            self.forget(strange)
        return found

    def _warn_of_no_pool(self) -> None:
        """Seldom, while there never was an agent: a mount that is mistyped must not go unseen for ever."""
        lender = self._pool._lender
        now = time.monotonic()
        if lender.reached or lender.closed or not lender.why_not or now < self._warn_again_at:
            return
        self._warn_again_at = now + WARN_AGAIN_SECONDS
        _log.warning(
            "no g35 pool at %s, so no block is stored or found until there is one: %s",
            self._pool.mount,
            lender.why_not,
        )

    def _complain(self, refused: Exception) -> None:
        """Once for each kind of refusal: an engine stores thousands of blocks a second."""
        text = os.strerror(refused.errno) if isinstance(refused, OSError) and refused.errno else str(refused)
        if text not in self._complaints and len(self._complaints) < _COMPLAINTS_MAX:
            self._complaints.add(text)
            _log.warning("volume %s of the g35 pool refuses blocks: %s", self._volume.name, text)


def _read_one(
    session: Session, ticket: int, name: bytes, label: memoryview, room: list[memoryview]
) -> tuple[int, bool | None]:
    """How many bytes of a value came, and whether they are the name's value, whole.

    None where that cannot be said (nothing came, or it broke off), False where the value is another one.
    """
    got = session.read_parts(ticket, [label, *room]) - LABEL_BYTES
    if got <= 0:
        return 0, None
    magic, version, length, proof = _LABEL.unpack(label)
    if magic != LABEL_MAGIC or version != LABEL_VERSION:
        return 0, None  # not ours to judge, and not ours to delete
    if proof != _proof_of(name) or length > _length(room):
        return 0, False
    return got, True if got == length else None


def _all_views(names: Sequence[bytes], values: Sequence[Sequence[Buffer | bytes]]) -> list[list[memoryview]]:
    """Raises ValueError and TypeError, before anything has moved."""
    if len(names) != len(values):
        raise ValueError(f"{len(names)} names and {len(values)} values")
    return [[bytes_of(part) for part in parts] for parts in values]


def _length(parts: Sequence[memoryview]) -> int:
    return sum(len(part) for part in parts)


def _fits(value: Sequence[memoryview]) -> bool:
    return 0 < _length(value) <= VALUE_BYTES_MAX - LABEL_BYTES
