"""The set transaction: one change of a directory on flash. Every writer but a put's own commit makes it so.

It has four guarantees, which its users do not repeat:

1. **One writer.** It holds the writer of each of its sets from `lock` to the end of its `with` block. Several
   are taken in the order of their places, so two transactions never wait for each other.
2. **The truth.** `begin` reads the directories again and has each proven whole, so an image drops no entry
   that flash has, and brings none back. With `reload=False` it reads only a directory in doubt, or one that
   was read more than 20 ms ago. That does for a new entry in a reserved slot: an entry of another agent may
   be lost then, as it may by a put. With G4 below the request counts, or a mark would be back that another
   agent took.
3. **The entry as it was.** `clear` leaves an entry that is another one by now, or whose slot a put has
   reserved. `erase` leaves the slot of another key. Those who `write` ask `is_named` first.
4. **A fence.** A write without an answer may land late. So its slots cool down, and an entry that it may
   bring is disproven; no delete of that key succeeds meanwhile.
"""

from collections.abc import Collection
from typing import Final

from agent.pool.counters import MissCause
from agent.pool.format.directory import SLOTS_PER_SET, Directory, Entry
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.late_answers import wait_for
from agent.pool.steps import Acquire, IoChannel, Pending, Steps, Write
from agent.pool.volume.directory_cache import COOLDOWN_SECONDS, CachedSet
from agent.pool.volume.volume import Found, Volume
from agent.pool.volume.writable_directory import load_writable, prove


class SetTransaction:
    """A change of `sets`, mostly of one, within a `with` block. All calls but `lock` and `begin` need the
    writers."""

    __slots__ = ("_channel", "_held", "_sets", "_volume", "writable")

    def __init__(self, volume: Volume, channel: IoChannel, *sets: CachedSet) -> None:
        self._volume: Final = volume
        self._channel: Final = channel
        self._sets: Final = sets
        self._held: Final[list[CachedSet]] = []
        self.writable: Final[list[CachedSet]] = []
        """The sets whose directories `load` has read and found whole."""

    def __enter__(self) -> "SetTransaction":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Give the writers back, as the end of a `with` block does."""
        for cached in self._held:
            cached.end_write()

    def lock(self, deadline: float) -> Steps[bool]:
        """Take the writers. False: not by the deadline."""
        for cached in sorted(self._sets, key=lambda each: (each.namespace, each.offset)):
            if not (yield Acquire(cached.writer, deadline, gives_way=True)):
                return False
            self._held.append(cached)
        return True

    def begin(
        self, deadline: float, *, reload: bool = True, lock_until: float | None = None
    ) -> Steps[MissCause | None]:
        """Take the writers and read the directories. None: all sets may be written; otherwise why not.

        `lock_until`: for the writers, where they are waited for less long."""
        if not (yield from self.lock(deadline if lock_until is None else lock_until)):
            return MissCause.LATE
        volume, channel = self._volume, self._channel
        is_old = not all(volume.may_write(each, channel) for each in self._sets)
        if volume.below is not None:
            is_old |= not all(volume.is_recent(each, channel) for each in self._sets)
        if reload or is_old:
            return (yield from self.load(deadline))
        return (yield from prove(volume, channel, self._sets, deadline, holds_writers=True))

    def load(self, deadline: float) -> Steps[MissCause | None]:
        """Read the directories. None: all sets may be written; otherwise why not all of them."""
        return (
            yield from load_writable(self._volume, self._channel, self._sets, deadline, came=self.writable)
        )

    def write(
        self,
        cached: CachedSet,
        image: bytes,
        slots: Collection[int],
        deadline: float,
        *,
        added: Entry | None = None,
        beside: Pending | None = None,
    ) -> Steps[MissCause | None]:
        """Write an image in which `slots` changed, and wait for it, and for a write `beside` it. None: it is
        on flash.

        `added` is the entry that it names in its one slot."""
        channel, failure, may_land = self._channel, None, False
        pending = channel.write(cached.namespace, cached.offset, [image])
        for each in (beside, pending):
            if each is not None:
                cause = yield from wait_for(channel, each, deadline)
                failure = failure or cause
                may_land |= cause is not None and cause is not MissCause.ENCLOSURE_DOWN
        if failure is not None:
            cached.write_failed()
            for slot in slots:
                if added is not None:
                    self._volume.in_doubt_writes.write_failed(cached, slot, added, channel.now())
                if may_land:
                    cached.cool_down(slot, channel.now())
        return failure

    def name(
        self, cached: CachedSet, slot: int, entry: Entry, deadline: float, beside: Pending | None = None
    ) -> Steps[MissCause | None]:
        """Name a value in its reserved slot, instead of any older entry of its key.

        Readers here find it once it is on flash.
        """
        with cached.guard:
            assert cached.directory is not None
            image = cached.directory.copy()
        _install(image, slot, entry)
        cause = yield from self.write(cached, image.image(), (slot,), deadline, added=entry, beside=beside)
        if cause is None:
            with cached.guard:
                if cached.directory is not None:
                    _install(cached.directory, slot, entry)
                cached.disproven.pop(slot, None)
        return cause

    def clear(
        self,
        found: Found,
        deadline: float,
        *,
        ghost: bytes | None = None,
        is_ours: bool = False,
        evicts: bool = False,
    ) -> Steps[bool]:
        """Take an entry from the directory, and leave its slot as it is. False: it is another entry by now,
        or flash may have it still. `is_ours`: the caller has reserved the slot. `evicts`: unless somebody
        holds the key by now."""
        cached = found.cached
        with cached.guard:
            if not is_named(found, is_ours=is_ours):
                return False
            if evicts and found.entry.pseudonym in self._volume.holds.held:
                return False
            assert cached.directory is not None
            cached.directory.clear(found.slot, ghost=ghost)
            image = cached.directory.image()
        return (yield from self.write(cached, image, (found.slot,), deadline)) is None

    def unmark(
        self, cached: CachedSet, pseudonym: bytes, deadline: float
    ) -> Steps[tuple[bool, MissCause | None]]:
        """Take out the marks by which a get would find the key in G4. Whether there were any, and why flash
        may have them still."""
        with cached.guard:
            directory = cached.directory
            places = directory.marks(pseudonym) if directory is not None else []
        if not places:
            return False, None
        return True, (yield from self.unmark_at(cached, pseudonym, places, deadline))

    def unmark_at(
        self, cached: CachedSet, pseudonym: bytes, places: Collection[int], deadline: float
    ) -> Steps[MissCause | None]:
        """Take out a key's marks at these places. None: flash has them no more."""
        with cached.guard:
            assert cached.directory is not None
            marks = cached.directory.unmark_at(places)
            image = cached.directory.image()
        slots = [place for place in places if place < SLOTS_PER_SET]
        cause = yield from self.write(cached, image, slots, deadline)
        if cause is None:
            self._volume.removed_marks.note(pseudonym, marks, self._channel.now())
        return cause

    def erase(self, cached: CachedSet, slots: Collection[int], pseudonym: bytes) -> "SlotErase":
        """Send the writes that free slots of a key, entry and header; `SlotErase.end` waits for them."""
        return SlotErase(self._volume, self._channel, cached, slots, pseudonym)


class HeaderErase:
    """An erase of the headers of slots of one set, which another write of the caller takes from the
    directory. The set's writer is held meanwhile.

    An agent with an old directory finds nothing in such a slot. Zeros that land late would destroy a newer
    value. So a slot is left alone that a put has chosen since, or that has another entry by now. The others
    cool down (take no value) from the making of this object until the zeros are on flash, or for
    COOLDOWN_SECONDS after a write without an answer. An entry that flash shows in that time is no value to a
    put (agent/pool/write/put.py), for it may be cleared yet.
    """

    def __init__(
        self,
        volume: Volume,
        channel: IoChannel,
        cached: CachedSet,
        slots: Collection[int],
        pseudonym: bytes,
    ) -> None:
        """`slots` name the key of the `pseudonym`, as far as they still do."""
        self._volume = volume
        self._channel = channel
        self._cached = cached
        self._cooling_before: dict[int, float] = {}
        self._writes: list[Pending] = []
        until = channel.now() + COOLDOWN_SECONDS
        with cached.guard:
            directory = cached.directory
            for slot in slots:
                entry = directory.entry(slot) if directory is not None else None
                if entry is not None and entry.pseudonym == pseudonym:
                    self._cooling_before[slot] = cached.cooldown_until.get(slot, 0.0)
                    cached.cooldown_until[slot] = until

    @property
    def slots(self) -> Collection[int]:
        """Those that named the key."""
        return self._cooling_before

    def zeros(self) -> list[Write]:
        """What erases the headers."""
        cached, volume = self._cached, self._volume
        return [
            (cached.namespace, volume.slot_offset(cached, slot), [bytes(HEADER_BYTES)])
            for slot in self._cooling_before
        ]

    def send(self) -> None:
        """Send the zeros; `end` waits for them."""
        self._writes += [self._channel.write(*write) for write in self.zeros()]

    def end(self, deadline: float) -> Steps[MissCause | None]:
        """None once all that was sent is on flash; otherwise why that is not known."""
        failure: MissCause | None = None
        for pending in self._writes:
            cause = yield from wait_for(self._channel, pending, deadline)
            failure = failure or cause
        self.settle(failure)
        return failure

    def settle(self, failure: MissCause | None) -> None:
        """All that was sent has ended. `failure`: why it may not be on flash."""
        if failure is None:
            self.restore()
        else:
            self._cached.write_failed()
            for slot in self._cooling_before:
                self._cached.cool_down(slot, self._channel.now())

    def restore(self) -> None:
        """Nothing of it is under way: the slots cool down no longer than before."""
        for slot, until in self._cooling_before.items():
            self._cached.restore_cooldown(slot, until, self._channel.now())


class SlotErase(HeaderErase):
    """An erase of slots of one set, header and entry, on its way to flash."""

    def __init__(
        self,
        volume: Volume,
        channel: IoChannel,
        cached: CachedSet,
        slots: Collection[int],
        pseudonym: bytes,
    ) -> None:
        super().__init__(volume, channel, cached, slots, pseudonym)
        with cached.guard:
            directory = cached.directory
            assert directory is not None
            for slot in self._cooling_before:
                directory.clear(slot)
            image = directory.image()
        self.send()
        self._writes.append(channel.write(cached.namespace, cached.offset, [image]))


def is_named(found: Found, *, is_ours: bool = False) -> bool:
    """Whether a slot is still named for this write of this key, and no other caller has reserved it."""
    directory, slot, entry = found.cached.directory, found.slot, found.entry
    present = directory.entry(slot) if directory is not None else None
    if present is None or (present.pseudonym, present.generation) != (entry.pseudonym, entry.generation):
        return False
    return is_ours or slot not in found.cached.reserved


def _install(directory: Directory, slot: int, entry: Entry) -> None:
    for older in directory.find_all(entry.pseudonym):
        directory.clear(older)
    directory.install(slot, entry._replace(ghost=directory.ghost(slot)))
