"""Files whose chunks are all there: held for one who opens them, and given up where a chunk is gone."""

import errno
from collections.abc import Callable
from typing import Final

from agent.fs.interface import FsError
from agent.fs.shared.call_prediction import Habits
from agent.fs.shared.discards import Discards
from agent.fs.shared.file_reader import hold_all
from agent.fs.shared.manifest import Manifest
from agent.fs.shared.names import Names
from agent.fs.shared.nodes import Node
from agent.fs.shared.recent_names import NamesSeen
from agent.fs.shared.volume import Hold
from agent.host_os.per_user_bounds import Holder
from agent.pool.counters import MissCause
from agent.pool.steps import IoChannel, Steps

LOST: Final = frozenset({MissCause.EVICTED, MissCause.EXPIRED, MissCause.NEVER_STORED, MissCause.CORRUPT})
"""A file with a chunk that is gone by one of these causes does not come back."""


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
