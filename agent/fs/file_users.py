"""Who writes a file that is being written, who has closed it, and whether it is whole by that.

Both faces whose files are whole or absent ask this (value_writer.py, shared/file_writer.py). How one closing
is judged is in close_cause.py, and why in docs/decisions/0041-whole-by-path.md. The lock owner of WRITE and
FLUSH tells processes apart: one number for each table of open files, in a guest as well.
"""

import enum
import errno
from collections.abc import Callable
from typing import Final, TypeAlias

from agent.fs.close_cause import Closing, how_closed, process_of, same_process
from agent.fs.interface import PAGES, FsError, LockOwner

Judge: TypeAlias = Callable[[LockOwner, int, bytes, int], Closing]
"""A function with the arguments and the result of `how_closed`."""

HOLDERS_MAX: Final = 64
"""Tables of open files by which one file is written, and processes that open it by its path to write, too;
each is remembered until all have closed the file, or it has and another wants its place."""


class Closed(enum.Enum):
    """What a close says of the file."""

    WHOLE = "all that wrote have closed it, and so have its maker and who joined it"
    NOT_YET = "others have it open, or the one who closed it neither made nor wrote it"
    DYING = "a process that wrote, or its maker, or one that joined it, died with it open"
    UNTOLD = "nobody can say"


class FileUsers:
    """The tables of open files by which one file is made and written. Its owner's lock guards it."""

    def __init__(self, ino: int, maker: int, judge: Judge = how_closed) -> None:
        """`maker`: the thread that created the file."""
        self._ino = ino
        self._maker = process_of(maker) if maker > 0 else maker
        """Its process: the thread may end before."""
        self._makers_table = -1
        """The table of open files of the maker, once its process has written: the thread may have ended."""
        self._maker_closed = False
        self._joined: dict[int, bool] = {}
        """Other processes that opened the file by its path, to write their part of it; and whether each has
        it open still. The thread that opened it may end before."""
        self._judge = judge
        self._wrote: dict[int, int] = {}
        """The thread that wrote last, by table of open files."""
        self._unclosed: set[int] = set()
        """Tables that wrote and have not closed the file since."""
        self._in_doubt: set[int] = set()
        """Tables that have closed a descriptor of it, and may have another."""

    @property
    def wrote(self) -> bool:
        """Whether anybody has written."""
        return bool(self._wrote)

    @property
    def unclosed(self) -> bool:
        """Whether one that wrote has not closed it since."""
        return bool(self._unclosed)

    def is_maker(self, thread: int) -> bool:
        """Whether a thread that is there is of the process that made the file."""
        return same_process(thread, self._maker)

    def has_opened(self, thread: int) -> bool:
        """Whether a thread that is there is of a process that made the file, or that joined."""
        return self.is_maker(thread) or bool(self._joined_by(thread))

    def _joined_by(self, thread: int) -> list[int]:
        if not self._joined:
            return []
        return [other for other in list(self._joined) if same_process(thread, other)]

    def join(self, thread: int) -> None:
        """Note a process that has opened the file by its path to write in it, too: the file is whole once it
        has closed it as well. Raises FsError where too many have."""
        if self.is_maker(thread):
            self._maker_closed = False
            return
        process = process_of(thread)
        if process not in self._joined and len(self._joined) >= HOLDERS_MAX:
            closed = next((each for each, is_open in self._joined.items() if not is_open), None)
            if closed is None:
                raise FsError(errno.EMFILE, "too many processes write one file")
            del self._joined[closed]
        self._joined[process] = True

    def note(self, holder: LockOwner) -> None:
        """Note that this user writes. Raises FsError where too many do."""
        if holder is PAGES:
            return
        if holder.owner not in self._wrote:
            if len(self._wrote) >= HOLDERS_MAX:
                self._forget_one()
            if self.is_maker(holder.pid):
                self._makers_table = holder.owner
        self._wrote[holder.owner] = holder.pid
        self._unclosed.add(holder.owner)

    def _forget_one(self) -> None:
        """Forget a table that has closed the file. Raises FsError where there is none."""
        for owner in self._wrote:
            if owner not in self._unclosed and owner not in self._in_doubt:
                del self._wrote[owner]
                return
        raise FsError(errno.EMFILE, "too many processes write one file")

    def close(self, holder: LockOwner, name: bytes) -> Closed:
        """A descriptor was closed (FLUSH), of a file that is called `name` now."""
        made = holder.owner == self._makers_table or self.is_maker(holder.pid)
        joined = self._joined_by(holder.pid)
        wrote = holder.owner in self._wrote
        if not (made or wrote or joined):
            return Closed.NOT_YET
        how = self._judge(holder, self._wrote.get(holder.owner, 0), name, self._ino)
        if how is Closing.DYING:
            return Closed.DYING
        if how is Closing.KEPT or (how is Closing.ONE and not wrote):
            return Closed.NOT_YET
        if how is Closing.UNTOLD:
            self._unclosed.discard(holder.owner)
            return Closed.UNTOLD
        self._unclosed.discard(holder.owner)
        if how is Closing.MANY:
            self._in_doubt.add(holder.owner)
            return Closed.NOT_YET
        self._in_doubt.discard(holder.owner)
        self._maker_closed = self._maker_closed or made
        for thread in joined:
            self._joined[thread] = False
        is_whole = self._maker_closed and not (self._unclosed or self._in_doubt or any(self._joined.values()))
        return Closed.WHOLE if is_whole else Closed.NOT_YET
