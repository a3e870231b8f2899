"""The receive half of an NVMe/TCP connection, for both roles and without I/O. Read `pdu.py` first.

It answers one question, "into which buffer should the next bytes go", so that payload is received straight
into its place:

    while True:
        n = sock.recv_into(receiver.next_buffer())
        for event in receiver.received(n): ...

Headers are read into a staging buffer, which may hold several PDUs and the beginning of a payload. As soon
as the header of a PDU with data is whole and its digest verified, the owner is asked where the data belong
(`place`). What staging holds of them is copied there; the rest is received there. While the owner awaits
long payloads (`awaits_long`), little of staging is filled.

`next_buffers` is for one call that receives what follows, too. Behind the rest of a payload it has the places
of the answers that the owner expects next, each behind room for its header. Where something else comes, its
bytes are put in order again, and only then looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

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


Expected: TypeAlias = tuple[int, memoryview]
"""An answer that is likely to come as one C2HData: the id of its command, and the place of all its data."""
EXPECTED_MAX: Final = 32


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
        self.surprises = 0
        """How often something else came than what was expected."""
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
        self._expected: Sequence[Expected] = ()
        """Those whose places the last buffers had."""
        self._headers = memoryview(bytearray(EXPECTED_MAX * SMALLEST_PDU))
        self._header_views = [
            self._headers[at : at + SMALLEST_PDU] for at in range(0, len(self._headers), SMALLEST_PDU)
        ]

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
        self._expected = ()
        if self.payload_left:
            return self._views[0]
        if self._start:
            # The rest is less than one header, so moving it is cheap.
            rest = self._staging[self._start : self._end]
            self._staging[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._view[self._end : LONG_AHEAD_BYTES if self.awaits_long else STAGING_BYTES]

    def next_buffers(self, expected: "Sequence[Expected]" = ()) -> list[memoryview]:
        """Where the next bytes of the stream go, to be filled in order: the rest of a payload, the answers
        that are `expected` behind it, then staging.

        Up to `EXPECTED_MAX` are looked at. Their memory is written to also where something else comes.
        """
        self._expected = ()
        buffers: list[memoryview] = []
        if self.payload_left:
            buffers += self._views
        elif self._end != self._start:
            return [self.next_buffer()]  # a part of a header: the rest of it first
        # From here on staging is empty: what was in it of the payload has been copied to its place.
        self._start = self._end = 0
        if expected and not self.digests.header and not self.digests.data:
            self._expected = expected
            for (_, place), header in zip(expected, self._header_views, strict=False):
                buffers.append(header)
                buffers.append(place)
        buffers.append(self._view[: LONG_AHEAD_BYTES if self.awaits_long else STAGING_BYTES])
        return buffers

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
        if self._expected:
            expected, self._expected = self._expected, ()
            count = self._take_expected(expected, count, events)
        self._end += count
        while self._end > self._start and self._step(events):
            pass
        return events

    def _take_expected(self, expected: "Sequence[Expected]", count: int, events: list[Event]) -> int:
        """`count` bytes are in the places of these answers and in staging; how many are left in staging."""
        at = 0
        for number, (cid, place) in enumerate(expected[:EXPECTED_MAX]):
            if count < SMALLEST_PDU:
                self._staging[:count] = self._headers[at : at + count]
                return count
            answer = plain_answer_untrusted(self._headers, at)
            size = len(place)
            if answer is None or answer.cid != cid or answer.offset or answer.data_length != size:
                self.surprises += 1
                self._take_in_order(expected[number:EXPECTED_MAX], at, count, events)
                return 0
            at += SMALLEST_PDU
            count -= SMALLEST_PDU
            if count < size:
                self._begin(answer, size)
                if count:
                    self._landed(count)
                return 0
            self._owner.place(answer)  # all of it is there by now
            count -= size
            events.append(answer)
        return count

    def _take_in_order(self, places: "Sequence[Expected]", at: int, count: int, events: list[Event]) -> None:
        """The stream has something else than these answers: take its bytes as if they came only now."""
        raw = bytearray()
        for _, place in places:
            raw += self._headers[at : at + SMALLEST_PDU]
            raw += place
            at += SMALLEST_PDU
        raw += self._view
        left = memoryview(raw)
        left = left[:count]
        while len(left):
            buffer = self.next_buffer()
            part = min(len(buffer), len(left))
            buffer[:part] = left[:part]
            left = left[part:]
            events += self.received(part)

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
