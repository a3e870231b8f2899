"""What names lead to just now; and folders that are there because something is in them."""

import errno
from collections.abc import Callable
from typing import Final

from agent.fs.interface import FsError
from agent.fs.shared.chunks import wall_ns
from agent.fs.shared.manifest import Kind, Manifest, ManifestError, decode_manifest_untrusted
from agent.fs.shared.paths import join, path_key
from agent.fs.shared.recent_names import NamesSeen
from agent.fs.shared.volume import SharedVolume
from agent.fs.value_writer import errno_of
from agent.pool.counters import MissCause
from agent.pool.errors import BadPut, PutRefused
from agent.pool.steps import IoChannel, Steps

FOLDER_MODE: Final = 0o755
NAMES_ASKED: Final = 16
"""Names that were seen in a folder, and are asked for again where it is removed, or is not there."""
SILENT: Final = frozenset({MissCause.LATE, MissCause.ENCLOSURE_DOWN})
"""Nothing was read. An enclosure that answers again with the next request may have something there."""
UNSURE: Final = SILENT | {MissCause.CORRUPT}
"""Nobody says just now whether the name leads anywhere. What was read damaged may come whole the next time;
where flash itself is damaged, the scrub gives the name up."""
GONE: Final = frozenset(MissCause) - UNSURE


def answered(found: Manifest | MissCause) -> Manifest | MissCause:
    """What was found, for a change that would take its place. Raises FsError where nothing was read."""
    if found in SILENT:
        raise FsError(errno.EIO, "nobody says just now what is there")
    return found


def folder(path: bytes, mode: int, uid: int, gid: int, now_ns: int) -> Manifest:
    """The manifest of a folder."""
    return Manifest(Kind.FOLDER, path, mode, uid, gid, now_ns, now_ns, now_ns)


class Names:
    """The names of all volumes of a door. `channel` is called inside steps only."""

    def __init__(
        self, channel: Callable[[], IoChannel], seen: NamesSeen, owner: tuple[int, int] = (0, 0)
    ) -> None:
        """`owner`: of folders that are made anew."""
        self._channel = channel
        self._seen = seen
        self._owner = owner

    def newest(self, volume: SharedVolume, path: bytes) -> Steps[Manifest | MissCause]:
        """What a path leads to just now. Bytes that are no manifest of it are none."""
        channel = self._channel()
        deadline = channel.now() + volume.timing.write_deadline
        found = yield from volume.names.newest(channel, path_key(path), deadline)
        if isinstance(found, MissCause):
            return found
        try:
            manifest = decode_manifest_untrusted(found)
        except ManifestError:
            return MissCause.CORRUPT
        if manifest.path != path or (not manifest.is_folder and manifest.chunk_bytes != volume.chunk_bytes):
            return MissCause.WRONG_KEY
        return manifest

    def put(self, channel: IoChannel, volume: SharedVolume, manifest: Manifest) -> Steps[None]:
        """Make a name lead to this. Raises FsError."""
        deadline = channel.now() + volume.timing.write_deadline
        key = path_key(manifest.path)
        try:
            yield from volume.names.replace(channel, key, manifest.encode(), deadline)
        except PutRefused as refused:
            raise FsError(errno_of(refused), str(refused)) from None
        except BadPut as bad:
            raise FsError(errno.EIO, str(bad)) from None

    def take_away(self, channel: IoChannel, volume: SharedVolume, path: bytes) -> Steps[bool]:
        """Make a name lead to nothing. Raises FsError."""
        deadline = channel.now() + volume.timing.write_deadline
        try:
            return (yield from volume.names.delete(channel, path_key(path), deadline))
        except PutRefused as refused:
            raise FsError(errno.EIO, str(refused)) from None

    def folder_again(
        self, volume: SharedVolume, path: bytes, cause: MissCause, known: Manifest | None = None
    ) -> Steps[Manifest]:
        """A folder whose manifest was evicted, while this agent knows of names in it; or is out of reach, or
        was read damaged, while this agent knows the folder. So a program that writes there then hears of the
        error with its write, and not that the folder has gone.

        `known`: the folder as it was found last. Raises FsError where there is none."""
        unsure, within = cause in UNSURE, self._seen.within(volume.name, path)
        if not within and not (unsure and (known or self._seen.is_folder(volume.name, path))):
            self._seen.forget(volume.name, path)
            raise FsError(errno.ENOENT, f"no file or folder: {cause.name.lower()}")
        channel = self._channel()
        found = known or folder(path, FOLDER_MODE, *self._owner, wall_ns(channel))
        if unsure:
            return found
        if not (yield from self.has_names(volume, path, [NAMES_ASKED])):
            self._seen.forget(volume.name, path)
            raise FsError(errno.ENOENT, f"no file or folder: {cause.name.lower()}")
        yield from self.put(channel, volume, found)
        return found

    def has_names(self, volume: SharedVolume, path: bytes, asks: list[int]) -> Steps[bool]:
        """Whether something is in a folder, of the names that were seen there; those that are not go.

        `asks`: how many more are asked for. Where that is too few, or nobody can say, something is there."""
        for name, is_folder in self._seen.within(volume.name, path):
            if not asks[0]:
                return True
            asks[0] -= 1
            inner = join(path, name)
            if (yield from self.newest(volume, inner)) not in GONE:
                return True
            if is_folder and (yield from self.has_names(volume, inner, asks)):
                return True
            self._seen.forget(volume.name, inner)
        return False
