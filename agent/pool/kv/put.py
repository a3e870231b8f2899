"""Writing values of a volume on KV namespaces: the whole slot is one Store, and acknowledged is stored.

Read write/put.py first; a `KvWriting` serves the same calls. A Store is all or nothing, so that there is no
order to keep, nothing to reserve and nothing that a crash could leave half done. The price is that a value
which comes in pieces waits in memory until its last one; partial_puts.py bounds what waits.

The first write of a key wins, as everywhere: the Store asks for it ("only if absent"). Where the key has a
value, its header is looked at, and one that proves nothing or has expired is stored over.
"""

from __future__ import annotations

from typing import Final

from agent.inline.suites import PROOF_BYTES
from agent.pool.counters import MissCause
from agent.pool.errors import BadPut, PutRefused, TooLong
from agent.pool.format.directory import TIME_MAX
from agent.pool.format.slot import HEADER_BYTES, new_generation
from agent.pool.kv.commands import KvPending, kv_lanes
from agent.pool.kv.eviction import make_room
from agent.pool.kv.volume import KvVolume, room_of, wait_for_key
from agent.pool.steps import Lanes, Steps
from agent.pool.volume.partial_puts import GIVEN_UP, TOO_MANY, PartialPut

STORE_TRIES: Final = 4
"""With room made before each but the first; between the two others may take it."""
RANGES_MAX: Final = 256
"""Parts of a value that have come and do not touch. Each write looks at all of them."""


class KvWriting(PartialPut):
    """One value being written. `length` where it is known from the start, None where close decides."""

    def __init__(
        self,
        volume: KvVolume,
        key: bytes,
        *,
        length: int | None = None,
        ttl_seconds: int = 0,
        may_evict: bool = True,
    ) -> None:
        if length is not None and not 0 < length <= volume.settings.value_bytes:
            raise TooLong(f"{length} bytes; {volume.settings.name} takes 1 to {volume.settings.value_bytes}")
        self.volume = volume
        self.key = key
        self.pseudonym = volume.placement.pseudonym(key)
        self.namespace = volume.namespace_of(self.pseudonym)
        self.already_there = False
        """The key was stored before: values are immutable, the first write wins."""
        self.finished = False
        self._length = length
        self._ttl_seconds = ttl_seconds or volume.settings.ttl_seconds
        self._may_evict = may_evict
        self._pieces = bytearray()
        self._ranges: list[tuple[int, int]] = []
        self._end = 0
        self._stored = False
        self._refusal: PutRefused | BadPut = BadPut("the put was given up")

    @property
    def stored(self) -> bool:
        """This put brought the value to flash, all of it."""
        return self._stored

    @property
    def received(self) -> int:
        """One past the last byte that came so far."""
        return self._end

    # -- the three calls of a put ---------------------------------------------------------------

    def write(self, lanes: Lanes, offset: int, data: memoryview, deadline: float) -> Steps[bool]:
        """Take bytes of the value. True when that completed a value of known length: it is on flash.

        Raises BadPut for bytes that do not fit, PutRefused where the value cannot be stored.
        """
        end = offset + len(data)
        limit = self._length if self._length is not None else self.volume.settings.value_bytes
        if end > limit:
            raise TooLong(f"bytes up to {end} of a value that ends at {limit}")
        if self.finished:
            self._refuse_after_failure()
            return True
        if not len(data):
            return False
        if self._waits:
            self._want_kept()
        if any(start < end and offset < stop for start, stop in self._ranges):
            self._give_up(BadPut("bytes of a value are written once"))
        self._end = max(self._end, end)
        if refusal := self.volume.refusal:
            lanes.tally(self.volume.settings.name).puts_refused += 1
            self._give_up(PutRefused(refusal, MissCause.WRONG_KEY))
        if len(data) == self._length:
            yield from self._put(lanes, data, deadline)
            return True
        if len(self._pieces) < end:
            self._pieces.extend(bytes(end - len(self._pieces)))
        self._pieces[offset:end] = data
        self._note(offset, end)
        if len(self._ranges) > RANGES_MAX:
            self._give_up(BadPut(f"a value in more than {RANGES_MAX} parts with holes between them"))
        lanes.tally(self.volume.settings.name).bytes_copied += len(data)
        if self._length is not None and self._ranges == [(0, self._length)]:
            yield from self.finish(lanes, deadline)
            return True
        held = self._length or self.volume.settings.value_bytes
        if not self._wait_for_more(self.volume.begun, self.volume.settings.volume_id, held, lanes):
            lanes.tally(self.volume.settings.name).puts_refused += 1
            self._give_up(PutRefused(TOO_MANY, MissCause.LATE))
        return False

    def finish(self, lanes: Lanes, deadline: float) -> Steps[None]:
        """The value is complete as it is: seal and store it.

        Raises again what an earlier call raised when it gave up: a put that failed must not end well.
        """
        if self.finished:
            self._refuse_after_failure()
            return
        if not self._end:
            self.finished = True
            return
        if self._waits:
            self._want_kept()
        if self._ranges != [(0, self._end)] or (self._length is not None and self._end != self._length):
            self._give_up(BadPut(f"a value of {self._length or self._end} bytes with a hole in it"))
        if refusal := self.volume.refusal:
            lanes.tally(self.volume.settings.name).puts_refused += 1
            self._give_up(PutRefused(refusal, MissCause.WRONG_KEY))
        try:
            yield from self._put(lanes, memoryview(self._pieces), deadline)
        finally:
            self._let_go()

    def drop(self, lanes: Lanes) -> Steps[None]:
        """Give up. Nothing of the value was sent, so nothing of it is anywhere."""
        yield from ()  # steps, of which there are none
        self.finished = True
        if not self._was_given_up(self.volume.begun, self.volume.settings.volume_id):
            self._let_go()

    def abandon(self, lanes: Lanes) -> None:
        lanes.tally(self.volume.settings.name).puts_refused += 1
        self._let_go()

    # -- how it is done -------------------------------------------------------------------------

    def _note(self, start: int, end: int) -> None:
        """Remember that a range has come; ranges that touch become one."""
        joined: list[tuple[int, int]] = []
        for begin, stop in sorted([*self._ranges, (start, end)]):
            if joined and joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((begin, stop))
        self._ranges = joined

    def _let_go(self) -> None:
        """What waited in memory is stored, or never will be."""
        self._pieces = bytearray()
        if self.held:
            held, self.held = self.held, 0
            self.volume.begun.give_back(held)

    def _want_kept(self) -> None:
        """Raises PutRefused where it was given up while it waited for its next piece."""
        if self._was_given_up(self.volume.begun, self.volume.settings.volume_id):
            self.finished, self._refusal = True, PutRefused(GIVEN_UP, MissCause.LATE)
            raise self._refusal

    def _give_up(self, why: PutRefused | BadPut) -> None:
        self._refusal = why
        self.finished = True
        self._let_go()
        raise why

    def _refuse_after_failure(self) -> None:
        if not self._stored and not self.already_there and self._end:
            raise self._refusal

    def _put(self, lanes: Lanes, data: memoryview, deadline: float) -> Steps[None]:
        tally = lanes.tally(self.volume.settings.name)
        bandwidth = self.volume.bandwidth
        if bandwidth is not None and not (yield from bandwidth.admit(lanes, deadline)):
            tally.puts_refused += 1
            self._give_up(PutRefused("the tenant's bandwidth is used up", MissCause.LATE))
        if not (yield from self.volume.turns.take(self.pseudonym, deadline)):
            tally.puts_refused += 1
            self._give_up(PutRefused("another put of the key does not come to its end", MissCause.LATE))
        try:
            yield from self._store(lanes, data, deadline)
        except PutRefused as refused:
            tally.puts_refused += 1
            self._give_up(refused)
        finally:
            self.volume.turns.end(self.pseudonym)
        self.finished = True
        if self.already_there:
            tally.puts_already_there += 1
            return
        self._stored = True
        tally.puts += 1
        tally.bytes_written += len(data)
        if bandwidth is not None:
            bandwidth.charge(lanes, len(data))

    def _store(self, lanes: Lanes, data: memoryview, deadline: float) -> Steps[None]:
        """Seal, and store until it is in, is found to be there, or is refused. Raises PutRefused."""
        volume = self.volume
        account = volume.accounts[self.namespace]
        only_new = volume.disproven.get(self.pseudonym) is None
        for _ in range(STORE_TRIES):
            slot = self._seal(lanes, data)
            pending = kv_lanes(lanes).kv_store(self.namespace, self.pseudonym, [slot], only_new=only_new)
            cause = yield from wait_for_key(lanes, pending, deadline)
            if cause is None:
                if only_new:
                    account.add(kv_lanes(lanes), self.namespace, room_of(len(slot)))
                volume.disproven.forget(self.pseudonym)
                volume.evicted.forget(self.pseudonym)
                volume.uses.note(self.pseudonym, int(lanes.wall() * 1e6))
                return
            if pending.present:
                if (yield from self._stands(lanes, deadline)):
                    self.already_there = True
                    return
                only_new = False
            elif pending.full:
                yield from self._make_room(lanes, room_of(len(slot)), deadline)
            else:
                if cause is not MissCause.CORRUPT:
                    volume.unsettled.note(self.pseudonym, lanes.now())
                raise PutRefused(f"the enclosure did not take it: {_why(pending)}", cause)
        raise PutRefused(f"volume {volume.settings.name} has no room for this key")

    def _make_room(self, lanes: Lanes, room: int, deadline: float) -> Steps[None]:
        volume = self.volume
        volume.accounts[self.namespace].is_full()
        if not self._may_evict:
            raise PutRefused(f"volume {volume.settings.name} has no room for this key")
        made = yield from make_room(volume, kv_lanes(lanes), self.namespace, self.pseudonym, room, deadline)
        if not made:
            raise PutRefused(f"volume {volume.settings.name} has no room for this key that may be made")

    def _seal(self, lanes: Lanes, data: memoryview) -> memoryview:
        """The whole slot, in the worker's own buffer. Each try has a salt and a generation of its own."""
        volume, wall = self.volume, lanes.wall()
        place = volume.place(self.namespace, self.pseudonym)
        sealer = volume.codec.seal(self.key, new_generation(wall), place)
        size = HEADER_BYTES + volume.codec.padded(len(data))
        buffer = lanes.send_buffer(size + PROOF_BYTES)
        sealer.seal(0, data, buffer[HEADER_BYTES:])
        expiry = min(int(wall) + self._ttl_seconds, TIME_MAX) if self._ttl_seconds else 0
        sealer.header_into(buffer, len(data), expiry, int(wall * 1e6))
        return buffer[:size]

    def _stands(self, lanes: Lanes, deadline: float) -> Steps[bool]:
        """Whether the value that the key has is one. Raises PutRefused where that cannot be told."""
        header = lanes.receive_buffer(HEADER_BYTES)
        pending = kv_lanes(lanes).kv_retrieve(self.namespace, self.pseudonym, header)
        cause = yield from wait_for_key(lanes, pending, deadline)
        if pending.missing or cause is MissCause.CORRUPT:
            return False
        if cause is not None:
            raise PutRefused(f"the enclosure did not tell what it has: {_why(pending)}", cause)
        if pending.received < HEADER_BYTES:
            return False
        place = self.volume.place(self.namespace, self.pseudonym)
        opened = self.volume.codec.open(header, self.key, place)
        if isinstance(opened, MissCause):
            return False
        return not opened.expiry or opened.expiry > lanes.wall()


def _why(pending: KvPending) -> str:
    return pending.fault or "no answer in time"


def delete_key(volume: KvVolume, lanes: Lanes, key: bytes, deadline: float) -> Steps[bool]:
    """Remove a key. True where it was there.

    Raises PutRefused where its enclosure does not answer, or a write of the key may still land.
    """
    pseudonym = volume.placement.pseudonym(key)
    if volume.unsettled.stands(pseudonym, lanes.now()):
        raise PutRefused("a write of the key was not answered and may still land", MissCause.LATE)
    namespace = volume.namespace_of(pseudonym)
    asking = kv_lanes(lanes)
    pending = asking.kv_delete(namespace, pseudonym)
    cause = yield from wait_for_key(lanes, pending, deadline)
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
    lanes.tally(volume.settings.name).deletes += 1
    return True
