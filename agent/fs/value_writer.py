"""A value written by path: when it is complete, and when it never will be. Absent or whole is the rule.

The bytes themselves do not say that they are all. These events do (docs/decisions/0041-whole-by-path.md):

| event | the value |
| --- | --- |
| all that wrote have closed it, and so has its maker (close_cause.py: MEANT) | is complete |
| nobody has it open any more, and all that wrote have closed it (MANY counts here alone) | is complete |
| the last byte comes of a length that was declared (ftruncate, fallocate) | is complete |
| a process that wrote closes it after an fsync that no write followed (UNTOLD) | is complete |
| it closes it without one (UNTOLD) | is dropped, EOPNOTSUPP |
| a process that wrote dies with it open, or its maker does (DYING) | is dropped, later calls get EIO |
| a process closes a copy that neither made it nor wrote (after a fork) | stays as it is |

A value that is dropped leaves its slot at once. The lock owner of WRITE and FLUSH tells processes apart: one
number for each table of open files, in a guest as well.
"""

import errno
import threading

from agent.fs.close_cause import how_closed
from agent.fs.file_users import Closed, FileUsers, Judge
from agent.fs.interface import FsError, LockOwner
from agent.pool.access import ServedVolume
from agent.pool.errors import BadPut, PutRefused, ReplacedMeanwhile, TooLong
from agent.pool.steps import Acquire, Held, IoChannel, Steps
from agent.pool.write.writer_base import Writer


def errno_of(refused: PutRefused) -> int:
    """A refused put as an errno: no room is ENOSPC, an enclosure that failed, or is away with its room, is
    EIO, another value that came meanwhile is ESTALE."""
    if isinstance(refused, ReplacedMeanwhile):
        return errno.ESTALE
    return errno.ENOSPC if refused.cause is None and not refused.passes else errno.EIO


def _errno_of_either(refused: BadPut | PutRefused) -> int:
    if isinstance(refused, PutRefused):
        return errno_of(refused)
    return errno.EFBIG if isinstance(refused, TooLong) else errno.EINVAL


class ValueWriter:
    """One value on its way in through a file. Safe from any thread."""

    def __init__(
        self,
        volume: ServedVolume,
        writing: Writer,
        name: bytes,
        ino: int,
        maker: int,
        judge: Judge = how_closed,
    ) -> None:
        """`writing` is to the volume. `maker`: the thread that created the file."""
        self._volume = volume
        self._name = name
        self.writing = writing
        self._users = FileUsers(ino, maker, judge)
        self._declared = 0
        self._failed = 0
        """The errno of what was refused: from then on there is no value to be had from this file."""
        self._spoilt = False
        self._synced = False
        self._second_told = False
        self._lock = threading.Lock()

    @property
    def length(self) -> int:
        """The declared length, or that of the bytes so far."""
        return max(self._declared, self.writing.received)

    def declare(self, length: int) -> None:
        """The value will have so many bytes. Raises FsError, also once bytes have come."""
        if length == self.writing.received:
            return
        if self.writing.received or self._failed:
            raise FsError(errno.EPERM, "a value is immutable")
        before = self.writing
        try:
            self.writing = self._volume.writer(before.key, length=length)
        except BadPut as bad:
            raise FsError(_errno_of_either(bad), str(bad)) from None
        self._declared = length

    def write(self, channel: IoChannel, offset: int, data: memoryview, holder: LockOwner) -> Steps[None]:
        """Take bytes. Raises FsError; after a refusal for good."""
        writing = self.writing
        channel.gives_way()
        deadline = channel.now() + writing.volume.timing.write_deadline
        if not (yield Acquire(self._lock, deadline, gives_way=True)):
            raise FsError(errno.EIO)
        with Held(self._lock):
            if self._failed:
                raise FsError(self._failed, "the value was given up before")
            if writing.finished:
                yield from self._spoil(channel, deadline)
            self._note(holder)
            try:
                yield from writing.write(channel, offset, data, deadline)
            except (BadPut, PutRefused) as refused:
                # The bytes so far must not be sealed as if they were the whole value.
                self._give_up(_errno_of_either(refused))
                raise FsError(self._failed, str(refused)) from None

    def sync(self) -> None:
        """Somebody asked for an fsync. It stores nothing by itself: a program may write on after it."""
        if self._failed:
            raise FsError(self._failed, "a write was refused, so nothing is stored")
        self._synced = True

    def close(self, channel: IoChannel, holder: LockOwner) -> Steps[None]:
        """A descriptor was closed (FLUSH). Raises FsError where the value should be complete and is not."""
        if not self.writing.received:
            return
        channel.gives_way()
        deadline = channel.now() + self.writing.volume.timing.write_deadline
        if not (yield Acquire(self._lock, deadline, gives_way=True)):
            raise FsError(errno.EIO)
        with Held(self._lock):
            if self._failed:
                raise FsError(self._failed, "a write was refused, or a writer died: nothing is stored")
            if self.writing.finished or self._completes(holder):
                yield from self._finish(channel, deadline)

    def end(self, channel: IoChannel) -> Steps[None]:
        """Nobody has the file open any more (RELEASE). Nobody hears of an error either."""
        channel.gives_way()
        deadline = channel.now() + self.writing.volume.timing.write_deadline
        if not (yield Acquire(self._lock, deadline, gives_way=True)):
            return  # an operation of the file is still under way, and the kernel has given it up
        with Held(self._lock):
            if self.writing.finished:
                return
            if self._failed or self._users.unclosed or not self.writing.received:
                self.writing.drop()
                return
            try:
                yield from self.writing.finish(channel, deadline)
            except (BadPut, PutRefused):
                return  # it is counted as refused, and has given up its slot

    def _note(self, holder: LockOwner) -> None:
        self._users.note(holder)
        self._synced = False

    def _completes(self, holder: LockOwner) -> bool:
        """Whether this close says that the value is whole. Raises FsError where nobody can say."""
        closed = self._users.close(holder, self._name)
        if closed is Closed.UNTOLD and not self._synced:
            self._give_up(errno.EOPNOTSUPP)
            raise FsError(errno.EOPNOTSUPP, "nobody can say whether the value is whole: fsync it first")
        if closed is Closed.DYING:
            self._give_up(errno.EIO)
        return closed in (Closed.WHOLE, Closed.UNTOLD)

    def _finish(self, channel: IoChannel, deadline: float) -> Steps[None]:
        try:
            yield from self.writing.finish(channel, deadline)
        except (BadPut, PutRefused) as refused:
            raise FsError(_errno_of_either(refused), str(refused)) from None
        if self.writing.already_there and not self._second_told:
            self._second_told = True
            raise FsError(errno.EEXIST, "the key was stored meanwhile; the first write stays")

    def _give_up(self, number: int) -> None:
        self._failed = number
        self.writing.drop()

    def _spoil(self, channel: IoChannel, deadline: float) -> Steps[None]:
        """Bytes after the value was complete: half of it must not stay behind."""
        # What this writer did not store, because it failed or came second, is not its to delete.
        if self.writing.stored and not self._spoilt:
            self._spoilt = True
            try:
                yield from self._volume.delete(channel, self.writing.key, deadline)
            except PutRefused:
                # It may stay for as long as its enclosure is away; the writer is told EIO either way.
                self._spoilt = False
        raise FsError(errno.EIO, "the value was complete before")
