"""The receive half of an NVMe/TCP connection, for both roles and without I/O. Read `pdu.py` first.

It answers one question, "into which buffer should the next bytes go", so that payload is received straight
into its place:

    while True:
        n = sock.recv_into(receiver.next_buffer())
        for event in receiver.received(n): ...

Headers are read into a staging buffer, which may hold several PDUs and the beginning of a payload. As soon
as the header of a PDU with data is whole and its digest verified, the owner is asked where the data belong
(`place`). What staging holds of them is copied there; the rest is received there. While the owner awaits
long payloads (`awaits_long`), little of staging is filled. `next_buffers` has staging behind the rest of a
payload: one call receives that and the PDUs that follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from nvmeof.errors import FatalErrorStatus, LocalProtocolError, MalformedPdu, RemoteProtocolError
from nvmeof.limits import LONG_AHEAD_BYTES, STAGING_BYTES
from nvmeof.tcp.crc32c import crc32c
from nvmeof.tcp.pdu import (
    COMMAND_PDU,
    COMMON,
    DIGEST,
    NEVER_DIGESTED,
    NO_DIGESTS,
    SMALLEST_PDU,
    DataPdu,
    Digests,
    Frame,
    Pdu,
    PduType,
    decode_frame_untrusted,
    decode_pdu_untrusted,
    plain_answer_untrusted,
    plain_command_untrusted,
    plain_completion_untrusted,
)


@dataclass(frozen=True, slots=True)
class BadDataDigest:
    """The data of this PDU have arrived, and their digest is wrong. The connection may go on."""

    pdu: DataPdu


Event: TypeAlias = Pdu | BadDataDigest
"""A PDU whose header and data are complete (the data are in their place), or one whose data are spoiled."""


class Owner(Protocol):
    """Knows the commands that data belong to."""

    def place(self, pdu: DataPdu) -> memoryview | Sequence[memoryview]:
        """Where `pdu.data_length` bytes go: writable memory of exactly that length, in one piece or more.

        Called before the events of the PDUs that arrived just before it have been handed out. May raise
        `RemoteProtocolError` when no such data are expected.
        """


class PduReceiver:
    """Bytes in, PDUs out. One per connection; after it has raised, the connection is over."""

    def __init__(self, owner: Owner, allowed: frozenset[PduType], digests: Digests = NO_DIGESTS) -> None:
        self.digests = digests
        self.pdu: DataPdu | None = None
        self.payload_left = 0
        """Bytes of that data which have not arrived."""
        self.awaits_long = False
        """Set by the owner: a payload may come next that is worth being received straight into its place."""
        self._owner = owner
        self._allowed = allowed
        self._takes_answers = PduType.C2H_DATA in allowed and PduType.CAPSULE_RESP in allowed
        self._takes_commands = PduType.CAPSULE_CMD in allowed
        self._staging = bytearray(STAGING_BYTES)
        self._view = memoryview(self._staging)
        self._start = 0
        self._end = 0
        self._views: list[memoryview] = []
        self._digest = 0
        self._trailing = False

    @property
    def mid_pdu(self) -> bool:
        """Whether a PDU has begun and not ended, which makes the end of the stream an error."""
        return self.pdu is not None or self._end != self._start

    @property
    def wrong_header(self) -> bytes:
        """After an error: the beginning of the wrong PDU, for a termination request."""
        hlen = self._staging[self._start + 2] if self._end - self._start > 2 else 0
        return bytes(self._view[self._start : min(self._end, self._start + (hlen or 128))])

    def next_buffer(self) -> memoryview:
        """Where the next bytes of the stream go: at least one byte, filled from its beginning."""
        if self.payload_left:
            return self._views[0]
        if self._start:
            # The rest is less than one header, so moving it is cheap.
            rest = self._staging[self._start : self._end]
            self._staging[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._view[self._end : LONG_AHEAD_BYTES if self.awaits_long else STAGING_BYTES]

    def next_buffers(self) -> list[memoryview]:
        """Where the next bytes of the stream go amid a payload, and behind it; to be filled in order."""
        # Staging is empty then: what was in it of the payload has been copied to its place.
        return [*self._views, self._view[: LONG_AHEAD_BYTES if self.awaits_long else STAGING_BYTES]]

    def received(self, count: int) -> list[Event]:
        """`count` more bytes are in the buffer that `next_buffer` gave, or in those of `next_buffers`.

        Raises `RemoteProtocolError`.
        """
        events: list[Event] = []
        if self.payload_left:
            while count and self.payload_left:
                part = min(count, len(self._views[0]))
                self._landed(part)
                count -= part
            if self.payload_left:
                return events
            self._payload_complete(events)
            self._start = self._end = 0
        self._end += count
        while self._end > self._start and self._step(events):
            pass
        return events

    def redirect(self, views: Sequence[memoryview]) -> None:
        """Send the rest of the data that are arriving elsewhere: `payload_left` bytes in all."""
        if sum(map(len, views)) != self.payload_left:
            raise LocalProtocolError("a redirection has to cover what is left of the data, exactly")
        self._views = [view for view in views if len(view)]

    def _landed(self, count: int) -> None:
        """`count` bytes have been written to the beginning of the first view."""
        view = self._views[0]
        if self.digests.data:
            self._digest = crc32c(view[:count], self._digest)
        if count == len(view):
            del self._views[0]
        else:
            self._views[0] = view[count:]
        self.payload_left -= count

    def _payload_complete(self, events: list[Event]) -> None:
        if self.digests.data:
            self._trailing = True
            return
        assert self.pdu is not None
        events.append(self.pdu)
        self.pdu = None

    def _step(self, events: list[Event]) -> bool:
        """Take one header, digest or stretch of data out of staging; False if there is not enough of it."""
        start = self._start
        available = self._end - start
        if self.payload_left:
            count = min(available, len(self._views[0]))
            self._views[0][:count] = self._view[start : start + count]
            self._start += count
            self._landed(count)
            if not self.payload_left:
                self._payload_complete(events)
            return True
        if self._trailing:
            if available < 4:
                return False
            assert self.pdu is not None
            good = DIGEST.unpack_from(self._staging, start)[0] == self._digest
            events.append(self.pdu if good else BadDataDigest(self.pdu))
            self.pdu, self._trailing, self._digest = None, False, 0
            self._start += 4
            return True
        if available < COMMON.size:
            return False
        digests = self.digests
        # The commonest by one look. Where it is another, or something is wrong with it: step by step.
        if available >= SMALLEST_PDU and not digests.header and not digests.data:
            if self._takes_answers:
                if self._take_answer(start, events):
                    return True
            elif self._takes_commands and available >= COMMAND_PDU:
                command = plain_command_untrusted(self._staging, start)
                if command is not None:
                    if command.data_length:
                        self._begin(command, command.data_length)
                    else:
                        events.append(command)
                    self._start = start + COMMAND_PDU
                    return True
        frame = decode_frame_untrusted(self._staging, start, digests, self._allowed)
        if available < frame.data_offset:
            return False
        self._take(frame, events)
        return True

    def _take_answer(self, start: int, events: list[Event]) -> bool:
        """Take data or a completion without digests; False if it is neither, or is wrong."""
        data = plain_answer_untrusted(self._staging, start)
        if data is not None:
            self._begin(data, data.data_length)
        else:
            completion = plain_completion_untrusted(self._staging, start)
            if completion is None:
                return False
            events.append(completion)
        self._start = start + SMALLEST_PDU
        return True

    def _take(self, frame: Frame, events: list[Event]) -> None:
        """A whole header is at the start of staging."""
        start, hlen = self._start, frame.header_bytes
        begins_or_ends = NEVER_DIGESTED[frame.kind]
        is_termination = begins_or_ends and frame.kind >= PduType.H2C_TERM_REQ
        raw = self._view[start : start + (frame.total if is_termination else hlen)]
        if self.digests.header and frame.data_offset > hlen and not is_termination:
            (stated,) = DIGEST.unpack_from(self._staging, start + hlen)
            if stated != crc32c(raw):
                raise RemoteProtocolError(
                    "the header digest is wrong",
                    fatal_error_status=FatalErrorStatus.HEADER_DIGEST_ERROR,
                    information=stated,
                )
        pdu = decode_pdu_untrusted(frame, raw)
        if frame.data_length:
            assert not begins_or_ends
            self._begin(pdu, frame.data_length)  # type: ignore[arg-type]
            self._start = start + frame.data_offset
            return
        self._start = start + frame.data_offset
        if begins_or_ends and not is_termination and self._end != self._start:
            # Those bytes were sent before the digests were agreed on, so they cannot be understood.
            raise MalformedPdu(
                "more bytes on the heels of the connection's initialization",
                fatal_error_status=FatalErrorStatus.SEQUENCE_ERROR,
            )
        events.append(pdu)

    def _begin(self, pdu: DataPdu, length: int) -> None:
        where = self._owner.place(pdu)
        if isinstance(where, memoryview):
            views, given = [where], len(where)
        else:
            views = [view for view in where if len(view)]
            given = sum(map(len, views))
        if given != length:
            raise LocalProtocolError(f"place() gave {given} bytes for {length}")
        self.pdu, self._views, self.payload_left, self._digest = pdu, views, length, 0
