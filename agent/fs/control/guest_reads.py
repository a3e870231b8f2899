"""Control sessions of a guest as a reader sees them: values that it serves instead of the first process.

The sessions live in the first process (face.py). Here are gets of whole
values: by name, and by tickets, whose bindings are asked for and remembered. Whatever else is asked is
EREMOTE, and the first process answers it.
"""

import errno
from collections.abc import Callable, Sequence
from typing import Final

from agent.fs.control.face import SESSION_INO, ControlFace
from agent.fs.control.session import ELSEWHERE
from agent.fs.guest_sessions import Binding, Bound, GuestWords
from agent.fs.interface import Caller, FileSystem, FsError, Xattr
from agent.inline.scatter import Target
from agent.pool.access import ServedVolume
from agent.pool.steps import IoChannel, Steps
from agent.pool.steps import Outcome as Settled
from host_shim.control_wire import MalformedControl, Outcome, decode_value_xattr_untrusted, ticket_at

SESSIONS_MAX: Final = 1024
BINDINGS_MAX: Final = 65_536
"""Of these sessions, remembered since all were forgotten; beyond either they are asked for again."""
MISFITS: Final = 64
"""Requests of one size that are not tried here after one was too small. To try costs a read in vain."""


class _Session:
    def __init__(self, bound: Bound) -> None:
        self.version: Final = bound.version
        self.by_ticket: Final = {each.ticket: each for each in bound.bindings}


class GuestReads(FileSystem):
    """For all queues of one guest in this process."""

    def __init__(
        self,
        face: ControlFace,
        volumes: Sequence[ServedVolume],
        channel: Callable[[], IoChannel],
        may_read: Callable[[ServedVolume], bool],
        words: GuestWords,
        look: Callable[[int], Bound],
    ) -> None:
        """`face`: over the same volumes. `look`: asks the first process what is bound in a session, by the
        guest's handle, in the thread of a queue."""
        self._face = face
        self._volumes = {each.settings.name: each for each in volumes}
        self._channel, self._may_read, self._words, self._look = channel, may_read, words, look
        self._sessions: dict[int, _Session] = {}
        self._remembered = 0
        """Bindings, since all were forgotten."""
        self._misfits: dict[str, tuple[int, int]] = {}
        """By volume, the size of a request that was too small for its value, and for how many more of that
        size this is believed."""

    def getxattr(self, caller: Caller, ino: int, name: bytes, room: memoryview) -> Settled[Xattr]:
        try:
            _, key = decode_value_xattr_untrusted(name)
        except MalformedControl:
            raise _elsewhere() from None
        if ino != SESSION_INO or self._words.take_mark(key):
            raise _elsewhere()
        return self._face.getxattr(caller, ino, name, room)

    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Settled[int]:
        number, within = ticket_at(offset)
        if ino != SESSION_INO or number < 0:
            raise _elsewhere()
        binding = self._binding(handle, number)
        if within:
            if binding is not None and self._words.ended_before(binding.serial, within):
                return 0
            raise _elsewhere()
        volume = None if binding is None else self._volumes.get(binding.volume)
        if binding is None or volume is None or not self._may_read(volume):
            raise _elsewhere()
        if self._is_too_small(binding.volume, len(into)) or self._words.take_mark(binding.key):
            raise _elsewhere()
        return self._get(volume, binding, into)

    def _binding(self, handle: int, number: int) -> Binding | None:
        known = self._sessions.get(handle)
        if known is None or known.version != self._words.version_of(handle):
            known = self.learn(handle, self._look(handle))
        return known.by_ticket.get(number)

    def learn(self, handle: int, bound: Bound) -> _Session:
        """Remember what is bound in a session, by the guest's handle."""
        if len(self._sessions) >= SESSIONS_MAX or self._remembered > BINDINGS_MAX:
            self._sessions.clear()
            self._remembered = 0
        known = self._sessions[handle] = _Session(bound)
        self._remembered += len(known.by_ticket)
        return known

    def _is_too_small(self, volume: str, size: int) -> bool:
        """Whether a value was longer than a request of this size, a short while ago."""
        found, left = self._misfits.get(volume, (0, 0))
        if found != size:
            return False
        if left:
            self._misfits[volume] = (found, left - 1)
        else:
            self._misfits.pop(volume, None)
        return left > 0

    def _get(self, volume: ServedVolume, binding: Binding, into: Target) -> Steps[int]:
        channel, reading = self._channel(), volume.reader(binding.key)
        try:
            deadline = channel.now() + volume.timing.read_deadline
            got = yield from reading.read(channel, 0, into, deadline)
            if reading.cause is not None:
                self._words.tell(binding.serial, reading.cause.value)
                return 0
            if reading.length is None:
                raise _elsewhere()
            if got < reading.length:
                # The guest reads on, and the first process may find another value of this key by then.
                self._misfits[binding.volume] = (len(into), MISFITS)
                tally = channel.tally(volume.settings.name)
                tally.gets_hit -= 1
                tally.bytes_read -= got
                raise _elsewhere()
        finally:
            reading.close()
        self._words.tell(binding.serial, Outcome.HIT, got)
        return got


def _elsewhere() -> FsError:
    return FsError(errno.EREMOTE, ELSEWHERE)
