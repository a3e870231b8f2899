"""The few operations on /sys/kernel/config that change nvmet, as records, and what carries them out.

configfs makes and removes the attribute files of a folder with the folder, and a write to one is a call into
the kernel that may be refused. Several operations that belong together are undone as far as they went if one
of them is refused, so that a later run does not find half a subsystem.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from agent.errors import Fault, G35Error

_ADVICE: Final = {
    errno.EACCES: (Fault.OURS, "only root may change nvmet"),
    errno.EPERM: (Fault.OURS, "only root may change nvmet"),
    errno.ENOENT: (Fault.OURS, "modprobe nvmet, and mount configfs; does the device of the namespace exist?"),
    errno.EADDRNOTAVAIL: (Fault.OURS, "a listener's address has to be one of this machine"),
    errno.EADDRINUSE: (Fault.WORLD, "something else listens at that address"),
    errno.EBUSY: (Fault.WORLD, "it is in use; see the kernel's log"),
    errno.EINVAL: (Fault.OURS, "the kernel does not take that value; its log may say why"),
}


class ConfigfsError(G35Error):
    """The kernel refused an operation; `errno` is its word for why."""

    def __init__(self, what: str, error: OSError, advice: str | None = None) -> None:
        fault, usual = _ADVICE.get(error.errno or 0, (Fault.WORLD, "the kernel's log may say why"))
        name = errno.errorcode.get(error.errno or 0, "no errno")
        super().__init__(f"{what}: {error.strerror or error} ({name})", advice or usual, fault=fault)
        self.errno = error.errno


@dataclass(frozen=True, slots=True)
class MakeFolder:
    """mkdir; the kernel fills it."""

    path: Path

    def __str__(self) -> str:
        return f"mkdir {self.path}"


@dataclass(frozen=True, slots=True)
class RemoveFolder:
    """rmdir, attributes and all."""

    path: Path

    def __str__(self) -> str:
        return f"rmdir {self.path}"


@dataclass(frozen=True, slots=True)
class Write:
    """Write a value to an attribute; with `source` it is a secret, and that is the file it came from."""

    path: Path
    value: str
    source: str | None = None

    def __str__(self) -> str:
        shown = f"(the key in {self.source})" if self.source is not None else self.value
        return f"echo {shown} > {self.path}"

    def __repr__(self) -> str:
        return f"<{self}>"


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link, which for nvmet means: let in, or offer."""

    path: Path
    to: Path

    def __str__(self) -> str:
        return f"ln -s {self.to} {self.path}"


@dataclass(frozen=True, slots=True)
class Unlink:
    """The opposite."""

    path: Path

    def __str__(self) -> str:
        return f"rm {self.path}"


FileOperation: TypeAlias = MakeFolder | RemoveFolder | Write | Link | Unlink


class ConfigfsFiles:
    """Carries operations out. Reading returns "" where an attribute does not exist."""

    def carry_out(self, operations: Iterable[FileOperation]) -> None:
        """All in order; undone as far as they went, and ConfigfsError, if one is refused."""
        done: list[FileOperation] = []
        for operation in operations:
            try:
                self.one(operation)
            except OSError as error:
                for each in reversed(done):
                    with contextlib.suppress(OSError):
                        self._undo(each)
                raise ConfigfsError(str(operation), error, self._advice(operation, error)) from None
            done.append(operation)

    def _advice(self, operation: FileOperation, error: OSError) -> str | None:
        path = operation.path
        if isinstance(operation, Write) and error.errno == errno.ENOENT and not path.exists():
            return f"the nvmet of this kernel has no {path.name}: it is too old, or was built without that"
        return None

    def one(self, operation: FileOperation) -> None:
        """Raises OSError."""
        match operation:
            case MakeFolder(path):
                path.mkdir()
            case RemoveFolder(path):
                path.rmdir()
            case Write(path, value):
                with open(path, "r+") as attribute:
                    attribute.write(value)
            case Link(path, to):
                path.symlink_to(to)
            case Unlink(path):
                path.unlink()

    def _undo(self, operation: FileOperation) -> None:
        match operation:
            case MakeFolder(path):
                self.one(RemoveFolder(path))
            case Link(path):
                self.one(Unlink(path))

    def read(self, path: Path) -> str:
        """The value of an attribute without its newline. ConfigfsError if it cannot be read."""
        try:
            return path.read_text().strip()
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise ConfigfsError(f"cannot read {path}", error) from None

    def names(self, folder: Path) -> list[str]:
        """What a folder holds, sorted. ConfigfsError if there is no such folder."""
        try:
            return sorted(each.name for each in folder.iterdir())
        except OSError as error:
            raise ConfigfsError(f"cannot list {folder}", error) from None
