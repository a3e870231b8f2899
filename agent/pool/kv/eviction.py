"""Making room in a full KV namespace: which values go.

A namespace that is full says so (Capacity Exceeded). Since the volume has it to itself, that is the one
moment at which values have to go, and only where the volume as a whole is nine tenths full. A put whose
namespace ran full before the others is refused instead, so that live data stay.

A sample of the keys, from as good as a random place on, is looked at by their headers. First goes what
does not prove to be a value of this volume at all, then what has expired, then what was used longest ago, as
far as this agent knows of uses, or stored longest ago. So the victim is the oldest of a few and not of all,
which costs a little of the hit ratio and no memory.
"""

from typing import NamedTuple

from agent.pool.counters import MissCause
from agent.pool.format.directory import KEY_BYTES
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.kv.commands import PROOF_KEY, RESERVED_KEY, KvChannel
from agent.pool.kv.volume import LIVE_FULL, KvVolume, room_of
from agent.pool.late_answers import wait_for
from agent.pool.steps import Steps
from nvmeof.errors import MalformedPdu
from nvmeof.wire.kv import decode_key_list_untrusted

SAMPLE = 8
LIST_BYTES = 4 + 20 * (SAMPLE + 1)


class _Victim(NamedTuple):
    """One key of a sample; the smallest goes first."""

    rank: int
    """0 what proves nothing, 1 what has expired, 2 what is alive."""
    used_us: int
    pseudonym: bytes
    room: int


def make_room(
    volume: KvVolume, channel: KvChannel, namespace: int, pseudonym: bytes, room: int, deadline: float
) -> Steps[bool]:
    """Delete values of a full namespace until `room` bytes should be free. False: none may go, or could.

    `pseudonym` is the key that wants the room; the place of the sample follows from it.
    """
    keys = yield from _sample(channel, namespace, volume.placement.pseudonym(pseudonym), deadline)
    wall = channel.wall()
    victims: list[_Victim] = []
    for key in keys:
        victim = yield from _judge(volume, channel, namespace, key, wall, deadline)
        if victim is not None:
            victims.append(victim)
    may_take_live = volume.fullness(channel) >= LIVE_FULL
    freed = 0
    for victim in sorted(victims):
        if freed >= room or (victim.rank == 2 and not may_take_live):
            break
        pending = channel.kv_delete(namespace, victim.pseudonym)
        cause = yield from wait_for(channel, pending, deadline)
        if pending.missing:
            continue  # somebody else was quicker
        if cause is not None:
            break
        freed += victim.room
        volume.accounts[namespace].add(channel, namespace, -victim.room)
        volume.uses.forget(victim.pseudonym)
        tally = channel.tally(volume.settings.name)
        if victim.rank == 2:
            tally.evictions += 1
            volume.evicted.note(victim.pseudonym, 1)
        else:
            tally.evictions_expired += 1
    return freed > 0


def _sample(channel: KvChannel, namespace: int, start: bytes, deadline: float) -> Steps[list[bytes]]:
    """Up to SAMPLE keys that lie beside each other; they are random, for keys are pseudonyms."""
    found: list[bytes] = []
    for first in (start, b""):
        into = memoryview(bytearray(LIST_BYTES))
        cause = yield from wait_for(channel, channel.kv_list(namespace, first, into), deadline)
        if cause is not None:
            return []
        try:
            keys = decode_key_list_untrusted(into)
        except MalformedPdu:
            return []
        found += [key for key in keys if key not in (RESERVED_KEY, PROOF_KEY, *found)]
        if len(found) >= SAMPLE:
            break
    return found[:SAMPLE]


def _judge(
    volume: KvVolume, channel: KvChannel, namespace: int, pseudonym: bytes, wall: float, deadline: float
) -> Steps[_Victim | None]:
    """What is known of a value; None where it is gone or cannot be read now."""
    header = memoryview(bytearray(HEADER_BYTES))
    pending = channel.kv_retrieve(namespace, pseudonym, header)
    cause = yield from wait_for(channel, pending, deadline)
    room = room_of(pending.value_bytes)
    if cause is not None:
        damaged = cause is MissCause.CORRUPT and not pending.missing
        return _Victim(0, 0, pseudonym, room) if damaged else None
    if len(pseudonym) != KEY_BYTES or pending.received < HEADER_BYTES:
        return _Victim(0, 0, pseudonym, room)
    key = volume.placement.key_of(pseudonym)
    opened = volume.codec.open(header, key, volume.place(namespace, pseudonym))
    if isinstance(opened, MissCause):
        return _Victim(0, 0, pseudonym, room)
    if opened.expiry and opened.expiry <= wall:
        return _Victim(1, opened.expiry, pseudonym, room)
    return _Victim(2, max(opened.stored_us, volume.uses.get(pseudonym) or 0), pseudonym, room)
