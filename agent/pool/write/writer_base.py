"""One value being written: the interface of every writer, the states of a put, and their ends.

A put takes bytes until it is complete. In one of its end states it holds nothing any more: `_enter` lets go
of slot and memory, whichever end it is. A put that waits for its next piece may be given up by another thread
(agent/pool/volume/puts_in_pieces.py); the thread that takes it out of that table may change it, no other.
"""

from abc import abstractmethod
from enum import IntEnum
from typing import Final, NoReturn

from agent.pool.counters import MissCause
from agent.pool.errors import BadPut, PutRefused, TooLong
from agent.pool.format.directory import TIME_MAX
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.puts_in_pieces import PutInPieces
from agent.pool.volume.volume import PoolVolume

GIVEN_UP: Final = "no byte of it came for long, and its room was wanted"
TOO_MANY: Final = "too many values are being written in pieces"


class PutState(IntEnum):
    NEW = 0
    """Nothing was taken. A refusal for want of room leaves it here, and the caller may try again."""
    TAKING = 1
    """Has a slot or memory, and a thread that works on it."""
    WAITING = 2
    """For its next piece; any thread may give it up."""
    STORED = 3
    ALREADY_THERE = 4
    """The key was stored before: values are immutable, the first write stays. The bytes are not kept."""
    DECLINED = 5
    """Not admitted (admission.py). The bytes are not kept."""
    REFUSED = 6
    """It failed, and every later call fails as well."""
    DROPPED = 7
    """By its caller."""


LEGAL: Final = {
    (PutState.NEW, PutState.TAKING),
    (PutState.NEW, PutState.ALREADY_THERE),
    (PutState.NEW, PutState.DECLINED),
    (PutState.NEW, PutState.REFUSED),
    (PutState.NEW, PutState.DROPPED),
    (PutState.TAKING, PutState.WAITING),
    (PutState.TAKING, PutState.STORED),
    (PutState.TAKING, PutState.ALREADY_THERE),
    (PutState.TAKING, PutState.REFUSED),
    (PutState.TAKING, PutState.DROPPED),
    (PutState.WAITING, PutState.TAKING),
    (PutState.WAITING, PutState.REFUSED),
}
UNDER_WAY: Final = (PutState.NEW, PutState.TAKING, PutState.WAITING)
FORGETFUL: Final = (PutState.ALREADY_THERE, PutState.DECLINED)
"""Ends in which the rest of the value is counted and not kept."""


class Writer(PutInPieces):
    """One value being written. `length` where it is known from the start, None where `finish` decides."""

    def __init__(
        self,
        volume: PoolVolume,
        key: bytes,
        *,
        length: int | None,
        ttl_seconds: int = 0,
        pseudonym: bytes | None = None,
    ) -> None:
        """`pseudonym`: the key's, where the caller has it. Raises TooLong."""
        if length is not None and not 0 < length <= volume.settings.value_bytes:
            raise TooLong(f"{length} bytes; {volume.settings.name} takes 1 to {volume.settings.value_bytes}")
        self.volume = volume
        self.key = key
        self.pseudonym = volume.placement.pseudonym(key) if pseudonym is None else pseudonym
        self.finished = False
        """It takes no more bytes: it has ended, and where it is forgetful, all bytes came."""
        self._length = length
        self._ttl_seconds = ttl_seconds or volume.settings.ttl_seconds
        self._end = 0
        self._charged = 0
        """Bytes of the value for which its tenant's bandwidth was charged."""
        self._state = PutState.NEW
        self._refusal: PutRefused | BadPut = BadPut("the put was given up")

    @property
    def state(self) -> PutState:
        return self._state

    @property
    def stored(self) -> bool:
        """This put brought the value to flash, all of it; or, written back, to memory."""
        return self._state is PutState.STORED

    @property
    def is_unnamed(self) -> bool:
        """All of the value is on flash, and no directory names it; see name_together.py."""
        return False

    @property
    def waiting(self) -> int:
        """Puts of its volume that wait, each with a slot that no directory names."""
        return self.volume.puts_in_pieces.waiting(self.volume.settings.volume_id)

    @property
    def already_there(self) -> bool:
        """The key was stored before."""
        return self._state is PutState.ALREADY_THERE

    @property
    def received(self) -> int:
        """One past the last byte that came so far."""
        return self._end

    def write(self, channel: IoChannel, offset: int, data: memoryview, deadline: float) -> Steps[bool]:
        """Take bytes of the value. True when that completed a value of known length: it is on flash.

        Raises BadPut for bytes that do not fit, PutRefused where the value cannot be stored.
        """
        end = offset + len(data)
        limit = self._length if self._length is not None else self.volume.settings.value_bytes
        if end > limit:
            raise TooLong(f"bytes up to {end} of a value that ends at {limit}")
        if self.finished:
            self._refuse_again()
            return True
        if not len(data):
            return False
        self._go_on()
        if self._state not in FORGETFUL:
            if refusal := self.volume.refusal:
                self._end = max(self._end, end)
                self._refuse(channel, PutRefused(refusal, MissCause.WRONG_KEY))
            yield from self._take(channel, offset, data, deadline)
        self._end = max(self._end, end)
        if self._state in FORGETFUL:
            self.finished = self._end == self._length
        return self.finished

    def finish(self, channel: IoChannel, deadline: float) -> Steps[None]:
        """The value is complete as it is: store it.

        Raises again what an earlier call raised when it gave up: a put that failed must not end well.
        """
        if self.finished:
            self._refuse_again()
            return
        if self._state in FORGETFUL or not self._end:
            self.finished = True
            return
        self._go_on()
        if self.volume.erased:
            self._refuse(channel, PutRefused(self.volume.refusal, MissCause.WRONG_KEY))
        yield from self._complete(channel, deadline)
        self.finished = True

    def finish_with(self, channel: IoChannel, offset: int, data: memoryview, deadline: float) -> Steps[None]:
        """`write`, then `finish`."""
        yield from self.write(channel, offset, data, deadline)
        yield from self.finish(channel, deadline)

    def drop(self) -> None:
        """Give up. A slot that was written in part is a slot that nobody names."""
        self.finished = True
        if self._state is PutState.WAITING and not self._take_out():
            return  # Another thread gives it up just now, and lets go of what it has.
        if self._state in UNDER_WAY:
            self._enter(PutState.DROPPED)

    def abandon(self, channel: IoChannel) -> None:
        channel.tally(self.volume.settings.name).puts_refused += 1
        self._refusal = PutRefused(GIVEN_UP, MissCause.LATE)
        self._enter(PutState.REFUSED)

    @abstractmethod
    def _take(self, channel: IoChannel, offset: int, data: memoryview, deadline: float) -> Steps[None]:
        """Take bytes, and store the value where they complete it. Keeps `_end`, for that needs it."""

    def _complete(self, channel: IoChannel, deadline: float) -> Steps[None]:
        """Store the value as it is; here, where a value has to be whole, refuse it."""
        yield from ()  # steps, of which there are none
        self._refuse(channel, BadPut(f"{self._end} bytes of a value of {self._length}"))

    def _release(self) -> None:
        """Let go of all that the put has; again where there is nothing left."""
        if self.held:
            held, self.held = self.held, 0
            self.volume.puts_in_pieces.give_back(held)

    def _enter(self, state: PutState) -> None:
        assert (self._state, state) in LEGAL, f"a put cannot go from {self._state} to {state}"
        self._state = state
        if state not in UNDER_WAY:
            self.finished = state not in FORGETFUL or (self._length is not None and self._end == self._length)
            self._release()

    def _take_out(self) -> bool:
        """It waits no more. False: another thread has it, and gives it up."""
        if not self.volume.puts_in_pieces.take_out(self, self.volume.settings.volume_id):
            return False
        self._enter(PutState.TAKING)
        return True

    def _go_on(self) -> None:
        """Raises PutRefused where it was given up while it waited for its next piece."""
        if self._state is PutState.WAITING and self._take_out():
            return
        if self._state in (PutState.WAITING, PutState.REFUSED):
            self.finished, self._refusal = True, PutRefused(GIVEN_UP, MissCause.LATE)
            raise self._refusal

    def _wait_for_more(self, channel: IoChannel, held: int) -> None:
        """From now on it may be given up. `held`: its bytes in memory. Raises PutRefused for want of room."""
        before, self.held = self.held, held
        self._enter(PutState.WAITING)
        volume = self.volume
        if not volume.puts_in_pieces.add(self, volume.settings.volume_id, held - before, channel):
            self.held = before
            self._enter(PutState.TAKING)
            self._refuse(channel, PutRefused(TOO_MANY, MissCause.LATE))

    def _refuse(self, channel: IoChannel, why: PutRefused | BadPut) -> NoReturn:
        """Give up for good; raises `why`, now and with every later call."""
        if isinstance(why, PutRefused):
            channel.tally(self.volume.settings.name).puts_refused += 1
        self._refusal = why
        self._enter(PutState.REFUSED)
        raise why

    def _refuse_again(self) -> None:
        if self._state in (PutState.REFUSED, PutState.DROPPED, PutState.WAITING) and self._end:
            raise self._refusal

    def _found_there(self, channel: IoChannel) -> None:
        """Another put has stored the key."""
        channel.tally(self.volume.settings.name).puts_already_there += 1
        self._enter(PutState.ALREADY_THERE)

    def _count_stored(self, channel: IoChannel, length: int) -> None:
        self._enter(PutState.STORED)
        tally = channel.tally(self.volume.settings.name)
        tally.puts += 1
        tally.bytes_written += length
        self._charge(channel, length - self._charged)

    def _charge(self, channel: IoChannel, size: int) -> None:
        """So many bytes more of the value are written."""
        self._charged += size
        if self.volume.bandwidth is not None:
            self.volume.bandwidth.charge(channel, size)

    def _expiry(self, wall: float) -> int:
        return min(int(wall) + self._ttl_seconds, TIME_MAX) if self._ttl_seconds else 0
