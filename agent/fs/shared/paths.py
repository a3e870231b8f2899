"""Paths below a shared volume, and the keys that follow from them: the only index of the files there is."""

import errno
import hashlib
from typing import Final

from agent.fs.interface import NAME_BYTES_MAX, FsError

PATH_BYTES_MAX: Final = 4096
"""PATH_MAX of Linux, of a path within its volume."""
ROOT_PATH: Final = b""
KEY_BYTES: Final = 16
_CHUNK_NUMBER_BYTES: Final = 8
_OF_PATHS: Final = hashlib.blake2b(digest_size=KEY_BYTES, person=b"g35 shared path")
_OF_CHUNKS: Final = hashlib.blake2b(digest_size=KEY_BYTES, person=b"g35 shared data")
"""To be copied: each put takes several keys, and a hash with a person is dear to make."""


def join(folder: bytes, name: bytes) -> bytes:
    """The path of a name in a folder, without slashes at its ends. Raises FsError for what is no name.

    The kernel sends names alone; a guest, or a door that is not a kernel, may send anything.
    """
    if not name or name in (b".", b"..") or b"/" in name or b"\0" in name:
        raise FsError(errno.EINVAL, "not a name")
    if len(name) > NAME_BYTES_MAX:
        raise FsError(errno.ENAMETOOLONG)
    path = folder + b"/" + name if folder else name
    if len(path) > PATH_BYTES_MAX:
        raise FsError(errno.ENAMETOOLONG)
    return path


def split(path: bytes) -> tuple[bytes, bytes]:
    """The folder that a path lies in, and its last name."""
    folder, _, name = path.rpartition(b"/")
    return folder, name


def path_key(path: bytes) -> bytes:
    """The key of the manifest of a path, in the volume's names."""
    digest = _OF_PATHS.copy()
    digest.update(path)
    return digest.digest()


def chunk_key(origin: bytes, number: int) -> bytes:
    """The key of a chunk: of what it was written as part of (16 random bytes), and its number in the file."""
    digest = _OF_CHUNKS.copy()
    digest.update(origin + number.to_bytes(_CHUNK_NUMBER_BYTES, "little"))
    return digest.digest()
