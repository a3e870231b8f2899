"""Files that hold a secret of any kind: made with mode 0600 and never over another, read by nobody else.

Whose they are, and whose the folders on their path: private_paths.py. What is in them is never quoted in an
error.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nvmeof.authentication.private_paths import Opened, check_folder, open_guarded
from nvmeof.authentication.private_paths import SecretFileError as SecretFileError  # part of this face


def write_private(path: Path, text: str) -> None:
    """Make a file of mode 0600, durable on return. Raises SecretFileError; nothing is overwritten."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        check_folder(path.parent)
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise SecretFileError(
            f"{path} exists, and a secret is never overwritten", "choose another path"
        ) from None
    except OSError as error:
        raise SecretFileError(f"cannot create {path}: {error.strerror}", "check the folder") from None
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise SecretFileError(f"cannot write {path}: {error.strerror}", "check the disk") from None


def read_private(path: Path, bytes_max: int) -> bytes:
    """All of a file that others can neither read nor exchange, of so many bytes at the most.

    Raises SecretFileError.
    """
    opened = _open_private(path)
    with open(opened.descriptor, "rb") as file:
        found = file.read(bytes_max + 1)
    if len(found) > bytes_max:
        raise SecretFileError(f"{path} has more than {bytes_max} bytes", "name the file of the secret")
    return found


def check_private(path: Path) -> None:
    """For a file that a library reads by its name. Raises SecretFileError where others can read or exchange
    it."""
    os.close(_open_private(path).descriptor)


def _open_private(path: Path) -> Opened:
    try:
        opened = open_guarded(path)
    except OSError as error:
        raise SecretFileError(f"cannot open {path}: {error.strerror}", "check the path") from None
    mode = stat.S_IMODE(opened.facts.st_mode)
    if mode & _others_bits(path):
        os.close(opened.descriptor)
        raise SecretFileError(
            f"{opened.path} can be read by others (mode {mode:04o})",
            f"chmod 600 {opened.path}, and think about who may have read it meanwhile",
        )
    return opened


def _others_bits(path: Path) -> int:
    """The mode bits that must not be set. A credential of systemd is root's and readable by an ACL, which the
    mode shows as the group's; its folder is closed to others.
    """
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    return 0o037 if folder and path.parent == Path(folder) else 0o077
