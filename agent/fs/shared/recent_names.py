"""Which names an agent has seen lately, by folder: what a listing shows. There is no other list of a folder.

A name is noted when it was looked up and was there, and when it was made here; it goes when it is looked up
and is not there, when it is removed here, and when others need the room.
"""

import threading
from collections import OrderedDict
from typing import Final

from agent.fs.shared.paths import split
from agent.host_os.per_user_bounds import ALL, Bounds, Limit

SEEN: Final = Limit(
    "shared-names", "names of /shared that were seen lately, which listings show", 65_536,
    by="everybody", share=ALL, refused="the name that was seen longest ago goes", bytes_each=8192,
)  # fmt: skip
FOLDER_NAMES_MAX: Final = 16_384
"""The most names of one folder, so that one busy folder leaves room to others."""

Place = tuple[str, bytes]
"""A volume and a path in it."""


class NamesSeen:
    """The names of all volumes of one agent; a door shows those of its own. Safe from any thread."""

    def __init__(self, bounds: Bounds | None = None, most: int = SEEN.most) -> None:
        self._most = most
        self._names: OrderedDict[Place, bool] = OrderedDict()
        """Whether it is a folder; those first that were seen longest ago."""
        self._within: dict[Place, dict[bytes, None]] = {}
        """The last names of what is in a folder, in the order in which they came."""
        self._lock = threading.Lock()
        if bounds is not None:
            bounds.watch(SEEN, lambda: {"everybody": len(self)})

    def __len__(self) -> int:
        return len(self._names)

    def note(self, volume: str, path: bytes, *, is_folder: bool) -> None:
        folder, name = split(path)
        with self._lock:
            place = (volume, path)
            if place in self._names:
                self._names[place] = is_folder
                self._names.move_to_end(place)
                return
            within = self._within.setdefault((volume, folder), {})
            if len(within) >= FOLDER_NAMES_MAX:
                self._drop((volume, folder + b"/" + next(iter(within)) if folder else next(iter(within))))
                within = self._within.setdefault((volume, folder), {})
            self._names[place] = is_folder
            within[name] = None
            if len(self._names) > self._most:
                self._drop(next(iter(self._names)))

    def forget(self, volume: str, path: bytes) -> None:
        with self._lock:
            self._drop((volume, path))

    def is_folder(self, volume: str, path: bytes) -> bool:
        """Whether a path was seen lately, and was a folder."""
        with self._lock:
            return self._names.get((volume, path), False)

    def within(self, volume: str, path: bytes) -> list[tuple[bytes, bool]]:
        """Name, and whether it is a folder, of what was seen in a folder."""
        with self._lock:
            prefix = path + b"/" if path else b""
            names = self._within.get((volume, path), {})
            return [(name, self._names[volume, prefix + name]) for name in names]

    def _drop(self, place: Place) -> None:
        if self._names.pop(place, None) is None:
            return
        volume, path = place
        folder, name = split(path)
        within = self._within[volume, folder]
        del within[name]
        if not within:
            del self._within[volume, folder]
