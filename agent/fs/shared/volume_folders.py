"""The folders of volumes in `/shared`, which are there without a manifest; one tells mode and owner."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from agent.fs.interface import Attributes
from agent.fs.shared.manifest import Manifest
from agent.fs.shared.names import FOLDER_MODE, UNSURE, Names, folder
from agent.fs.shared.nodes import shown
from agent.fs.shared.paths import ROOT_PATH
from agent.fs.shared.volume import SharedVolume
from agent.pool.counters import MissCause
from agent.pool.steps import IoChannel, Steps

FOLDER_SECONDS: Final = 1.0
"""The kernel believes that a folder is there for so long."""


class VolumeFolders:
    """By the inodes of volumes, as many as the configuration has. Safe from any thread."""

    def __init__(
        self,
        volumes: Mapping[int, SharedVolume],
        channel: Callable[[], IoChannel],
        names: Names,
        owner: tuple[int, int],
    ) -> None:
        self._volumes, self._channel, self._names, self._owner = volumes, channel, names, owner
        self._found: dict[int, tuple[float, Manifest]] = {}
        """A manifest, and until when it is believed."""
        self._changes: dict[int, int] = {}
        """How often this agent has changed a folder."""

    def find(self, ino: int) -> Steps[Attributes]:
        changes = self._changes.get(ino, 0)
        found = yield from self._names.newest(self._volumes[ino], ROOT_PATH)
        if changes != self._changes.get(ino, 0):
            # A process of this agent has changed it meanwhile, and has seen that done.
            found = self._found[ino][1]
        elif isinstance(found, MissCause):
            # Nobody who may use the folder, or may not, is to see another mode while an enclosure is silent.
            known = self.known(ino) if found in UNSURE else None
            found = known or folder(ROOT_PATH, FOLDER_MODE, *self._owner, 0)
        self._believe(ino, found)
        return shown(ino, found)

    def find_again(self, ino: int) -> Steps[Attributes]:
        """The same for the kernel, which asks again after each file that it has made in the folder."""
        until, found = self._found.get(ino, (0.0, None))
        left = until - self._channel().now()
        if found is None or left <= 0:
            return replace((yield from self.find(ino)), valid_seconds=FOLDER_SECONDS)
        return replace(shown(ino, found), valid_seconds=left)

    def known(self, ino: int) -> Manifest | None:
        """What was found of the folder last; None also of what is none."""
        return self._found.get(ino, (0.0, None))[1]

    def is_now(self, ino: int, manifest: Manifest) -> None:
        """This agent has changed the folder."""
        self._believe(ino, manifest)
        self._changes[ino] = self._changes.get(ino, 0) + 1

    def _believe(self, ino: int, manifest: Manifest) -> None:
        self._found[ino] = self._channel().now() + FOLDER_SECONDS, manifest
