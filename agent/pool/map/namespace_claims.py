"""A claim on a namespace that joins: of two pools that find the same one blank, at most one takes it.

Clearing the directories of a newcomer takes seconds, and until the map names it nothing there says whose it
is. So a pool first writes a claim over both places of the superblock copies, each right after a look that
finds the first look's content there, and then reads both again. Only a pool that finds its own claim in both
goes on to clear. It looks again before each batch, and right before the map is published.

At most one of two pools finds its own in both, whatever the speed of either. Say that A and B do. Of the
first place one wrote last; let it be B. Then B looked at it before A wrote there, or it would have seen A's
claim, and wrote after A had read it again. By then A had written both; B looks at the second place after
that, finds A's claim, and gives way. Where neither finds its own in both, each takes back the claims of its
own that it still finds, and tries again after a random pause.

A program that stops after its look and writes much later spoils one of the two places: it looks at the second
before it writes there. One copy of the superblock is enough, and the next change of the map writes both. The
next `g35 pool add` of its pool completes the claim of a program that died; another pool takes the namespace
by name and force.

Layout of the claim, in the first 128 bytes of a block of 4,096; little-endian:
     0  8  magic "g35claim"
     8  2  version of this layout
    10  6  zero
    16 16  id of the pool
    32 16  NGUID of the namespace
    48 48  zero
    96 32  SHA-256 of the 96 bytes before
   128  …  zero
"""

import hashlib
import random
import struct
import time
from collections.abc import Mapping, Sequence, Set

from agent.errors import G35Error
from agent.pool.counters import MissCause
from agent.pool.late_answers import wait_for
from agent.pool.map.superblock import BLOCK_BYTES, COPY_OFFSETS, HEAD_BYTES, MAGIC, MAP_IO_SECONDS
from agent.pool.steps import IoChannel, Steps
from agent.pool.write.flush_tracking import until_flushed

CLAIM_MAGIC = b"g35claim"
LAYOUT_VERSION = 1
TRIES = 5
PAUSE_SECONDS = 0.3
"""Between tries at the most, times the number of the try: longer than the few reads and writes of one."""

_HEAD = struct.Struct("<8sH6s16s16s48s32s")
assert _HEAD.size == HEAD_BYTES


class Taken(G35Error):
    """Another pool has the namespace, or is about to."""

    def __init__(self, nguid: bytes, head: bytes) -> None:
        other = claimed_by(head, nguid)
        if other:
            said = f"is being taken by pool {other}"
        elif head[:8] == MAGIC:
            said = f"belongs to pool {head[16:32].hex()}"
        else:
            said = "is no longer what it was" if any(head) else "is claimed by this pool no longer"
        super().__init__(
            f"namespace {nguid.hex()} {said}; it does not join",
            "see g35 pool show; a claim that its pool has given up is overwritten by naming the namespace to "
            "g35 pool add with --force",
        )
        self.is_passing = bool(other) or not any(head)
        """Whether the other may still give way."""


def claim_head(pool_id: str, nguid: bytes) -> bytes:
    head = _HEAD.pack(
        CLAIM_MAGIC, LAYOUT_VERSION, bytes(6), bytes.fromhex(pool_id), nguid, bytes(48), bytes(32)
    )
    return head[:96] + hashlib.sha256(head[:96]).digest()


def claimed_by(head: bytes | memoryview, nguid: bytes) -> str:
    """The id of the pool that claims the namespace by the head of a block; empty where there is no claim."""
    head = bytes(head[:HEAD_BYTES])
    pool_id = head[16:32].hex()
    return pool_id if len(head) == HEAD_BYTES and head == claim_head(pool_id, nguid) else ""


def claim_namespaces(
    channel: IoChannel,
    pool_id: str,
    nguids: Sequence[bytes],
    numbers: Mapping[str, int],
    overwrite: Set[str] = frozenset(),
) -> Steps[None]:
    """Claim all of them for a pool. `overwrite` has those (NGUIDs as hex) that may carry something else.

    Raises Taken where another pool has one or takes it now, and takes its own claims back; G35Error for a
    failed read or write.
    """
    ours: list[tuple[bytes, int]] = []
    # In one order for all: the loser of the first does not take the second.
    for nguid in sorted(nguids):
        for attempt in range(TRIES):
            if attempt:
                time.sleep(random.uniform(0, PAUSE_SECONDS * attempt))
            try:
                ours += yield from _claim(
                    channel, pool_id, nguid, numbers[nguid.hex()], nguid.hex() in overwrite
                )
                break
            except Taken as taken:
                if attempt == TRIES - 1 or not taken.is_passing:
                    yield from _take_back(channel, pool_id, ours, numbers)
                    raise


def want_claimed(
    channel: IoChannel, pool_id: str, nguids: Sequence[bytes], numbers: Mapping[str, int], places: int = 2
) -> Steps[None]:
    """Raises Taken where one of them carries neither the claim nor a map of the pool in its places."""
    for nguid in nguids:
        for which in range(places):
            head = yield from _head(channel, nguid, numbers[nguid.hex()], which)
            if not _is_ours(head, pool_id, nguid):
                raise Taken(nguid, head)


def heads_of(channel: IoChannel, nguid: bytes, number: int) -> Steps[Sequence[bytes]]:
    """What lies in the places of the claims now, for `want_unchanged`."""
    heads = []
    for which in range(len(COPY_OFFSETS)):
        heads.append((yield from _head(channel, nguid, number, which)))
    return heads


def want_unchanged(channel: IoChannel, nguid: bytes, number: int, heads: Sequence[bytes]) -> Steps[None]:
    """Raises Taken where somebody has written there since. For a format, which makes no claim: after a format
    that is cut short there is no pool whose next try would complete it."""
    for which, before in enumerate(heads):
        head = yield from _head(channel, nguid, number, which)
        if head != before:
            raise Taken(nguid, head)


def _claim(
    channel: IoChannel, pool_id: str, nguid: bytes, number: int, may_overwrite: bool
) -> Steps[list[tuple[bytes, int]]]:
    """The places that were written. Raises Taken once they are taken back."""
    expected = []
    for which in range(len(COPY_OFFSETS)):
        head = yield from _head(channel, nguid, number, which)
        if any(head) and not may_overwrite and not _is_ours(head, pool_id, nguid):
            raise Taken(nguid, head)
        expected.append(head)
    written: list[tuple[bytes, int]] = []
    try:
        for which, before in enumerate(expected):
            head = yield from _head(channel, nguid, number, which)
            if _is_ours(head, pool_id, nguid):
                continue
            if head != before:
                raise Taken(nguid, head)
            yield from _write(channel, nguid, number, which, claim_head(pool_id, nguid))
            written.append((nguid, which))
        yield from want_claimed(channel, pool_id, [nguid], {nguid.hex(): number})
    except Taken:
        yield from _take_back(channel, pool_id, written, {nguid.hex(): number})
        raise
    return written


def _take_back(
    channel: IoChannel, pool_id: str, written: Sequence[tuple[bytes, int]], numbers: Mapping[str, int]
) -> Steps[None]:
    for nguid, which in written:
        number = numbers[nguid.hex()]
        head = yield from _head(channel, nguid, number, which)
        if claimed_by(head, nguid) == pool_id:
            yield from _write(channel, nguid, number, which, b"")


def _is_ours(head: bytes, pool_id: str, nguid: bytes) -> bool:
    """Whether it is the claim of a pool, or a superblock of it: another program of the pool was first."""
    is_superblock = head[:8] == MAGIC and head[16:48] == bytes.fromhex(pool_id) + nguid
    return is_superblock or claimed_by(head, nguid) == pool_id


def _head(channel: IoChannel, nguid: bytes, number: int, which: int) -> Steps[bytes]:
    """Nothing where the medium is bad: a write may mend it."""
    block = memoryview(bytearray(BLOCK_BYTES))
    reading = channel.read(number, COPY_OFFSETS[which], block)
    cause = yield from wait_for(channel, reading, channel.now() + MAP_IO_SECONDS)
    if cause is MissCause.CORRUPT:
        return b""
    if cause is not None:
        raise G35Error(
            f"cannot read who claims namespace {nguid.hex()}: {reading.fault or 'no answer'}",
            "look at the enclosure, and say it again",
        )
    return bytes(block[:HEAD_BYTES])


def _write(channel: IoChannel, nguid: bytes, number: int, which: int, head: bytes) -> Steps[None]:
    block = head.ljust(BLOCK_BYTES, b"\0")
    pending = channel.write(number, COPY_OFFSETS[which], [block])
    fault = yield from until_flushed(channel, number, pending, MAP_IO_SECONDS)
    if fault is not None:
        raise G35Error(
            f"cannot write the claim on namespace {nguid.hex()}: {fault}",
            "look at the enclosure, and say it again",
        )
