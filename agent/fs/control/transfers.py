"""Values between the pool and registered memory: ioctl(2) on the session's file (host_shim/transfer_wire.py).

A LOAD is a read of the session's file and a STORE a write, in pieces of 1 MiB with a deadline for each, into
and out of the client's own memory. Suites whose proof is a CRC of the text read that twice, so their text
passes through memory of ours: a client's change meanwhile must not look like a broken drive.
"""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from agent.fs.control.registered_memory import REGIONS_MAX, RegisteredMemory
from agent.fs.control.session import ELSEWHERE, ControlSession, Ticket, outcome_of
from agent.fs.interface import FsError
from agent.fs.value_writer import errno_of
from agent.inline.scatter import Scatter, Target
from agent.pool.access import ServedVolume
from agent.pool.counters import MissCause
from agent.pool.errors import BadPut, PutElsewhere, PutRefused
from agent.pool.prestage.readahead import Readahead
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.read.reader_base import Reader
from agent.pool.steps import IoChannel, Steps
from agent.pool.steps import Outcome as Settled
from agent.pool.write.batch import UNTRIED, Became, Untried
from host_shim.control_wire import MalformedControl, Outcome
from host_shim.transfer_wire import (
    SHORT_BYTES,
    TOGETHER_BYTES,
    Ioctl,
    ManyTransfers,
    Transfer,
    decode_many_untrusted,
    decode_register_untrusted,
    decode_transfer_untrusted,
    decode_unregister_untrusted,
    encode_done,
    encode_done_many,
    encode_registered,
    ioctl_of,
)

_HIT: Final = Outcome.HIT.value
PIECE_BYTES: Final = 1 << 20
"""What a worker's own buffers take at a time."""


@dataclass(eq=False)
class Transfers:
    """What a control face does by ioctl(2)."""

    _memory: RegisteredMemory
    _channel: Callable[[], IoChannel]
    _volume_of: Callable[[str], ServedVolume]
    _reading_at: Callable[[ControlSession, int], Reader]
    """What a ticket reads. Raises FsError."""
    _prestage: PrestageCache | None
    _continuer: Readahead
    borrows_slots: bool = False
    """This process of the agent writes no directory: it stores values by slots that another lends, or not at
    all."""

    def ioctl(self, session: ControlSession, process: int, command: int, data: memoryview) -> Settled[bytes]:
        """Serve one. Raises FsError, ENOTTY for a command that is none of these."""
        which = ioctl_of(command)
        try:
            if which is Ioctl.LOAD:
                return self._under_way(self._load(session, decode_transfer_untrusted(data)))
            if which is Ioctl.STORE:
                storing = self._store_borrowed if self.borrows_slots else self._store
                return self._under_way(storing(session, decode_transfer_untrusted(data)))
            if which is Ioctl.LOAD_MANY:
                return self._under_way(self._load_many(session, decode_many_untrusted(data), len(data)))
            if which is Ioctl.STORE_MANY:
                return self._under_way(self._store_many(session, decode_many_untrusted(data), len(data)))
            if which is Ioctl.REGISTER:
                return self._register(session, process, *decode_register_untrusted(data))
            if which is Ioctl.UNREGISTER:
                return self._unregister(session, decode_unregister_untrusted(data))
        except MalformedControl as malformed:
            raise FsError(errno.EINVAL, str(malformed)) from None
        raise FsError(errno.ENOTTY)

    def _under_way(self, steps: Steps[bytes]) -> Steps[bytes]:
        under_way = self._memory.under_way
        under_way.append(None)
        try:
            return (yield from steps)
        finally:
            under_way.pop()

    def _register(self, session: ControlSession, process: int, descriptor: int, size: int) -> bytes:
        with session.registering:
            if len(session.regions) >= REGIONS_MAX:
                raise FsError(errno.ENOSPC, f"a session has {REGIONS_MAX} regions at most")
            region = self._memory.register(process, descriptor, size)
            number = max(session.regions, default=0) + 1
            session.regions[number] = region
        return encode_registered(number, region.locked_byte)

    def _unregister(self, session: ControlSession, number: int) -> bytes:
        with session.registering:
            region = session.regions.pop(number, None)
        if region is None:
            raise FsError(errno.EINVAL, f"no region {number}")
        region.give_back()
        return b""

    def _pieces(self, session: ControlSession, transfer: Transfer) -> list[memoryview]:
        """The memory of the parts, in their order."""
        return [self._piece(session, *part) for part in transfer.parts]

    def _piece(self, session: ControlSession, number: int, offset: int, length: int) -> memoryview:
        region = session.regions.get(number)
        if region is None or offset + length > len(region.view):
            raise FsError(errno.EINVAL, "a part that lies in no region")
        return region.view[offset : offset + length]

    def _load_many(self, session: ControlSession, many: ManyTransfers, size: int) -> Steps[bytes]:
        """Raises FsError, EOPNOTSUPP where values of the volume are better read each by a request of its own,
        which several workers serve side by side."""
        if many.ttl_seconds:
            raise FsError(errno.EINVAL, "what is read has no time to live")
        volume, channel = self._volume_of(many.volume), self._channel()
        targets = [self._piece(session, *part) for part in many.parts]
        # A suite whose proof is a CRC may not open into memory that its client can change meanwhile.
        reading_all = (
            None
            if volume.volume.codec.suite.reads_text_again
            else volume.read_together(channel, many.keys, targets, self._prestage)
        )
        if reading_all is None:
            raise FsError(errno.EOPNOTSUPP, "values of this volume are read one by one now")
        if self._continuer.active:
            self._continuer.chain(volume.in_sets, many.keys, session.trail)
            self._continuer.reads(volume.in_sets, many.keys[-1])
        served = yield from reading_all
        done: list[int] = []
        for number, became in enumerate(served):
            if isinstance(became, MissCause):
                done += (became.value, 0)
            elif became is not None:
                done += (_HIT, became)
            else:
                reading = volume.reader(many.keys[number], self._prestage)
                try:
                    done += yield from self._fill(reading, targets[number])
                finally:
                    reading.close()
        return encode_done_many(done, size)

    def _load(self, session: ControlSession, transfer: Transfer) -> Steps[bytes]:
        pieces = self._pieces(session, transfer)
        into: Target = pieces[0] if len(pieces) == 1 else Scatter(pieces)
        if transfer.ticket is not None:
            reading = self._reading_at(session, transfer.ticket)
            return encode_done(*(yield from self._fill(reading, into)))
        volume = self._volume_of(transfer.volume)
        if self._continuer.active:
            self._continuer.chain(volume.in_sets, (transfer.key,), session.trail)
            self._continuer.reads(volume.in_sets, transfer.key)
        reading = volume.reader(transfer.key, self._prestage)
        try:
            return encode_done(*(yield from self._fill(reading, into)))
        finally:
            reading.close()

    def _fill(self, reading: Reader, into: Target) -> Steps[tuple[int, int]]:
        """Outcome and length, for the answer."""
        channel, done, room = self._channel(), 0, len(into)
        aside = reading.volume.codec.suite.reads_text_again
        while done < room:
            piece = into[done : done + PIECE_BYTES] if room > PIECE_BYTES else into
            own = memoryview(bytearray(len(piece) if aside else 0))
            deadline = channel.now() + reading.volume.timing.read_deadline
            got = yield from reading.read(channel, done, own if aside else piece, deadline)
            if aside:
                piece[:got] = own[:got]
                channel.tally(reading.volume.settings.name).bytes_copied += got
            done += got
            if got < len(piece):
                break
        length, cause = reading.length, reading.cause
        if cause is not None:
            return cause.value, 0
        if length is None or done != min(length, room):
            return Outcome.UNKNOWN.value, 0
        return Outcome.HIT.value, length

    def _store(self, session: ControlSession, transfer: Transfer) -> Steps[bytes]:
        pieces = self._pieces(session, transfer)
        if transfer.ticket is not None:
            yield from self._take(session.ticket_to_write(transfer.ticket), pieces)
            return encode_done(Outcome.HIT.value, 0)
        volume = self._volume_of(transfer.volume)
        if self._continuer.active:
            self._continuer.chain(volume.in_sets, (transfer.key,), session.trail)
        ticket = Ticket(volume, transfer.key, None, sum(map(len, pieces)), transfer.ttl_seconds)
        try:
            yield from self._take(ticket, pieces)
        finally:
            ticket.drop()
        return encode_done(Outcome.HIT.value, 0)

    def _store_borrowed(self, session: ControlSession, transfer: Transfer) -> Steps[bytes]:
        """A whole value of one piece. Raises FsError, EREMOTE for any other."""
        pieces = self._pieces(session, transfer)
        if transfer.ticket is not None or len(pieces) != 1 or len(pieces[0]) > PIECE_BYTES:
            raise FsError(errno.EREMOTE, ELSEWHERE)
        volume, channel = self._volume_of(transfer.volume), self._channel()
        if len(pieces[0]) > volume.settings.value_bytes:
            raise FsError(errno.EFBIG, f"a value has {volume.settings.value_bytes} bytes at most")
        storing = (
            None
            if volume.volume.codec.suite.reads_text_again
            else volume.write_together(channel, (transfer.key,), pieces, transfer.ttl_seconds)
        )
        if storing is None:
            raise FsError(errno.EREMOTE, ELSEWHERE)
        try:
            became = (yield from storing)[0]
        except PutElsewhere:
            became = UNTRIED
        if isinstance(became, Untried):
            raise FsError(errno.EREMOTE, ELSEWHERE)
        if isinstance(became, BadPut):
            raise FsError(errno.EINVAL, str(became))
        if isinstance(became, PutRefused):
            raise FsError(errno_of(became), str(became))
        return encode_done(Outcome.HIT.value, 0)

    def _store_many(self, session: ControlSession, many: ManyTransfers, size: int) -> Steps[bytes]:
        """A value that is too long for the volume is refused alone. Raises FsError, EOPNOTSUPP where values
        of the volume are better put each by a request of its own."""
        volume, keys = self._volume_of(many.volume), many.keys
        values = [self._piece(session, *part) for part in many.parts]
        longest = max(map(len, values))
        if longest > SHORT_BYTES or sum(map(len, values)) > TOGETHER_BYTES:
            raise FsError(errno.EINVAL, f"values of {SHORT_BYTES} bytes and {TOGETHER_BYTES} in all at most")
        most = volume.settings.value_bytes
        done = [Outcome.REFUSED.value, most] * len(values)
        numbers: Sequence[int] = range(len(values))
        if longest > most:
            numbers = [number for number in numbers if len(values[number]) <= most]
            keys, values = [keys[number] for number in numbers], [values[number] for number in numbers]
            if not values:
                return encode_done_many(done, size)
        # A suite whose proof is a CRC reads its text twice, and a client can change it meanwhile.
        storing_all = (
            None
            if volume.volume.codec.suite.reads_text_again
            else volume.write_together(self._channel(), keys, values, many.ttl_seconds)
        )
        if storing_all is None:
            if self.borrows_slots:
                raise FsError(errno.EREMOTE, ELSEWHERE)
            raise FsError(errno.EOPNOTSUPP, "values of this volume are put one by one now")
        if self._continuer.active:
            self._continuer.chain(volume.in_sets, keys, session.trail)
        if not self.borrows_slots:  # else write_borrowed decides
            self._channel().gives_way()
        try:
            became = yield from storing_all
        except PutElsewhere:
            raise FsError(errno.EREMOTE, ELSEWHERE) from None
        for number, one in zip(numbers, became, strict=True):
            done[2 * number] = _outcome_of(one).value
            done[2 * number + 1] = 0
        return encode_done_many(done, size)

    def _take(self, ticket: Ticket, pieces: list[memoryview]) -> Steps[None]:
        channel, at = self._channel(), 0
        aside = ticket.volume.volume.codec.suite.reads_text_again
        for piece in pieces:
            for start in range(0, len(piece), PIECE_BYTES):
                part = piece[start : start + PIECE_BYTES]
                if aside:
                    part = memoryview(bytes(part))
                yield from ticket.put(channel, at, part)
                at += len(part)


def _outcome_of(became: Became) -> Outcome:
    if isinstance(became, bool):
        return Outcome.HIT
    return Outcome.UNKNOWN if isinstance(became, Untried) else outcome_of(became)
