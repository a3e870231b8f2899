"""nvmet's configfs in a temporary folder: the files that the kernel makes, and the rules that it keeps.

The rules are those that `ConfigfsTarget` could break: an attribute is there or it is not, a device has to be
there before a namespace is enabled, named hosts and any host exclude each other, what is in use stays.
"""

from __future__ import annotations

import errno
import os
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

_ATTRIBUTES = {
    "subsystems": {"attr_allow_any_host": "0", "attr_serial": "0123456789abcdef", "attr_model": "Linux"},
    "namespaces": {"device_path": "(null)", "device_nguid": "", "device_uuid": "", "enable": "0"},
    "ports": {
        "addr_trtype": "", "addr_adrfam": "", "addr_traddr": "", "addr_trsvcid": "",
        "param_inline_data_size": "-1",
    },
    "hosts": {"dhchap_key": "", "dhchap_ctrl_key": "", "dhchap_dhgroup": "null"},
}  # fmt: skip
_FOLDERS = {"subsystems": ("namespaces", "allowed_hosts"), "ports": ("subsystems",)}


class FakeNvmet(ConfigfsFiles):
    """`done` are the operations that were carried out. `fail_at` (a path's name) is refused with EINVAL."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.done: list[FileOperation] = []
        self.fail_at = ""
        for name in ("subsystems", "ports", "hosts"):
            (root / name).mkdir(parents=True)

    def one(self, operation: FileOperation) -> None:
        path = operation.path
        if self.fail_at and path.name == self.fail_at:
            raise _refused(errno.EINVAL, path)
        match operation:
            case MakeFolder():
                path.mkdir()
                kind = path.parent.name
                for name, value in _ATTRIBUTES[kind].items():
                    (path / name).write_text(f"{value}\n")
                for name in _FOLDERS.get(kind, ()):
                    (path / name).mkdir()
            case RemoveFolder():
                self._remove(path)
            case Write(_, value):
                self._write(path, value)
            case Link(_, to):
                self._link(path, to)
            case Unlink():
                path.unlink()
        self.done.append(operation)

    def _remove(self, path: Path) -> None:
        for folder in _FOLDERS.get(path.parent.name, ()):
            if list((path / folder).iterdir()):
                raise _refused(errno.ENOTEMPTY, path)
        linked = [each for each in self.root.rglob("*") if each.is_symlink() and each.resolve() == path]
        if linked:
            raise _refused(errno.EBUSY, path)
        for name in _ATTRIBUTES[path.parent.name]:
            (path / name).unlink()
        for folder in _FOLDERS.get(path.parent.name, ()):
            (path / folder).rmdir()
        path.rmdir()

    def _write(self, path: Path, value: str) -> None:
        if not path.exists():
            raise _refused(errno.ENOENT, path)
        folder = path.parent
        if path.name == "enable" and value == "1":
            device = (folder / "device_path").read_text().strip()
            if not Path(device).exists():
                raise _refused(errno.ENOENT, path)
        enabled = (folder / "enable").exists() and (folder / "enable").read_text().strip() == "1"
        if path.name.startswith("device_") and enabled:
            raise _refused(errno.EBUSY, path)
        named = folder / "allowed_hosts"
        if path.name == "attr_allow_any_host" and value == "1" and list(named.iterdir()):
            raise _refused(errno.EINVAL, path)
        path.write_text(f"{value}\n")

    def _link(self, path: Path, to: Path) -> None:
        subsystem = path.parent.parent
        if path.parent.name == "allowed_hosts":
            if (subsystem / "attr_allow_any_host").read_text().strip() == "1":
                raise _refused(errno.EINVAL, path)
        elif not (path.parent.parent / "addr_traddr").read_text().strip():
            raise _refused(errno.EINVAL, path)
        path.symlink_to(to)


def _refused(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
