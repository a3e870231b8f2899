"""configfs as it would be after operations that nobody carries out: what `--dry-run` shows steps against."""

from __future__ import annotations

from pathlib import Path

from agent.enclosure_control.configfs_files import (
    ConfigfsFiles,
    FileOperation,
    Link,
    MakeFolder,
    RemoveFolder,
    Unlink,
    Write,
)


class ImaginedFiles(ConfigfsFiles):
    """Reads what `below` has, with the operations that were carried out here on top of it."""

    def __init__(self, below: ConfigfsFiles) -> None:
        self._below = below
        self._names: dict[Path, set[str]] = {}
        self._values: dict[Path, str] = {}
        self._anew: set[Path] = set()

    def one(self, operation: FileOperation) -> None:
        """Remember it."""
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
        """What was below `path` is not there any more: the kernel fills a new folder anew."""
        self._anew.add(path)
        for known in (self._names, self._values):
            for each in [each for each in known if each.is_relative_to(path)]:
                del known[each]

    def _is_new(self, path: Path) -> bool:
        return any(each in self._anew for each in (path, *path.parents))

    def read(self, path: Path) -> str:
        """As `ConfigfsFiles.read`; what the kernel fills in by itself is not imagined."""
        if path in self._values:
            return self._values[path]
        return "" if self._is_new(path) else self._below.read(path)

    def names(self, folder: Path) -> list[str]:
        """As `ConfigfsFiles.names`."""
        return sorted(self._listed(folder))
