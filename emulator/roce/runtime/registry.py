"""Which devices there are: said by the program (`add_device`), or by the environment.

    G35_ROCE_DEVICES="roce0=127.0.0.2,roce1=127.0.0.3"
    G35_ROCE_PCAP="/tmp/{device}.pcap"          captures all of them, each in its own file

A process opens a device once, since there is one UDP port. The device closes with its last user.
"""

import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from emulator.roce.runtime.device import Device
from emulator.roce.runtime.errors import NoSuchDevice
from emulator.roce.wire.flow import packed_address

ENVIRONMENT: Final = "G35_ROCE_DEVICES"
ENVIRONMENT_PCAP: Final = "G35_ROCE_PCAP"

MAX_DEVICES: Final = 256


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """A device that could be opened. `mtu` None: what its network interface allows; `check_icrc_in_full`: see
    `Device`.
    """

    name: str
    ip: str
    mtu: int | None = None
    pcap: Path | None = None
    check_icrc_in_full: bool = False


def known_devices(entries: list[DeviceEntry]) -> str:
    """For errors: which devices there are, and how to name others."""
    names = ", ".join(f"{entry.name} ({entry.ip})" for entry in entries) or "none"
    example = f'{ENVIRONMENT}="roce0=127.0.0.2,roce1=127.0.0.3"'
    return f"known are: {names}. {ENVIRONMENT} names devices, as in {example}"


_lock: Final = threading.Lock()
_added: Final[dict[str, DeviceEntry]] = {}
_open: Final[dict[str, tuple[Device, int]]] = {}
"""Devices by address, and how many have each open. The functions may be called from any thread."""


def add_device(
    name: str,
    ip: str,
    *,
    mtu: int | None = None,
    pcap: Path | None = None,
    check_icrc_in_full: bool = False,
) -> DeviceEntry:
    """Make a device known; one of this name is replaced. ValueError for no address, or too many."""
    packed_address(ip)
    entry = DeviceEntry(name, ip, mtu, pcap or _capture_of(name), check_icrc_in_full)
    with _lock:
        if len(_added) >= MAX_DEVICES and name not in _added:
            raise ValueError(f"{MAX_DEVICES} devices are known")
        _added[name] = entry
    return entry


def remove_device(name: str) -> None:
    """Forget a device that was added; an open one stays open."""
    with _lock:
        _added.pop(name, None)


def devices() -> list[DeviceEntry]:
    """All devices: those of the environment, then those that were added. ValueError for a variable that
    makes no sense."""
    with _lock:
        known = {entry.name: entry for entry in _from_environment()} | _added
    return list(known.values())


def find_device(name_or_ip: str) -> DeviceEntry:
    """The device of this name or address. `NoSuchDevice` where there is none."""
    entries = devices()
    for entry in entries:
        if name_or_ip in (entry.name, entry.ip):
            return entry
    raise NoSuchDevice(f"no device {name_or_ip!r}; {known_devices(entries)}")


def open_device(name_or_ip: str) -> Device:
    """Open a device, or share the open one. `NoSuchDevice`, `CannotOpen`."""
    entry = find_device(name_or_ip)
    with _lock:
        device, users = _open.get(entry.ip, (None, 0))
        if device is None or device.closed:
            device = Device(**asdict(entry))
            users = 0
        _open[entry.ip] = device, users + 1
    return device


def release_device(device: Device) -> None:
    """One user fewer; the last one closes the device."""
    with _lock:
        opened, users = _open.get(device.ip, (None, 0))
        if opened is not device:
            return
        if users > 1:
            _open[device.ip] = device, users - 1
            return
        del _open[device.ip]
        # Under the lock: the next `open` shall find its port free.
        device.close()


def capture_into(folder: Path) -> None:
    """From now on each device that is made writes its packets to `folder`/NAME.pcap."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[ENVIRONMENT_PCAP] = str(folder.absolute() / "{device}.pcap")


def _capture_of(name: str) -> Path | None:
    pcap = os.environ.get(ENVIRONMENT_PCAP)
    return Path(pcap.replace("{device}", name)) if pcap else None


def _from_environment() -> list[DeviceEntry]:
    entries: list[DeviceEntry] = []
    for word in filter(None, (word.strip() for word in os.environ.get(ENVIRONMENT, "").split(","))):
        name, separator, ip = word.partition("=")
        if not separator or not name:
            raise ValueError(f"{ENVIRONMENT}: {word!r} is not NAME=ADDRESS")
        packed_address(ip)
        if any(name == entry.name or ip == entry.ip for entry in entries):
            raise ValueError(f"{ENVIRONMENT}: {word!r} names a device or an address for the second time")
        entries.append(DeviceEntry(name, ip, pcap=_capture_of(name)))
    return entries
