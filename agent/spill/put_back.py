"""Back to flash: the put of a value that came up from G4, in the set of the mark that named it.

Between the get and this put the key may have been deleted, or put anew. So the entry is written under the
writers of all of the key's sets, from directories that were read then. It is written only where the very
mark still stands, and no other, and no entry names the key. The same image takes the mark out: there is one
set, so flash has the entry or the mark, and never neither or both."""

from typing import Final

from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.format.eviction_choice import Choice
from agent.pool.format.sealed_slot import OpenSlot
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Volume
from agent.pool.write.put import SlotWriter
from agent.pool.write.set_transaction import SetTransaction
from agent.pool.write.slot_allocation import Reservation, best_choice
from agent.spill.read_up import Returning

MARK_GONE: Final = "the key was deleted, or put anew, since its value came up from G4"


class ReturnWriter(SlotWriter):
    """One value on its way back. It refuses where its mark does not stand any more."""

    def __init__(self, volume: Volume, returning: Returning, opened: OpenSlot) -> None:
        super().__init__(volume, returning.key, length=opened.length)
        self._returning: Final = returning
        self._expires: Final = opened.expiry

    def _expiry(self, wall: float) -> int:
        return self._expires

    def _best(
        self, channel: IoChannel, sets: list[CachedSet], exchange: bool
    ) -> tuple[CachedSet, Choice] | None:
        """In the mark's set alone, and of no value in the mark's slot: its victim's ghost would take the
        mark's place."""
        returning, held = self._returning, set(self._volume.holds.held)
        own = [each for each in sets if (each.namespace, each.offset) == returning.set_place]
        for cached in own:
            with cached.guard:
                above = cached.directory.entry(returning.slot) if cached.directory is not None else None
            if above is not None:
                held.add(above.pseudonym)
        return best_choice(own, channel, self.pseudonym, held, exchange=exchange)

    def _commit(
        self,
        channel: IoChannel,
        reservation: Reservation,
        parts: list[memoryview] | list[bytes],
        length: int,
        deadline: float,
    ) -> Steps[None]:
        volume, cached = self._volume, reservation.cached
        with volume.borrowed(self.pseudonym) as sets, SetTransaction(volume, channel, *sets) as change:
            doubt = yield from change.begin(deadline)
            if doubt is None and volume.in_doubt_writes.may_land(self.pseudonym, channel.now()):
                doubt = MissCause.LATE
            if doubt is not None or not self._mark_stands(sets):
                self._refuse(channel, PutRefused(MARK_GONE, doubt))
            yield from self._vouched_for(channel, reservation, deadline)
            slot_write = channel.write(cached.namespace, reservation.offset, parts, more=True)
            yield from self._name(channel, reservation, [slot_write], length, deadline)
        self._count_stored(channel, length)

    def _note_removed(self, channel: IoChannel, marks: list[bytes]) -> None:
        """Where its mark comes back, it leads to the same value."""

    def _mark_stands(self, sets: tuple[CachedSet, ...]) -> bool:
        """Whether the one mark that the key may have left is the one that it came up by, and no set names
        it. Asked with the sets' writers held."""
        if any(cached.directory is None or cached.directory.find_all(self.pseudonym) for cached in sets):
            return False
        found = [
            ((cached.namespace, cached.offset), cached.directory.mark(at))
            for cached, at in self._volume.marks(sets, self.pseudonym)
            if cached.directory is not None
        ]
        return found == [(self._returning.set_place, self._returning.mark)]
