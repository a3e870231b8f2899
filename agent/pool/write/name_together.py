"""Values of one owner whose slots are written one by one, and whose entries go out together.

A put writes its slot and the directory that names it, 4 KiB, each time. A file of many chunks is nothing
before all of them are named. So each chunk's slot is written alone (`UnnamedWriter`), and `name_all` writes
the directories of many, side by side and each one once, however many of the chunks it names.

A slot that no directory names is free to other agents, and after a crash to everybody. Until it is named it
is reserved here, and waits as a put does that came in part (agent/pool/volume/puts_in_pieces.py): after 30 s
its slot may go to another put. So who writes such values has them named soon, and takes keys that nobody else
puts: of two puts of one key this does not know.

A directory that was read longer ago than a put trusts is read again before it is written, with its writer
held. A writer is waited for only while no other of these is held, so two calls never wait for each other.
"""

from collections.abc import Sequence
from typing import Final

from agent.pool.counters import MissCause
from agent.pool.errors import IN_DOUBT, PutRefused
from agent.pool.format.directory import Directory, Entry
from agent.pool.late_answers import wait_for
from agent.pool.steps import Acquire, IoChannel, Pending, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Volume
from agent.pool.volume.writable_directory import load_writable, prove
from agent.pool.write.put import SlotWriter, is_known
from agent.pool.write.slot_allocation import Reservation
from agent.pool.write.writer_base import PutState

NOT_IN_TIME: Final = "the directory of its set is written all the time"
NOT_READ: Final = "the directory of its set cannot be read just now"


class UnnamedWriter(SlotWriter):
    """One value, which is on flash with its last byte, or by `finish`, and there by `name_all`."""

    _is_written = False

    @property
    def is_unnamed(self) -> bool:
        return self._is_written and self._state is PutState.WAITING

    def _commit(
        self,
        channel: IoChannel,
        reservation: Reservation,
        parts: list[memoryview] | list[bytes],
        length: int,
        deadline: float,
    ) -> Steps[None]:
        yield from self._vouched_for(channel, reservation, deadline)
        writes = self._send_last(channel)
        writes.append(channel.write(reservation.cached.namespace, reservation.offset, parts))
        yield from self._wait_for_all(channel, writes, deadline)
        self._wait_to_be_named(channel, reservation)

    def _wait_to_be_named(self, channel: IoChannel, reservation: Reservation) -> None:
        """All of it is on flash. Raises PutRefused for want of room."""
        self._is_written = True
        self._wait_for_more(channel, 0)

    # -- for `name_all` and batch.py -----------------------------------------------------------------------

    def take_up(self) -> Reservation:
        """It waits no more. Raises PutRefused where its slot went to another put."""
        self._go_on()
        return self.reservation

    @property
    def reservation(self) -> Reservation:
        reservation = self._reservation
        assert reservation is not None
        return reservation

    def vouch(self, channel: IoChannel, deadline: float) -> Steps[None]:
        """Raises PutRefused where its key is not good any more."""
        yield from self._vouched_for(channel, self.reservation, deadline)

    def claim(self, channel: IoChannel) -> None:
        """Its entry is written next. Raises PutRefused where its slot is another agent's by now."""
        self._is_its_own(channel, self.reservation)

    def enter_into(self, channel: IoChannel, image: Directory) -> Entry:
        """Put its entry into the image of its directory."""
        return self._install(channel, self.reservation, image, self._end)

    def named(self, channel: IoChannel, image: Directory, entry: Entry, deadline: float) -> Steps[None]:
        """Its entry is on flash. Raises PutRefused where its key is not good any more by then."""
        yield from self._vouched_for(channel, self.reservation, deadline, entry)
        self.show_stored(channel, image)

    def show_stored(self, channel: IoChannel, image: Directory) -> None:
        """Its entry is on flash, and its key is known to be good."""
        self._show(channel, self.reservation, image)
        self._count_stored(channel, self._end)

    def failed(
        self, channel: IoChannel, pending: Pending, cause: MissCause, entry: Entry, *, is_answered: bool
    ) -> PutRefused:
        """A write that it needs failed, and its directory's was sent. `is_answered`: nothing of it may land
        yet."""
        reservation = self.reservation
        if is_answered:
            # As in put.py.
            reservation.cached.disprove(reservation.slot, entry.generation)
        else:
            in_doubt = self._volume.in_doubt_writes
            in_doubt.write_failed(reservation.cached, reservation.slot, entry, channel.now())
        try:
            self._fail(channel, pending, cause)
        except PutRefused as refused:
            return refused

    def refuse(self, channel: IoChannel, why: PutRefused) -> PutRefused:
        """Nothing of its entry was written."""
        try:
            self._refuse(channel, why)
        except PutRefused as refused:
            return refused


class _Group:
    """Values of one set."""

    __slots__ = ("cached", "entries", "image", "pending", "writers")

    def __init__(self, cached: CachedSet) -> None:
        self.cached: Final = cached
        self.writers: Final[list[UnnamedWriter]] = []
        self.entries: list[Entry] = []
        self.image: Directory | None = None
        self.pending: Pending | None = None

    def vouch(self, channel: IoChannel, deadline: float) -> Steps[list[PutRefused]]:
        """Leave out those that may not be named any more; their refusals."""
        refusals = []
        for writing in list(self.writers):
            try:
                yield from writing.vouch(channel, deadline)
            except PutRefused as refused:
                refusals.append(refused)
                self.writers.remove(writing)
        return refusals

    def claim(self, channel: IoChannel) -> list[PutRefused]:
        """Leave out those whose slots are another agent's; their refusals. `send` follows at once."""
        refusals = []
        for writing in list(self.writers):
            try:
                writing.claim(channel)
            except PutRefused as refused:
                refusals.append(refused)
                self.writers.remove(writing)
        return refusals

    def send(self, channel: IoChannel, *, more: bool) -> None:
        cached = self.cached
        with cached.guard:
            assert cached.directory is not None
            image = self.image = cached.directory.copy()
        self.entries = [writing.enter_into(channel, image) for writing in self.writers]
        self.pending = channel.write(cached.namespace, cached.offset, [image.image()], more=more)

    def refuse(self, channel: IoChannel, why: str, cause: MissCause) -> list[PutRefused]:
        return [writing.refuse(channel, PutRefused(why, cause)) for writing in self.writers]

    def end(self, channel: IoChannel, deadline: float) -> Steps[list[PutRefused]]:
        """Wait for the write; the refusals of those that are not named by it."""
        image, pending = self.image, self.pending
        assert image is not None
        assert pending is not None
        cause = yield from wait_for(channel, pending, deadline)
        refusals = []
        for writing, entry in zip(self.writers, self.entries, strict=True):
            if cause is not None:
                is_answered = cause is MissCause.CORRUPT
                refusals.append(writing.failed(channel, pending, cause, entry, is_answered=is_answered))
                continue
            try:
                yield from writing.named(channel, image, entry, deadline)
            except PutRefused as refused:
                refusals.append(refused)
        return refusals


def name_all(
    volume: Volume, channel: IoChannel, writers: Sequence[UnnamedWriter], deadline: float
) -> Steps[None]:
    """Name these values of a volume: all are on flash then. Raises PutRefused, the first of them, where some
    could not be named; the others are."""
    refusals: list[PutRefused] = []
    groups: dict[int, _Group] = {}
    for writing in writers:
        try:
            cached = writing.take_up().cached
        except PutRefused as refused:
            refusals.append(refused)
            continue
        group = groups.get(id(cached))
        if group is None:
            group = groups[id(cached)] = _Group(cached)
        group.writers.append(writing)
    left = sorted(groups.values(), key=_place)
    while left:
        held = [group for group in left if group.cached.writer.acquire(blocking=False)]
        if not held:
            first = left[0]
            if not (yield Acquire(first.cached.writer, deadline, gives_way=True)):
                refusals += first.refuse(channel, NOT_IN_TIME, MissCause.LATE)
                left.remove(first)
                continue
            held = [first]
        left = [group for group in left if group not in held]
        try:
            refusals += yield from _write(volume, channel, held, deadline)
        finally:
            for group in held:
                group.cached.end_write()
    if refusals:
        raise refusals[0]


def _write(
    volume: Volume, channel: IoChannel, held: list[_Group], deadline: float
) -> Steps[list[PutRefused]]:
    """Write the directories of these sets, whose writers are held."""
    refusals: list[PutRefused] = []
    stale = [group.cached for group in held if not is_known(volume, group.cached, channel)]
    came: list[CachedSet] = []
    trouble: MissCause | None = None
    if stale:
        trouble = yield from load_writable(volume, channel, stale, deadline, came=came)
    doubtful = [group.cached for group in held if group.cached.in_doubt and group.cached not in stale]
    if doubtful:
        yield from prove(volume, channel, doubtful, deadline, holds_writers=True)
    sent: list[_Group] = []
    for group in held:
        if group.cached in stale and group.cached not in came:
            refusals += group.refuse(channel, NOT_READ, trouble or MissCause.LATE)
        elif group.cached.in_doubt:
            refusals += group.refuse(channel, IN_DOUBT, MissCause.LATE)
        else:
            refusals += yield from group.vouch(channel, deadline)
            sent.append(group)
    for group in sent:
        refusals += group.claim(channel)
    sent = [group for group in sent if group.writers]
    for at, group in enumerate(sent):
        last = at + 1 == len(sent) or sent[at + 1].cached.namespace != group.cached.namespace
        group.send(channel, more=not last)
    for group in sent:
        refusals += yield from group.end(channel, deadline)
    return refusals


def _place(group: _Group) -> tuple[int, int]:
    return group.cached.namespace, group.cached.offset
