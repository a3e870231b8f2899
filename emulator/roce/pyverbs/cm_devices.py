"""Which device an address belongs to, and one more user of it. Part of `pyverbs.cmid`.

Linux asks its routing table. Here each address has one NIC, so the table decides only where it names the
address of a NIC; between addresses of the loopback network it never does.
"""

import errno
import socket
import weakref

from emulator.roce.nic.memory import ProtectionDomain
from emulator.roce.nic.verbs import ROCE_PORT, Address, VerbsError
from emulator.roce.runtime import registry
from emulator.roce.runtime.device import Device
from emulator.roce.runtime.errors import CannotOpen

_domains: weakref.WeakKeyDictionary[Device, ProtectionDomain] = weakref.WeakKeyDictionary()
"""The protection domain that all CMIDs of a device share, as with librdmacm. It goes with the device."""


def default_domain(device: Device) -> ProtectionDomain:
    """The domain of CMIDs that were given none."""
    domain = _domains.get(device)
    if domain is None:
        with device.turn():
            domain = _domains[device] = device.nic.alloc_pd()
    return domain


def is_any(address: Address | None) -> bool:
    """Whether an address leaves open which one is meant."""
    return address is None or address.ip in ("0.0.0.0", "::")


def opened_at(ip: str) -> Device:
    """The device with this address. VerbsError(ENODEV) where there is none, or it cannot be opened."""
    entries = registry.devices()
    if ip not in [entry.ip for entry in entries]:
        raise VerbsError(errno.ENODEV, f"no device has the address {ip}; {registry.known_devices(entries)}")
    try:
        return registry.open_device(ip)
    except CannotOpen as error:
        raise VerbsError(errno.ENODEV, str(error)) from error


def opened_for(source: Address | None, destination: Address) -> Device:
    """The device to reach `destination` from: the one with the source address; else the one that the routing
    table names; else the first that is not the destination's own; else that. VerbsError(ENODEV) for none."""
    if source is not None and not is_any(source):
        return opened_at(source.ip)
    addresses = [entry.ip for entry in registry.devices() if (":" in entry.ip) == (":" in destination.ip)]
    routed = _source_by_route(destination)
    if routed in addresses and routed != destination.ip:
        return opened_at(routed)
    for ip in addresses:
        if ip != destination.ip:
            return opened_at(ip)
    return opened_at(destination.ip)


def opened_all() -> list[Device]:
    """Every device that can be opened. VerbsError(ENODEV) for none."""
    devices = []
    for entry in registry.devices():
        try:
            devices.append(registry.open_device(entry.ip))
        except CannotOpen:
            continue
    if not devices:
        known = registry.known_devices(registry.devices())
        raise VerbsError(errno.ENODEV, f"no device can be opened; {known}")
    return devices


def _source_by_route(destination: Address) -> str:
    """The source address that the kernel would choose; nothing is sent. Empty where there is no way."""
    family = socket.AF_INET6 if ":" in destination.ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((destination.ip, ROCE_PORT))
            return str(probe.getsockname()[0])
        except OSError:
            return ""
