"""Slots that this process chooses and names, and another process of the agent writes.

Nothing of a put is decided elsewhere: keys, directories, quota, choice, sealing key, generation and name are
matters of this process, as of any put. `lend` goes as far as the slots are reserved. The borrower seals,
writes, and tells what became of each write. `name` goes on with those that are on flash, as name_together.py
does. So no directory names a slot that is not written, and the borrower writes no directory.

A lent slot stays reserved until the borrower has told of it, or its process has ended and with it all of its
connections, which are closed hard. A slot of which nothing was told cools down as after a write that was
given up: what an enclosure had received of it may land for a moment. This process writes nothing there
meanwhile: a cool-down is forgotten with its directory, and the fence is not.
"""

import contextlib
from collections.abc import Sequence
from typing import Final, Protocol

from agent.pool.counters import MissCause
from agent.pool.errors import BadPut, PutRefused
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Volume
from agent.pool.write.batch import UNTRIED, Became, TogetherWriter
from agent.pool.write.name_together import NOT_IN_TIME, name_all
from agent.pool.write.put import is_known
from agent.pool.write.slot_messages import Fate, LentSlot, Value

NOT_TAKEN: Final = "the enclosure did not take it"
NOT_ANSWERED: Final = "the enclosure did not answer in time"


class LentFence(Protocol):
    """Of this process, around places that are not written just now: bytes of a namespace, by its number."""

    def stands(self, namespace: int, offset: int, size: int, now: float) -> bool: ...

    def put_up(self, namespace: int, offset: int, size: int, now: float) -> None:
        """For as long as a write that was given up may land."""


class LentWriter(TogetherWriter):
    """One value of a call, whose slot is lent. It is WAITING from when it is on flash until it is named."""

    def lent(self, channel: IoChannel) -> LentSlot:
        reservation = self.reservation
        place = self._volume.place(reservation.cached, reservation.slot)
        sealer = reservation.sealer
        expiry = self._expiry(channel.wall())
        return LentSlot(
            place.nguid, place.slot, reservation.offset, sealer.generation, sealer.codec.fingerprint, expiry
        )

    def written(self, channel: IoChannel) -> None:
        """It is on flash. Raises PutRefused."""
        self._wait_to_be_named(channel, self.reservation)

    def not_written(self, channel: IoChannel, fate: Fate) -> PutRefused:
        """Its slot was not written, or may be written later."""
        reservation = self.reservation
        reservation.cached.cool_down(reservation.slot, channel.now())
        if fate is Fate.FAILED:
            self._volume.media_errors.refused_a_write(reservation.cached, reservation.slot)
            return self.refuse(channel, PutRefused(NOT_TAKEN, MissCause.CORRUPT))
        return self.refuse(channel, PutRefused(NOT_ANSWERED, MissCause.LATE))

    @property
    def refusal(self) -> PutRefused | BadPut:
        return self._refusal


class LentSlots:
    """Those of one call. For one thread; `close` it, once nothing of the borrower can reach them any more."""

    def __init__(
        self,
        volume: Volume,
        channel: IoChannel,
        values: Sequence[Value],
        wait_seconds: float,
        ttl_seconds: int,
        fence: LentFence,
        is_patient: bool = True,
    ) -> None:
        """`is_patient`: see `Ask`. Raises TooLong."""
        self._volume: Final = volume
        self._channel: Final = channel
        self._values: Final = values
        self._fence: Final = fence
        self._is_patient: Final = is_patient
        self._until: Final = channel.now() + wait_seconds
        pseudonyms = volume.pseudonyms([each.key for each in values])
        self._writers: Final = [
            LentWriter(volume, each.key, length=each.length, ttl_seconds=ttl_seconds, pseudonym=pseudonym)
            for each, pseudonym in zip(values, pseudonyms, strict=True)
        ]
        self._borrowed: Sequence[tuple[CachedSet, ...]] = ()
        self._locked: Final[set[int]] = set()
        """Values whose key's lock is held."""
        self.out: Final[set[int]] = set()
        """Those whose slots are lent, and of which the borrower has not told."""

    def lend(self) -> Steps[list[LentSlot | Became]]:
        """A slot for each value, or what has become of it already."""
        volume, channel = self._volume, self._channel
        self._may_give_way()
        pseudonyms = b"".join([writing.pseudonym for writing in self._writers])
        self._borrowed = volume.borrow_sets_of_many(pseudonyms)
        unread = {
            id(cached): cached
            for sets in self._borrowed
            for cached in sets
            if cached.fault or not is_known(volume, cached, channel)
        }
        trouble: MissCause | None = None
        if unread:
            # Half of the time at most, as of a put: another enclosure has to take the values in time.
            half = channel.now() + max(0.0, self._until - channel.now()) / 2
            trouble = yield from volume.load(channel, list(unread.values()), half)
        seen: set[bytes] = set()
        found: list[LentSlot | Became] = []
        for number, writing in enumerate(self._writers):
            is_second = writing.pseudonym in seen
            seen.add(writing.pseudonym)
            found.append(UNTRIED if is_second else self._lend_one(number, trouble))
        return found

    def _lend_one(self, number: int, trouble: MissCause | None) -> LentSlot | Became:
        volume, channel, writing = self._volume, self._channel, self._writers[number]
        bandwidth = volume.bandwidth
        if bandwidth is not None and not bandwidth.is_ready(channel):
            return UNTRIED
        if not volume.key_locks.take_at_once(writing.pseudonym):
            return UNTRIED
        self._locked.add(number)
        length = self._values[number].length
        try:
            if writing.take_slot(channel, self._borrowed[number], trouble, length):
                lent = writing.lent(channel)
                reservation = writing.reservation
                size = volume.settings.slot_bytes
                at = reservation.cached.namespace
                if not self._fence.stands(at, reservation.offset, size, channel.now()):
                    self.out.add(number)
                    return lent
                # Its cool-down was forgotten with its directory: the next put of the key takes another one.
                reservation.cached.cool_down(reservation.slot, channel.now())
        except (PutRefused, BadPut) as refused:
            self._let_go(number)
            return refused
        is_there = writing.already_there
        self._let_go(number)
        return False if is_there else UNTRIED

    def name(self, fates: Sequence[tuple[int, Fate]]) -> Steps[list[Became]]:
        """The borrower tells of some of `out`; what became of these. Raises KeyError for others."""
        channel = self._channel
        self._may_give_way()
        for number, _ in fates:
            self.out.remove(number)
        became: dict[int, Became] = {}
        written: list[int] = []
        for number, fate in fates:
            writing = self._writers[number]
            if fate is Fate.NOT_SENT:
                became[number] = UNTRIED
            elif fate is Fate.WRITTEN and channel.now() >= self._until:
                # Nobody could wait for the directory's write, and it would leave the directory in doubt.
                became[number] = writing.refuse(channel, PutRefused(NOT_IN_TIME, MissCause.LATE))
            elif fate is Fate.WRITTEN:
                try:
                    writing.written(channel)
                    written.append(number)
                except PutRefused as refused:
                    became[number] = refused
            else:
                became[number] = self._not_written(number, fate)
        if written:
            with contextlib.suppress(PutRefused):  # of one of them; each has its own
                yield from name_all(
                    self._volume, channel, [self._writers[number] for number in written], self._until
                )
            for number in written:
                writing = self._writers[number]
                became[number] = True if writing.stored else writing.refusal
        for number, _ in fates:
            self._let_go(number)
        return [became[number] for number, _ in fates]

    def _may_give_way(self) -> None:
        if not self._is_patient:
            self._channel.gives_way()

    def close(self) -> None:
        """Let go of all. What is out was not told of: its slots cool down."""
        for number in sorted(self.out):
            self._not_written(number, Fate.UNKNOWN)
        self.out.clear()
        for number in range(len(self._writers)):
            self._let_go(number)
        for sets in self._borrowed:
            self._volume.give_back_sets(sets)
        self._borrowed = ()

    def _not_written(self, number: int, fate: Fate) -> PutRefused:
        writing, channel = self._writers[number], self._channel
        if fate is Fate.UNKNOWN:
            reservation, size = writing.reservation, self._volume.settings.slot_bytes
            self._fence.put_up(reservation.cached.namespace, reservation.offset, size, channel.now())
        return writing.not_written(channel, fate)

    def _let_go(self, number: int) -> None:
        """It holds nothing of the call any more."""
        writing = self._writers[number]
        if not writing.finished:
            writing.drop()
        if number in self._locked:
            self._locked.remove(number)
            self._volume.key_locks.end(writing.pseudonym)
