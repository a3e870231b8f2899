"""The operations on /sys/kernel/config that change nvmet, as records, and their execution.

configfs makes and removes the attribute files of a folder with the folder. The kernel may refuse a write to
one. If it refuses one of several operations that belong together, those before it are undone, so that a later
run does not find half a subsystem.
"""

import contextlib
import errno
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

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
    """The kernel refused an operation with `errno`."""

    def __init__(self, what: str, error: OSError, advice: str | None = None) -> None:
        fault, usual = _ADVICE.get(error.errno or 0, (Fault.WORLD, "the kernel's log may say why"))
        name = errno.errorcode.get(error.errno or 0, "no errno")
        super().__init__(f"{what}: {error.strerror or error} ({name})", advice or usual, fault=fault)
        self.errno = error.errno


@dataclass(frozen=True, slots=True)
class FileOperation:
    """One operation, of which `TEXT` is a format string in shell."""

    TEXT: ClassVar[str]
    path: Path

    def __str__(self) -> str:
        return self.TEXT.format(self)


class MakeFolder(FileOperation):
    """The kernel fills the folder."""

    TEXT = "mkdir {0.path}"


class RemoveFolder(FileOperation):
    """Also removes the attributes in it."""

    TEXT = "rmdir {0.path}"


class Unlink(FileOperation):
    """Removes a link."""

    TEXT = "rm {0.path}"


@dataclass(frozen=True, slots=True)
class Write(FileOperation):
    """Writes a value to an attribute. With `source` the value is a secret, read from that file."""

    TEXT = "echo {0.shown} > {0.path}"
    value: str
    source: str | None = None

    @property
    def shown(self) -> str:
        return self.value if self.source is None else f"(the key in {self.source})"

    def __repr__(self) -> str:
        return f"<{self}>"


@dataclass(frozen=True, slots=True)
class Link(FileOperation):
    """Makes a symbolic link: it lets a host in, or offers a subsystem at a port."""

    TEXT = "ln -s {0.to} {0.path}"
    to: Path


class ConfigfsFiles:
    """configfs itself."""

    def carry_out(self, operations: Iterable[FileOperation]) -> None:
        """Carry all out in order. If one is refused, undo those before it and raise ConfigfsError."""
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
        """The value of an attribute without its newline; "" where there is none. Raises ConfigfsError."""
        try:
            return path.read_text().strip()
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise ConfigfsError(f"cannot read {path}", error) from None

    def names(self, folder: Path) -> list[str]:
        """The names in a folder, sorted. ConfigfsError if there is no such folder."""
        try:
            return sorted(each.name for each in folder.iterdir())
        except OSError as error:
            raise ConfigfsError(f"cannot list {folder}", error) from None


class DryRunFiles(ConfigfsFiles):
    """The files of `below` as operations would leave them that are only recorded: for `--dry-run`."""

    def __init__(self, below: ConfigfsFiles) -> None:
        self._below = below
        self._names: dict[Path, set[str]] = {}
        self._values: dict[Path, str] = {}
        self._anew: set[Path] = set()

    def one(self, operation: FileOperation) -> None:
        path = operation.path
        match operation:
            case MakeFolder() | Link():
                self._listed(path.parent).add(path.name)
                self._forget(path)
            case RemoveFolder() | Unlink():
                self._listed(path.parent).discard(path.name)
                self._forget(path)
            case Write(_, value):
                self._values[path] = value

    def _listed(self, folder: Path) -> set[str]:
        if folder not in self._names:
            self._names[folder] = set() if self._is_new(folder) else set(self._below.names(folder))
        return self._names[folder]

    def _forget(self, path: Path) -> None:
        """Forget everything below `path`: the kernel fills a new folder anew."""
        self._anew.add(path)
        for known in (self._names, self._values):
            for each in [each for each in known if each.is_relative_to(path)]:
                del known[each]

    def _is_new(self, path: Path) -> bool:
        return any(each in self._anew for each in (path, *path.parents))

    def read(self, path: Path) -> str:
        """See `ConfigfsFiles.read`; attributes that the kernel fills by itself are empty."""
        if path in self._values:
            return self._values[path]
        return "" if self._is_new(path) else self._below.read(path)

    def names(self, folder: Path) -> list[str]:
        return sorted(self._listed(folder))
