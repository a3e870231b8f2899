"""Files whose chunks are all there: held for one who opens them, and given up where a chunk is gone.

There are more names than chunks, so a full volume has names of files that are gone. An engine that asks
whether a file is there, before it stores it, must not take such a name for a file. So the lookup of a single
agent looks at what is remembered of the chunks, at no round trip, and asks where one is gone by that. In a
full volume it asks also where nothing is remembered, or where other agents may have evicted: beside the name,
where the file is known.
"""

import errno
import os
from collections.abc import Callable, Sequence
from typing import Final

from agent.fs.interface import Caller, FsError
from agent.fs.shared.call_prediction import Habits
from agent.fs.shared.discards import Discards
from agent.fs.shared.file_reader import hold_all, let_go
from agent.fs.shared.manifest import HOLE, IDENTITY_BYTES, Manifest
from agent.fs.shared.names import Names
from agent.fs.shared.nodes import Node
from agent.fs.shared.paths import chunk_key
from agent.fs.shared.recent_names import NamesSeen
from agent.fs.shared.volume import Hold, SharedVolume
from agent.host_os.per_user_bounds import Holder
from agent.pool.counters import MissCause
from agent.pool.steps import IoChannel, Steps, beside

LOST: Final = frozenset({MissCause.EVICTED, MissCause.EXPIRED, MissCause.NEVER_STORED})
"""A file with a chunk that is gone by one of these causes does not come back. A directory that was read
damaged may come whole the next time: such a file is not there for now, and its name stays."""
HELD_AHEAD_MAX: Final = 256
"""Chunks of a file that are held with its lookup, for a thread that opens what it looks up."""
ASKED_MAX: Final = 32
"""Chunks of a file that a lookup looks at: all come in one round trip. Of a longer file these are half at its
beginning, and half at its end."""
FULL_EIGHTHS: Final = 7
"""A volume with so many eighths of its slots taken may have evicted."""
LOOKS: Final = 4
"""Looks at a name that leads elsewhere each time."""


class WholeFiles:
    """The files of one door. `channel` is called inside steps only."""

    def __init__(
        self,
        channel: Callable[[], IoChannel],
        names: Names,
        seen: NamesSeen,
        habits: Habits,
        discards: Discards,
    ) -> None:
        self._channel: Final = channel
        self._names: Final = names
        self._seen: Final = seen
        self._habits: Final = habits
        self._discards: Final = discards

    def hold(self, holder: Holder, node: Node) -> Steps[list[Hold]]:
        """Hold every chunk of a file. Raises FsError where one is not there: ESTALE where it was replaced."""
        volume, manifest, channel = node.volume, node.manifest, self._channel()
        assert manifest is not None
        held = yield from hold_all(channel, volume, manifest.keys(), holder)
        if not isinstance(held, MissCause):
            return held
        if held in LOST and (yield from self._clear_lost(channel, node)):
            raise FsError(errno.ESTALE, "the file was replaced, and its chunks are gone")
        raise FsError(errno.ENOENT, f"a chunk of the file is gone: {held.name.lower()}")

    def is_doubtful(self, channel: IoChannel, volume: SharedVolume, keys: Sequence[bytes]) -> bool:
        """Whether a lookup is to ask for these chunks of a file. What is remembered tells a single agent. Of
        several each asks in a full volume; elsewhere little is evicted, and what is remembered lacks what
        others have just stored."""
        if volume.timing.directory_fresh:
            named = volume.chunks.are_named(channel, keys)
            if named is not None:
                return not named
        slots, taken = volume.usage()
        return taken * 8 >= slots * FULL_EIGHTHS

    def found_beside(
        self, caller: Caller, volume: SharedVolume, path: bytes
    ) -> Steps[tuple[Manifest | MissCause, Sequence[Hold], bool]]:
        """What a path leads to; and in the same round trip what the caller will want next, as it does, or
        what tells whether the chunks of the file are there. The third: they are."""
        channel, habits = self._channel(), self._habits
        habits.expire(channel.now())
        if habits.removes(caller):
            return (yield from self._names.newest(volume, path)), (), True
        known = habits.known(volume.name, path)
        if known is not None and known.chunks:
            opens = known.chunks <= HELD_AHEAD_MAX and habits.opens(caller)
            keys = known.keys() if opens else asked_keys(known)
            if keys and (opens or self.is_doubtful(channel, volume, keys)):
                holding = hold_all(channel, volume, keys, caller.holder)
                found, held = yield from beside(self._names.newest(volume, path), holding)
                if isinstance(held, MissCause):
                    return found, (), False
                if isinstance(found, MissCause) or found.identity != known.identity:
                    let_go(held)
                    return found, (), False
                return found, kept(held, are_all=opens or found.chunks <= ASKED_MAX), True
        if known is None and habits.creates(caller):
            identity = os.urandom(IDENTITY_BYTES)
            deadline, key = channel.now() + volume.timing.write_deadline, chunk_key(identity, 0)
            newest = self._names.newest(volume, path)
            if volume.chunks.knows(channel, key):
                found = yield from newest
            else:
                found, _ = yield from beside(newest, volume.chunks.lookup(channel, [key], deadline))
            habits.prepare((volume.name, path), identity)
            return found, (), False
        return (yield from self._names.newest(volume, path)), (), False

    def newest(self, caller: Caller, volume: SharedVolume, path: bytes) -> Steps[Manifest | MissCause]:
        """What a path leads to; a file that has lost a chunk is none."""
        found = yield from self._names.newest(volume, path)
        if isinstance(found, MissCause):
            return found
        whole, held = yield from self.there(caller.holder, volume, path, found)
        let_go(held)
        return whole

    def there(
        self, holder: Holder, volume: SharedVolume, path: bytes, found: Manifest
    ) -> Steps[tuple[Manifest | MissCause, Sequence[Hold]]]:
        """What a path leads to, if its chunks are there; it led to `found` a moment ago. A file that has lost
        one is none, and its name goes. Where a directory comes damaged it is none for now. Where all chunks
        were asked for, they are held."""
        channel = self._channel()
        for _ in range(LOOKS):
            keys = asked_keys(found)
            if not keys or not self.is_doubtful(channel, volume, keys):
                return found, ()
            held = yield from hold_all(channel, volume, keys, holder)
            if not isinstance(held, MissCause):
                return found, kept(held, are_all=found.chunks <= ASKED_MAX)
            if held not in LOST:
                return (held if held is MissCause.CORRUPT else found), ()
            if not (yield from self._clear_lost(channel, Node(volume, path, holder, found))):
                return held, ()
            newer = yield from self._names.newest(volume, path)
            if isinstance(newer, MissCause):
                return newer, ()
            found = newer
        return found, ()

    def _clear_lost(self, channel: IoChannel, node: Node) -> Steps[bool]:
        """Take away the name of a file that lost a chunk, if it leads there; whether it leads elsewhere."""
        found = yield from self._names.newest(node.volume, node.path)
        if isinstance(found, MissCause):
            return False
        if node.manifest is None or found.identity != node.manifest.identity:
            return True
        self._seen.forget(node.volume.name, node.path)
        try:
            yield from self._names.take_away(channel, node.volume, node.path)
        except FsError:
            return False  # the next open finds the same
        self._discards.replaced(node.volume, found)
        return False

    def newer(self, node: Node) -> Steps[Manifest | None]:
        """What a process of this agent has stored under a node's name since the node's content was found."""
        known, manifest = self._habits.leads_to(node.volume.name, node.path), node.manifest
        if known is None or manifest is None or known == manifest.identity:
            return None
        found = yield from self._names.newest(node.volume, node.path)
        if isinstance(found, MissCause) or found.is_folder or found.identity == manifest.identity:
            return None
        return found


def kept(held: Sequence[Hold], *, are_all: bool) -> Sequence[Hold]:
    """What a lookup keeps for who opens the file: chunks that were asked for, if these are all of them."""
    if are_all:
        return held
    let_go(held)
    return ()


def asked_keys(manifest: Manifest) -> list[bytes]:
    """The keys of the chunks of a file that a lookup looks at."""
    chunks = manifest.chunks
    if not chunks:
        return []
    if chunks <= ASKED_MAX:
        return manifest.keys()
    numbers = (*range(ASKED_MAX // 2), *range(chunks - ASKED_MAX // 2, chunks))
    asked = ((manifest.origin(number), number) for number in numbers)
    return [chunk_key(origin, number) for origin, number in asked if origin != HOLE]
