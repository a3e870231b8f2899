"""The local namespaces of this machine, opened: as sessions of the agent beside them, and as an export.

serve = True    the agent: its devices are its own, or the start fails; others reach them by the export
serve = False   a verb: a device that another process has is reached as other agents reach it; only with
                `make` it makes files and labels

A device that is missing, does not answer or cannot be read is away, like an enclosure: the others are served,
and the supervisor looks for it again. One that is pulled goes the same way. A wrong configuration ends the
start.
"""

import ipaddress
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from agent.config.configuration import EnclosureSection
from agent.config.local_section import LocalSection
from agent.errors import G35Error, UserError
from agent.local.device import Device, DeviceInUse, DeviceMissing, NotMade, same_device
from agent.local.export import NSID, Export, credentials_of, subsystem_nqn
from agent.local.opening import OPEN_SECONDS, Opening, StillOpening, nguid_of
from agent.local.remembered_labels import RememberedLabels
from agent.local.storage import DeviceStorage
from nvmeof.host.namespaces import NamespaceInfo
from nvmeof.transport.base import ControllerInfo
from nvmeof.transport.local_queue import LocalMedia

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalNamespace:
    """One of them, as the supervisor publishes it (agent/remote/supervisor.py)."""

    name: str
    path: Path
    section: LocalSection
    nqn: str
    session: ControllerInfo
    namespace: NamespaceInfo
    storage: DeviceStorage


class AwayNamespace:
    """One that is looked for. For one thread."""

    def __init__(self, owner: "LocalNamespaces", section: LocalSection, opening: Opening | None) -> None:
        self.name = section.shown_name
        self.fault = ""
        self._owner = owner
        self._section = section
        self._opening = opening

    def look(self) -> LocalNamespace | None:
        """It, if it has come; waits for nothing. Else `fault` says why not."""
        if self._opening is None:
            self._opening = self._owner.begin(self._section)
        try:
            device = self._opening.take(0.0)
        except StillOpening as waits:
            if time.monotonic() - self._opening.began >= OPEN_SECONDS:  # else it has only begun
                self.fault = str(waits)
            return None
        except G35Error as failed:
            self._opening = None
            self.fault = str(failed)
            return None
        self._opening = None
        try:
            return self._owner.add(self._section, device)
        except G35Error as failed:
            self.fault = str(failed)
            return None

    def close(self) -> None:
        """Look no more."""
        if self._opening is not None:
            self._opening.give_up()


class LocalNamespaces:
    """Those of a configuration, from construction to the end of a `with` block."""

    def __init__(
        self,
        sections: Sequence[LocalSection],
        host_nqn: str,
        host_id: bytes,
        state: Path,
        *,
        serve: bool = False,
        make: bool = False,
    ) -> None:
        """`state`: the agent's state folder, which remembers what the paths led to."""
        self.opened: list[LocalNamespace] = []
        self.elsewhere: list[EnclosureSection] = []
        """Those that another process serves, and how they are reached."""
        self.taken: dict[str, str] = {}
        """By the name of each of `elsewhere`, who has its device."""
        self.away: list[AwayNamespace] = []
        self._served: dict[Path, LocalNamespace] = {}
        """Those of `opened`, and those that came later, by path; without those that were pulled."""
        self._looked_for: dict[Path, AwayNamespace] = {}
        """The latest of each path."""
        self.export: Export | None = None
        self._host = (host_nqn, host_id)
        self._notes = serve or make
        self._labels = RememberedLabels(state) if sections else None
        self._stack = ExitStack()
        _refuse_twins(sections)
        if serve:
            for section in sections:  # before a device gets a label
                credentials_of(section)
        with self._stack:
            if serve and sections:
                self.export = Export([each.address for each in sections])
                self._stack.callback(self.export.close)
            self._stack.callback(self._end)
            openings = [(each, self.begin(each)) for each in sections]
            # Not before: what a beginning loads on a slow machine takes nothing of the devices' time.
            until = time.monotonic() + OPEN_SECONDS
            for section, opening in openings:
                self._stack.callback(opening.give_up)
                self._open(section, opening, until - time.monotonic(), serve)
            self._stack = self._stack.pop_all()

    def _open(self, section: LocalSection, opening: Opening, seconds: float, serve: bool) -> None:
        try:
            device = opening.take(seconds)
        except DeviceInUse as taken:
            if serve:
                raise
            by_export = self._by_its_export(section)
            self.elsewhere.append(by_export)
            self.taken[by_export.name] = str(taken)
        except StillOpening as waits:
            self._is_away(section, opening, waits)
        except NotMade as blank:
            # Nothing lies there, so a verb has looked at all that there is.
            log.warning("%s; %s", blank, blank.advice)
        except DeviceMissing as missing:
            self._is_away(section, None, missing)
        except UserError:
            raise
        except G35Error as failed:
            self._is_away(section, None, failed)
        else:
            self.opened.append(self.add(section, device))

    def _by_its_export(self, section: LocalSection) -> EnclosureSection:
        address, port = section.address
        if (listened := ipaddress.ip_address(address)).is_unspecified:
            address = "::1" if listened.version == 6 else "127.0.0.1"
        assert self._labels is not None
        nqn = subsystem_nqn(self._host[1], nguid_of(section.path, self._labels.of(section.path)))
        name = section.name or f"local-{len(self.elsewhere)}"
        return EnclosureSection.model_validate({"name": name, "address": address, "port": port, "nqn": nqn})

    def _is_away(self, section: LocalSection, opening: Opening | None, why: G35Error) -> None:
        away = self._look_for(section, opening, str(why))
        self.away.append(away)

    def _look_for(self, section: LocalSection, opening: Opening | None, why: str) -> AwayNamespace:
        away = self._looked_for[section.path] = AwayNamespace(self, section, opening)
        away.fault = why
        return away

    def pulled(self, found: LocalNamespace) -> AwayNamespace:
        """A device is gone: serve it no more. It may be looked for once its storage is closed."""
        del self._served[found.path]
        if self.export is not None:
            self.export.withdraw(found.section)
        _end_of(found)
        return self._look_for(found.section, None, f"{found.path} is gone")

    def begin(self, section: LocalSection) -> Opening:
        assert self._labels is not None
        return Opening(section, self._labels.of(section.path), make=self._notes)

    def add(self, section: LocalSection, device: Device) -> LocalNamespace:
        """Serve an open device, to the end of the `with` block. Raises G35Error."""
        storage = DeviceStorage(device)
        with ExitStack() as undo:
            undo.callback(storage.close)
            _refuse_copy(section, device.label.nguid, self._served.values())
            found = _opened(section, device, storage, *self._host)
            assert isinstance(found.session.local, LocalMedia)
            undo.callback(found.session.local.close)
            if self.export is not None:
                self.export.offer(section, found.nqn, storage)
            if self._notes and self._labels is not None:
                self._labels.note(section.path, device.label.nguid)
            undo.pop_all()
        self._served[section.path] = found
        return found

    def _end(self) -> None:
        for away in self._looked_for.values():
            away.close()
        for found in self._served.values():
            _end_of(found)
            found.storage.close()

    def __enter__(self) -> "LocalNamespaces":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _end_of(found: LocalNamespace) -> None:
    """Let no more reads and writes begin, and wake the threads that wait for one."""
    found.storage.end()
    assert isinstance(found.session.local, LocalMedia)
    found.session.local.close()


def _refuse_twins(sections: Sequence[LocalSection]) -> None:
    """Raises UserError where two sections mean one device."""
    twins = same_device([each.path for each in sections])
    if twins is not None:
        raise UserError(
            f"two tables of [[local]] name one device: {twins[0]} and {twins[1]}", "leave one of them out"
        )


def _refuse_copy(section: LocalSection, nguid: bytes, served: Iterable[LocalNamespace]) -> None:
    """Raises UserError where a device before it has the same label: writes would go to either of them."""
    for each in served:
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
    return LocalNamespace(section.shown_name, section.path, section, nqn, session, namespace, storage)
