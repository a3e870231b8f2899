"""Values that are sealed and written here, into slots that another process of the agent lends and names.

See lent_slots.py for who does what. This process (agent/service/reader.py) has the bytes, and queues of its
own at the enclosures. It tells of each write as it is answered: those that an enclosure keeps waiting do not
keep the others.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

from agent.inline.cipher_suites import Place
from agent.pool.counters import MissCause
from agent.pool.errors import PutElsewhere, TooLong
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.late_answers import miss_cause_of
from agent.pool.steps import IoChannel, Pending, Steps, Wait, in_volleys
from agent.pool.volume.volume import Volume
from agent.pool.write.batch import UNTRIED, Became, rooms_for
from agent.pool.write.slot_messages import (
    Ask,
    End,
    Ended,
    Fate,
    LentSlot,
    Value,
    decode_ended,
    decode_places,
    encode_ask,
    encode_written,
    refusal_of,
)

TELL_SECONDS: Final = 0.05
"""Those that are written wait so long at the most for others of the call, to be told of together."""
_CLOCK_SLACK: Final = 0.001
"""A wait may end this much before its deadline, by the rounding of a poll."""


class SlotLink(Protocol):
    """To the process that lends slots; one call at a time."""

    @property
    def is_patient(self) -> bool:
        """Whether the call may wait for enclosures as long as a put may, here and there."""

    def exchange(self, message: bytes) -> bytes:
        """The answer to a message. It blocks. Raises PutElsewhere where the link has broken; it is used no
        more then."""

    def broken(self) -> None:
        """Nothing is asked there any more: what was lent is never told of."""


class SlotLinks(Protocol):
    def take(self, values: int) -> AbstractContextManager[SlotLink]:
        """A link for one call of so many values. It may wait for a moment. Raises PutElsewhere where all are
        in use, or the other process is to store so few values itself."""

    def namespace(self, nguid: bytes) -> int | None:
        """The number of a namespace for the channel; None: it is not known here."""

    def may_land(self, namespace: int, offset: int, size: int, now: float) -> bool:
        """Whether some of a write of this process may land there, now or later."""


def write_borrowed(
    volume: Volume,
    channel: IoChannel,
    links: SlotLinks,
    keys: Sequence[bytes],
    values: Sequence[memoryview],
    wait_seconds: float,
    ttl_seconds: int = 0,
) -> Steps[list[Became]]:
    """Store these values, and say what became of each; as `write_together` of batch.py. Raises PutElsewhere
    where the other process is to be asked for all of them, and TooLong."""
    most = volume.settings.value_bytes
    if not all(0 < len(value) <= most for value in values):
        raise TooLong(f"{volume.settings.name} takes 1 to {most} bytes")
    with links.take(len(keys)) as link:
        if not link.is_patient:
            channel.gives_way()
        call = _Call(volume, channel, links, link, values, channel.now() + wait_seconds)
        is_over, is_served = False, True
        try:
            is_served = yield from call.run(keys, wait_seconds, ttl_seconds)
            is_over = True
        finally:
            if not is_over:
                call.close()
                link.broken()
    if not is_served:
        raise PutElsewhere
    return call.became


class _Call:
    def __init__(
        self,
        volume: Volume,
        channel: IoChannel,
        links: SlotLinks,
        link: SlotLink,
        values: Sequence[memoryview],
        until: float,
    ) -> None:
        self._volume: Final = volume
        self._channel: Final = channel
        self._links: Final = links
        self._link: Final = link
        self._values: Final = values
        self._until: Final = until
        self.became: Final[list[Became]] = [UNTRIED] * len(values)
        self._under_way: Final[dict[int, Pending]] = {}
        self._to_tell: list[tuple[int, Fate]] = []

    def run(self, keys: Sequence[bytes], wait_seconds: float, ttl_seconds: int) -> Steps[bool]:
        """False: the other process does not lend slots of this volume now."""
        wanted = [Value(key, len(value)) for key, value in zip(keys, self._values, strict=True)]
        volume_id = self._volume.settings.volume_id
        ask = Ask(volume_id, wait_seconds, ttl_seconds, wanted, self._link.is_patient)
        places = decode_places(self._link.exchange(encode_ask(ask)), len(keys))
        if (End.ELSEWHERE, None) in places:
            return False
        lent: dict[int, LentSlot] = {}
        for number, place in enumerate(places):
            if isinstance(place, LentSlot):
                lent[number] = place
            else:
                self.became[number] = _became(place)
        self._write(keys, lent)
        while self._under_way or self._to_tell:
            yield from self._wait()
            self._tell()
        return True

    def close(self) -> None:
        """Nothing is waited for any more; nothing is read from the values' memory from now on."""
        for pending in self._under_way.values():
            if not pending.done:
                self._channel.abandon(pending)
        self._under_way.clear()

    def _write(self, keys: Sequence[bytes], lent: dict[int, LentSlot]) -> None:
        """Seal and send what was lent."""
        volume, channel = self._volume, self._channel
        rooms = rooms_for(volume, channel, [self._values[number] for number in lent])
        sealed: list[tuple[int, int, int, memoryview]] = []
        may_send = channel.now() < self._until and not volume.refusal
        for room, (number, slot) in zip(rooms, lent.items(), strict=True):
            namespace, codec = self._links.namespace(slot.nguid), volume.codec.of_key(slot.fingerprint)
            if not may_send or namespace is None or codec is None or not len(room):
                self._to_tell.append((number, Fate.NOT_SENT))
                continue
            value = self._values[number]
            sealer = codec.seal(keys[number], slot.generation, Place(slot.nguid, slot.number))
            sealer.seal(0, value, room[HEADER_BYTES:])
            sealer.header_into(room, len(value), slot.expiry, int(channel.wall() * 1e6))
            size = HEADER_BYTES + codec.padded(len(value))
            sealed.append((number, namespace, slot.offset, room[:size]))
        for at, more in in_volleys([(namespace, offset) for _, namespace, offset, _ in sealed]):
            number, namespace, offset, whole = sealed[at]
            pending = channel.write(namespace, offset, [whole], more=more)
            if pending.done and pending.unreachable and not self._may_land(namespace, offset, len(whole)):
                # Nothing was sent, and the other process may have a way there.
                self._to_tell.append((number, Fate.NOT_SENT))
            else:
                self._under_way[number] = pending

    def _may_land(self, namespace: int, offset: int, size: int) -> bool:
        return self._links.may_land(namespace, offset, size, self._channel.now())

    def _wait(self) -> Steps[None]:
        """A look at each that is under way, until all are answered or TELL_SECONDS have passed."""
        channel = self._channel
        until = min(channel.now() + TELL_SECONDS, self._until)
        for number, pending in list(self._under_way.items()):
            arrived = yield Wait(pending, until, None, self._until)
            # One that ends before its time gives way, or its namespace gets no more patience.
            if not arrived and until < self._until and channel.now() + _CLOCK_SLACK >= until:
                continue
            del self._under_way[number]
            self._to_tell.append((number, _fate(miss_cause_of(channel, pending, arrived))))

    def _tell(self) -> None:
        told, self._to_tell = self._to_tell, []
        if not told:
            return
        ends = decode_ended(self._link.exchange(encode_written(told)), len(told))
        for (number, _), ended in zip(told, ends, strict=True):
            self.became[number] = _became(ended)


def _fate(cause: MissCause | None) -> Fate:
    if cause is None:
        return Fate.WRITTEN
    # What an enclosure answers with a status has ended there; what has no answer may have been sent.
    return Fate.FAILED if cause is MissCause.CORRUPT else Fate.UNKNOWN


def _became(ended: Ended) -> Became:
    end = ended[0]
    if end is End.UNTRIED:
        return UNTRIED
    if end in (End.STORED, End.THERE_BEFORE):
        return end is End.STORED
    return refusal_of(ended)
