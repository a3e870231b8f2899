"""What a guest holds from before the agent was killed: found and opened again when it is next asked for.

See guest_view.py for what is promised.
"""

import errno
import os
from collections.abc import Callable
from typing import Final, TypeVar, cast

from agent.fs.interface import FACE_CONTROL, FACE_KV, FACE_SHARED, FACE_SHIFT, Caller, FsError, Tree, face_of
from agent.fs.virtiofs.guest_books import GuestBooks, Handle
from agent.pool.steps import Outcome, Steps, is_steps

T = TypeVar("T")

FIXED_NUMBERS: Final = 1 << 16
"""Numbers of /kv and /shared below this are their volumes, the same in every process."""
WHOLE_OR_ABSENT: Final = frozenset({FACE_KV, FACE_SHARED})
"""Faces whose files are whole or absent, and have other numbers in each process."""
NOT_AGAIN: Final = os.O_CREAT | os.O_EXCL | os.O_TRUNC


def is_value(ino: int) -> bool:
    """Whether a node is a value of /kv, or a file or folder of /shared: another process would not know its
    number."""
    return ino >> FACE_SHIFT in WHOLE_OR_ABSENT and ino & ((1 << FACE_SHIFT) - 1) > FIXED_NUMBERS


def _steps_of(outcome: Outcome[T]) -> Steps[T]:
    """An outcome as steps, for those that go on after it."""
    if is_steps(outcome):
        return (yield from cast("Steps[T]", outcome))
    return cast(T, outcome)


def _with_lost_data(books: GuestBooks) -> set[Handle]:
    """All files that were open at a node with data written and not flushed: as with fsync(2), each tells it
    once.

    The books remember that it is still to be told."""
    files = {place: file for place, file in books.files.items() if not file.is_folder}
    nodes = {ino for (ino, _), file in files.items() if file.dirty}
    lost = {place for place in files if place[0] in nodes}
    for place in lost:
        if not files[place].dirty:
            books.wrote(*place)
    return lost


class LeftOpen:
    """The part of a guest's books that an earlier process had written."""

    def __init__(self, tree: Tree, books: GuestBooks, name: str = "guest") -> None:
        self._face = face_of(tree)
        self._caller = Caller(guest=name)
        self._books = books
        self.values = {ino for ino in books.nodes if is_value(ino)}
        """Values that have not been asked for since."""
        self.moved: dict[int, int] = {}
        """Where a value was found again: the tree's node, by the guest's."""
        self.reading: dict[Handle, int | None] = {}
        """Values opened again by the tree's node and handle: bytes of the value, None until it is read
        from its beginning."""
        self._lost = _with_lost_data(books)
        self._sizes: dict[int, int] = {}

    def clear(self) -> tuple[dict[int, int], set[int]]:
        """The guest has begun anew; where its values had been found, and which had not been asked for."""
        moved, self.moved = self.moved, {}
        values, self.values = self.values, set()
        self.reading = {}
        self._lost = set()
        return moved, values

    def forgotten(self, ino: int, count: int) -> tuple[int, int]:
        """The guest gives back `count` references to a node: the tree's node, and how many it gets back.

        A value that was found again has one there, whatever the guest had before.
        """
        is_last = ino not in self._books.nodes
        if ino in self.values:
            if is_last:
                self.values.discard(ino)
            return ino, 0
        if ino in self.moved:
            return (self.moved.pop(ino), 1) if is_last else (self.moved[ino], 0)
        return ino, count

    def closed(self, ino: int, handle: int, place: Handle | None) -> None:
        self._lost.discard((ino, handle))
        if place is not None:
            self.reading.pop(place, None)

    def found_then(self, ino: int, operation: Callable[[int], Outcome[T]]) -> Steps[T]:
        """Look a value up under the name that the guest knows, then do something with it."""
        return (yield from _steps_of(operation((yield from self._find(ino)))))

    def _find(self, ino: int) -> Steps[int]:
        node = self._books.nodes.get(ino)
        if node is None:
            raise FsError(errno.ESTALE, "a node that this guest was not told of")
        if ino in self.values:
            parent = node.parent
            if parent in self.values or parent in self.moved:
                parent = yield from self._find(parent)
            try:
                entry = yield from _steps_of(self._face(ino).lookup(self._caller, parent, node.name))
            except FsError as refusal:
                raise FsError(errno.ESTALE, "the value is not there any more") from refusal
            self.moved[ino] = entry.attributes.ino
            self._sizes[entry.attributes.ino] = entry.attributes.size
            self.values.discard(ino)
        return self.moved.get(ino, ino)

    def opened_then(
        self,
        ino: int,
        handle: int,
        opened: dict[Handle, Handle],
        operation: Callable[[int, int], Outcome[T]],
    ) -> Steps[T]:
        """Open a file once more, then do something with it."""
        file = self._books.files[ino, handle]
        face = ino >> FACE_SHIFT
        if face == FACE_CONTROL and not file.is_folder:
            raise FsError(errno.ENOTCONN, "the session was the earlier agent's")
        writes = file.flags & os.O_ACCMODE != os.O_RDONLY
        if (ino, handle) in self._lost or (face in WHOLE_OR_ABSENT and writes and not file.is_folder):
            # Told once for a file, as fsync(2) does; what is written from here on counts again.
            self._lost.discard((ino, handle))
            self._books.settled(ino, handle, self._books.writes(ino, handle))
            raise FsError(errno.EIO, "what was written last was lost with the earlier agent")
        inner = yield from self._find(ino)
        if file.is_folder:
            made = yield from _steps_of(self._face(ino).opendir(self._caller, inner, file.flags))
        else:
            made = yield from _steps_of(self._face(ino).open(self._caller, inner, file.flags & ~NOT_AGAIN))
        place = (inner, made.handle)
        if (ino, handle) in opened:
            # Another thread was quicker.
            closing = self._face(ino).releasedir if file.is_folder else self._face(ino).release
            yield from _steps_of(closing(*place))
            return (yield from _steps_of(operation(*opened[ino, handle])))
        if face in WHOLE_OR_ABSENT and not file.is_folder:
            self.reading[place] = None
        opened[ino, handle] = place
        return (yield from _steps_of(operation(*place)))

    def read(self, node: int, handle: int, offset: int, into: memoryview) -> Outcome[int]:
        """Read a file that was opened again; a value only from its beginning on."""
        if (node, handle) not in self.reading:
            return self._face(node).read(node, handle, offset, into)
        return self._read_value(node, handle, offset, into)

    def _read_value(self, node: int, handle: int, offset: int, into: memoryview) -> Steps[int]:
        if self.reading[node, handle] is None:
            if offset:
                raise FsError(errno.EIO, "the first part of the value came from an earlier agent")
            self.reading[node, handle] = self._sizes.get(node, 0)
        got = yield from _steps_of(self._face(node).read(node, handle, offset, into))
        size = self.reading.get((node, handle)) or 0
        if got < min(len(into), size - offset):
            raise FsError(errno.EIO, "the value was lost since the guest has opened it")
        return got
