"""Files that hold a secret of any kind: made with mode 0600 and never over another, read by nobody else.

What is in them is never quoted in an error.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nvmeof.errors import NvmeofError


class SecretFileError(NvmeofError):
    """A file of secrets is not usable: ours to mend. `advice` says how."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(f"{message}; {advice}")
        self.message = message
        self.advice = advice


def write_private(path: Path, text: str) -> None:
    """Make a file of mode 0600, durable on return. Raises SecretFileError; nothing is overwritten."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
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
    """All of a file that others cannot read, of so many bytes at the most. Raises SecretFileError."""
    try:
        # O_NONBLOCK: a FIFO in its place must not hang us.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SecretFileError(f"cannot open {path}: {error.strerror}", "check the path") from None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise SecretFileError(f"{path} is no regular file", "name the file of the secret itself")
        if facts.st_mode & _others_bits(path):
            raise SecretFileError(
                f"{path} can be read by others (mode {stat.S_IMODE(facts.st_mode):04o})",
                f"chmod 600 {path}, and think about who may have read it meanwhile",
            )
        with open(descriptor, "rb", closefd=False) as file:
            found = file.read(bytes_max + 1)
    finally:
        os.close(descriptor)
    if len(found) > bytes_max:
        raise SecretFileError(f"{path} has more than {bytes_max} bytes", "name the file of the secret")
    return found


def _others_bits(path: Path) -> int:
    """The mode bits that must not be set. A credential of systemd is root's and readable by an ACL, which the
    mode shows as the group's; its folder is closed to others.
    """
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    return 0o037 if folder and path.parent == Path(folder) else 0o077
