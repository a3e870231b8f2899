"""A put to a KV namespace: the whole slot is one Store, and acknowledged is stored.

Read write/put.py first. A Store is all or nothing: there is no order to keep, nothing to reserve and nothing
that a crash could leave half done. The price is that a value in pieces waits in memory for its last one;
puts_in_pieces.py bounds that memory.

The first write of a key wins: the Store asks for it ("only if absent"). Where the key has a value, its header
is looked at, and one that proves nothing or has expired is stored over.
"""

from typing import Final

from agent.inline.cipher_suites import PROOF_BYTES
from agent.pool.counters import MissCause
from agent.pool.errors import BadPut, PutRefused
from agent.pool.format.sealed_slot import HEADER_BYTES, new_generation
from agent.pool.kv.commands import KvPending, kv_channel
from agent.pool.kv.eviction import make_room
from agent.pool.kv.volume import KvVolume, room_of
from agent.pool.late_answers import wait_for
from agent.pool.steps import IoChannel, Steps
from agent.pool.write.writer_base import PutState, Writer

STORE_TRIES: Final = 4
"""The tries of one store. An eviction makes room before each try but the first, and others may take that
room."""
RANGES_MAX: Final = 256
"""Parts of a value that have come and do not touch. Each write looks at all of them."""


class KvWriter(Writer):
    """One value for a volume on KV namespaces, being written."""

    def __init__(
        self, volume: KvVolume, key: bytes, *, length: int | None = None, ttl_seconds: int = 0
    ) -> None:
        super().__init__(volume, key, length=length, ttl_seconds=ttl_seconds)
        self._volume: Final = volume
        self.namespace: Final = volume.namespace_of(self.pseudonym)
        self._pieces = bytearray()
        self._ranges: list[tuple[int, int]] = []

    def _take(self, channel: IoChannel, offset: int, data: memoryview, deadline: float) -> Steps[None]:
        end = offset + len(data)
        if self._state is PutState.NEW:
            self._enter(PutState.TAKING)
        if any(start < end and offset < stop for start, stop in self._ranges):
            self._refuse(channel, BadPut("bytes of a value are written once"))
        self._end = max(self._end, end)
        if len(data) == self._length:
            yield from self._put(channel, data, deadline)
            return
        if len(self._pieces) < end:
            self._pieces.extend(bytes(end - len(self._pieces)))
        self._pieces[offset:end] = data
        self._note(offset, end)
        if len(self._ranges) > RANGES_MAX:
            why = f"a value in more than {RANGES_MAX} parts with holes between them"
            self._refuse(channel, BadPut(why))
        channel.tally(self._volume.settings.name).bytes_copied += len(data)
        if self._length is not None and self._ranges == [(0, self._length)]:
            yield from self._complete(channel, deadline)
        else:
            self._wait_for_more(channel, self._length or self._volume.settings.value_bytes)

    def _complete(self, channel: IoChannel, deadline: float) -> Steps[None]:
        if self._ranges != [(0, self._end)] or (self._length is not None and self._end != self._length):
            self._refuse(channel, BadPut(f"a value of {self._length or self._end} bytes with a hole in it"))
        if refusal := self._volume.refusal:
            self._refuse(channel, PutRefused(refusal, MissCause.WRONG_KEY))
        yield from self._put(channel, memoryview(self._pieces), deadline)

    def _release(self) -> None:
        self._pieces = bytearray()
        super()._release()

    def _note(self, start: int, end: int) -> None:
        """Remember that a range has come; ranges that touch become one."""
        joined: list[tuple[int, int]] = []
        for begin, stop in sorted([*self._ranges, (start, end)]):
            if joined and joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((begin, stop))
        self._ranges = joined

    def _put(self, channel: IoChannel, data: memoryview, deadline: float) -> Steps[None]:
        volume = self._volume
        if volume.bandwidth is not None and not (yield from volume.bandwidth.admit(channel, deadline)):
            self._refuse(channel, PutRefused("the tenant's bandwidth is used up", MissCause.LATE))
        if not (yield from volume.key_locks.take(self.pseudonym, deadline)):
            why = "another put of the key does not come to its end"
            self._refuse(channel, PutRefused(why, MissCause.LATE))
        try:
            is_new = yield from self._store(channel, data, deadline)
        except PutRefused as refused:
            self._refuse(channel, refused)
        finally:
            volume.key_locks.end(self.pseudonym)
        if is_new:
            self._count_stored(channel, len(data))
        else:
            self._found_there(channel)

    def _store(self, channel: IoChannel, data: memoryview, deadline: float) -> Steps[bool]:
        """Seal, and store until it is in. False: the key has a value. Raises PutRefused."""
        volume = self._volume
        account = volume.accounts[self.namespace]
        only_new = volume.disproven.get(self.pseudonym) is None
        for _ in range(STORE_TRIES):
            slot = self._seal(channel, data)
            pending = kv_channel(channel).kv_store(self.namespace, self.pseudonym, [slot], only_new=only_new)
            cause = yield from wait_for(channel, pending, deadline)
            if cause is None:
                if only_new:
                    account.add(kv_channel(channel), self.namespace, room_of(len(slot)))
                volume.disproven.forget(self.pseudonym)
                volume.evicted.forget(self.pseudonym)
                volume.uses.note(self.pseudonym, int(channel.wall() * 1e6))
                return True
            if pending.present:
                if (yield from self._is_live(channel, deadline)):
                    return False
                only_new = False
            elif pending.full:
                yield from self._make_room(channel, room_of(len(slot)), deadline)
            else:
                if cause is not MissCause.CORRUPT:
                    volume.in_doubt_writes.note(self.pseudonym, channel.now())
                raise PutRefused(f"the enclosure did not take it: {_why(pending)}", cause)
        raise PutRefused(f"volume {volume.settings.name} has no room for this key")

    def _make_room(self, channel: IoChannel, room: int, deadline: float) -> Steps[None]:
        volume = self._volume
        volume.accounts[self.namespace].is_full()
        made = yield from make_room(
            volume, kv_channel(channel), self.namespace, self.pseudonym, room, deadline
        )
        if not made:
            raise PutRefused(f"volume {volume.settings.name} has no room for this key that may be made")

    def _seal(self, channel: IoChannel, data: memoryview) -> memoryview:
        """The whole slot, in the worker's own buffer. Each try has a salt and a generation of its own."""
        volume, wall = self._volume, channel.wall()
        place = volume.place(self.namespace, self.pseudonym)
        sealer = volume.codec.seal(self.key, new_generation(wall), place)
        size = HEADER_BYTES + volume.codec.padded(len(data))
        buffer = channel.send_buffer(size + PROOF_BYTES)
        sealer.seal(0, data, buffer[HEADER_BYTES:])
        sealer.header_into(buffer, len(data), self._expiry(wall), int(wall * 1e6))
        return buffer[:size]

    def _is_live(self, channel: IoChannel, deadline: float) -> Steps[bool]:
        """Whether the value that the key has is one. Raises PutRefused where that cannot be told."""
        header = channel.receive_buffer(HEADER_BYTES)
        pending = kv_channel(channel).kv_retrieve(self.namespace, self.pseudonym, header)
        cause = yield from wait_for(channel, pending, deadline)
        if pending.missing or cause is MissCause.CORRUPT:
            return False
        if cause is not None:
            raise PutRefused(f"the enclosure did not tell what it has: {_why(pending)}", cause)
        if pending.received < HEADER_BYTES:
            return False
        place = self._volume.place(self.namespace, self.pseudonym)
        opened = self._volume.codec.open(header, self.key, place)
        if isinstance(opened, MissCause):
            return False
        return not opened.expiry or opened.expiry > channel.wall()


def _why(pending: KvPending) -> str:
    return pending.fault or "no answer in time"


def delete_key(volume: KvVolume, channel: IoChannel, key: bytes, deadline: float) -> Steps[bool]:
    """Remove a key. True where it was there.

    Raises PutRefused where its enclosure does not answer, or a write of the key may still land.
    """
    pseudonym = volume.placement.pseudonym(key)
    if volume.in_doubt_writes.may_land(pseudonym, channel.now()):
        raise PutRefused("a write of the key was not answered and may still land", MissCause.LATE)
    namespace = volume.namespace_of(pseudonym)
    asking = kv_channel(channel)
    pending = asking.kv_delete(namespace, pseudonym)
    cause = yield from wait_for(channel, pending, deadline)
    if pending.missing:
        return False
    if cause is not None:
        raise PutRefused("the enclosure did not delete it", cause)
    # How long it was nobody says; reckoned as the longest, the volume counts as emptier than it is, and
    # evicts later than it might.
    slot = room_of(HEADER_BYTES + volume.settings.value_bytes)
    volume.accounts[namespace].add(asking, namespace, -slot)
    volume.uses.forget(pseudonym)
    volume.disproven.forget(pseudonym)
    channel.tally(volume.settings.name).deletes += 1
    return True
