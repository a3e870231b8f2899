"""A get from a KV namespace: one Retrieve brings header and units, and a miss is one Retrieve too.

Read read/get.py first. The Retrieve asks for the header and for as many bytes as the range needs. A value has
no offsets on the wire, so a range further back brings the bytes before it as well. That costs nothing where
the host reads a value in one request, as engines do; a program that reads in small pieces is served from the
last unit that was opened, which is kept for it.
"""

from typing import Final

from agent.pool.counters import MissCause
from agent.pool.format.sealed_slot import HEADER_BYTES, OpenSlot
from agent.pool.kv.commands import KvPending, kv_channel
from agent.pool.kv.volume import KvVolume
from agent.pool.late_answers import wait_for
from agent.pool.read.reader_base import Request, Source, UnitReader
from agent.pool.steps import IoChannel, Steps

_DAMAGED: Final = (MissCause.CORRUPT, MissCause.WRONG_KEY, MissCause.EVICTED)


class KvReader(UnitReader):
    """One value of a volume on KV namespaces, being read."""

    __slots__ = ("_volume", "namespace")

    def __init__(self, volume: KvVolume, key: bytes) -> None:
        super().__init__(volume, key)
        self._volume: Final = volume
        self.namespace: Final = volume.namespace_of(self.pseudonym)

    def find_length(self, channel: IoChannel, deadline: float) -> Steps[int | None]:
        """The length of the value, from its header alone; None where there is none. It is no get."""
        header = channel.receive_buffer(HEADER_BYTES)
        pending = kv_channel(channel).kv_retrieve(self.namespace, self.pseudonym, header)
        opened = yield from self._header(channel, pending, header, HEADER_BYTES, deadline)
        return None if isinstance(opened, MissCause) else opened.length

    def _lost(self, channel: IoChannel, cause: MissCause) -> int:
        if cause in _DAMAGED:
            self._volume.disproven.note(self.pseudonym, 1)
        return super()._lost(channel, cause)

    def _moved(self, request: Request, count: int) -> int:
        self._volume.uses.note(self.pseudonym, int(request.channel.wall() * 1e6))
        return super()._moved(request, count)

    def _first(self, request: Request) -> Steps[int | MissCause]:
        return self._retrieve(request, None)

    def _next(self, request: Request, opened: OpenSlot) -> Steps[int | MissCause]:
        return self._retrieve(request, opened)

    def _retrieve(self, request: Request, before: OpenSlot | None) -> Steps[int | MissCause]:
        """Retrieve up to the end of a range, prove and serve it. `before`: the header of the first range."""
        codec, channel = self._volume.codec, request.channel
        last_unit = -(-(request.offset + len(request.into)) // codec.unit_bytes)
        most = min(last_unit * codec.unit_bytes, self._volume.settings.value_bytes)
        buffer = channel.receive_buffer(HEADER_BYTES + codec.padded(most))
        pending = kv_channel(channel).kv_retrieve(self.namespace, self.pseudonym, buffer)
        header, data = buffer[:HEADER_BYTES], buffer[HEADER_BYTES:]
        source = Source(header, data, 0, pending, None, HEADER_BYTES, may_be_short=True)
        first = min(len(buffer), HEADER_BYTES + codec.unit_bytes)
        opened = yield from self._header(channel, pending, header, first, request.deadline)
        if isinstance(opened, MissCause):
            return opened
        if before is not None and opened.bound != before.bound:
            # Another write of the key since the first range was served: these are not the same bytes.
            source.abandon(channel)
            return MissCause.EVICTED
        served = yield from self._serve(request, opened, source)
        if not isinstance(served, MissCause):
            self._open = opened
        return served

    def _header(
        self, channel: IoChannel, pending: KvPending, header: memoryview, at_least: int, deadline: float
    ) -> Steps[OpenSlot | MissCause]:
        """Wait for the header, and for `at_least` bytes where they come; the proven header, or the cause."""
        volume = self._volume
        cause = yield from wait_for(channel, pending, deadline, at_least)
        if pending.missing:
            return volume.absence(self.pseudonym)
        if cause is not None:
            return cause
        proven = self._proven(channel, pending, header)
        if isinstance(proven, MissCause) and not pending.done:
            channel.abandon(pending)
        return proven

    def _proven(self, channel: IoChannel, pending: KvPending, header: memoryview) -> OpenSlot | MissCause:
        volume = self._volume
        if pending.received < HEADER_BYTES:
            # Shorter than any slot. The buffer still has the header of an earlier read in it.
            return MissCause.CORRUPT
        opened = volume.codec.open(header, self.key, volume.place(self.namespace, self.pseudonym))
        if isinstance(opened, MissCause):
            # What opens as another key's slot does not lie here by anybody's right: no slot is used again.
            return MissCause.CORRUPT if opened is MissCause.EVICTED else opened
        if opened.expiry and opened.expiry <= channel.wall():
            return MissCause.EXPIRED
        return opened if 0 < opened.length <= volume.settings.value_bytes else MissCause.CORRUPT
