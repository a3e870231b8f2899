"""The folder that an enclosure keeps its drives in: one at a time uses it, and drives keep their names."""

import fcntl
import hashlib
import json
import os
from pathlib import Path

from emulator.command_line import words_of


class EnclosureError(Exception):
    """The enclosure cannot be made as asked; the text says why."""


def derived_nguid(nqn: str, number: int) -> bytes:
    """The NGUID of a drive in memory: the same at each start under that name."""
    return hashlib.sha256(f"g35 drive\0{nqn}\0{number}".encode()).digest()[:16]


def lock_folder(folder: Path) -> int:
    """Two enclosures on one folder would write over each other."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EnclosureError(f"cannot use the folder {folder}: {error.strerror or error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise EnclosureError(f"another enclosure uses the folder {folder}") from error
    return fd


def persistent_nguid(folder: Path, number: int, size: int, lba_bytes: int) -> bytes:
    """The NGUID beside a drive's file, made at random the first time.

    EnclosureError if the file beside it describes another drive than the one asked for.
    """
    path = folder / f"drive-{number:03d}.json"
    wanted = {"size": size, "lba_bytes": lba_bytes}
    try:
        if path.exists():
            known = json.loads(path.read_text())
            nguid = bytes.fromhex(known["nguid"])
            if len(nguid) != 16 or {key: known[key] for key in wanted} != wanted:
                raise EnclosureError(f"{path} describes a drive of {known.get('size')} bytes, not of {size}")
            return nguid
        nguid = os.urandom(16)
        write_atomically(path, json.dumps({"nguid": nguid.hex(), **wanted}) + "\n")
        return nguid
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EnclosureError(f"{path}: {words_of(error)}") from error


def write_atomically(path: Path, text: str) -> None:
    """Replace a file; a reader finds the old or the new one whole, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
