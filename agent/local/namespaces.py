"""The local namespaces of this machine, opened: as sessions of the agent beside them, and as an export.

serve = True    the agent: its devices are its own, or the start fails; others reach them by the export
serve = False   a verb: a device that another process has is reached as other agents reach it
"""

import ipaddress
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from agent.config.configuration import EnclosureSection
from agent.config.local_section import LocalSection
from agent.errors import UserError
from agent.local.device import Device, DeviceInUse, open_device, read_label, same_device
from agent.local.export import NSID, Export, subsystem_nqn
from agent.local.storage import DeviceStorage
from nvmeof.host.namespaces import NamespaceInfo
from nvmeof.transport.base import ControllerInfo
from nvmeof.transport.local_queue import LocalMedia


@dataclass(frozen=True, slots=True)
class LocalNamespace:
    """One of them, as the supervisor publishes it (agent/remote/supervisor.py)."""

    name: str
    path: Path
    nqn: str
    session: ControllerInfo
    namespace: NamespaceInfo
    storage: DeviceStorage


class LocalNamespaces:
    """Those of a configuration, from construction to the end of a `with` block."""

    def __init__(
        self, sections: Sequence[LocalSection], host_nqn: str, host_id: bytes, *, serve: bool = False
    ) -> None:
        self.opened: list[LocalNamespace] = []
        self.elsewhere: list[EnclosureSection] = []
        """Those that another process serves, and how they are reached."""
        self.export: Export | None = None
        self._stack = ExitStack()
        _refuse_twins(sections)
        with ExitStack() as undo:
            exported = []
            for section in sections:
                try:
                    device = open_device(section)
                except DeviceInUse:
                    if serve:
                        raise
                    self.elsewhere.append(_by_its_export(section, len(self.elsewhere), host_id))
                    continue
                storage = DeviceStorage(device)
                undo.callback(storage.close)
                _refuse_copy(section, device.label.nguid, self.opened)
                found = _opened(section, device, storage, host_nqn, host_id)
                assert isinstance(found.session.local, LocalMedia)
                undo.callback(found.session.local.close)
                self.opened.append(found)
                exported.append((section, found.nqn, storage))
            if serve and exported:
                self.export = Export(exported)
                undo.callback(self.export.close)
            self._stack = undo.pop_all()

    def __enter__(self) -> "LocalNamespaces":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _refuse_twins(sections: Sequence[LocalSection]) -> None:
    """Raises UserError where two sections mean one device."""
    twins = same_device([each.path for each in sections])
    if twins is not None:
        raise UserError(
            f"two tables of [[local]] name one device: {twins[0]} and {twins[1]}", "leave one of them out"
        )


def _refuse_copy(section: LocalSection, nguid: bytes, opened: Sequence[LocalNamespace]) -> None:
    """Raises UserError where a device before it has the same label: writes would go to either of them."""
    for each in opened:
        if each.namespace.nguid == nguid:
            raise UserError(
                f"{each.path} and {section.path} carry one label, {nguid.hex()}: one is a copy of the other",
                "leave the copy out; or, if nothing on it is wanted, make its first mebibyte zeros: "
                "dd if=/dev/zero of=COPY bs=1M count=1 conv=notrunc",
            )


def _opened(
    section: LocalSection, device: Device, storage: DeviceStorage, host_nqn: str, host_id: bytes
) -> LocalNamespace:
    nqn = subsystem_nqn(host_id, device.label.nguid)
    media = LocalMedia({NSID: storage}, f"io-{section.path.name}")
    namespace = NamespaceInfo(NSID, device.label.nguid, device.label.size, storage.lba_bytes)
    session = media.info(nqn, host_nqn, host_id)
    return LocalNamespace(section.shown_name, section.path, nqn, session, namespace, storage)


def _by_its_export(section: LocalSection, number: int, host_id: bytes) -> EnclosureSection:
    address, port = section.address
    if (listened := ipaddress.ip_address(address)).is_unspecified:
        address = "::1" if listened.version == 6 else "127.0.0.1"
    nqn = subsystem_nqn(host_id, read_label(section.path).nguid)
    name = section.name or f"local-{number}"
    return EnclosureSection.model_validate({"name": name, "address": address, "port": port, "nqn": nqn})
