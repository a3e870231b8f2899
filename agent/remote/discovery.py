"""The enclosures that discovery controllers list. Without I/O.

An entry of a discovery log is a way to a subsystem (address, port, transport, NQN). It becomes an enclosure
as if it stood in the configuration, with the digests and secrets of its `[[discovery]]`; no way is taken
twice. Referrals are not followed. An entry without an IP address, or with characters that do not print, is
left out and named once in the log: a discovery controller is not believed further than that.

An entry that disappears takes nothing away that works, because a discovery controller that starts again may
list nothing for a moment. An enclosure that is neither listed nor connected is forgotten.
"""

import hashlib
import ipaddress
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from pydantic import ValidationError

from agent.config.configuration import DiscoverySection, EnclosureSection
from agent.host_os.rate_limited_log import Complaints
from nvmeof.wire.fabrics import DISCOVERY_NQN
from nvmeof.wire.log_page import AddressFamily, DiscoveryEntry, SubsystemType, TransportType

log = logging.getLogger(__name__)

DISCOVERED_MAX = 4096
"""Enclosures by discovery; more are not connected to, and the log says so."""

REFUSED_MAX = 16
"""Entries of one log that are said to be no way to an enclosure."""

_TRANSPORTS = {TransportType.TCP: "tcp", TransportType.RDMA: "rdma"}
_FAMILIES = (AddressFamily.IPV4, AddressFamily.IPV6)

Way: TypeAlias = tuple[str, str, int, str]
"""Transport, address, port, NQN."""
E = TypeVar("E")


def way_to(section: EnclosureSection) -> Way:
    return section.transport, section.address, section.port, section.nqn


def enclosures_in(
    discovery: DiscoverySection, entries: Iterable[DiscoveryEntry]
) -> tuple[dict[Way, EnclosureSection], set[str]]:
    """The enclosures of a log, without those that this host has no transport for; and up to `REFUSED_MAX`
    entries that are no way to an enclosure, in printable ASCII.

    A target that listens at any address lists that one; it is then where the discovery controller is.
    """
    found: dict[Way, EnclosureSection] = {}
    refused: set[str] = set()
    for entry in entries:
        transport = _TRANSPORTS.get(TransportType(entry.transport_type)) if _known(entry) else None
        if transport is None:
            continue
        address = discovery.address if _is_wildcard(entry.address) else entry.address
        named = f"{transport} {address} {entry.service} {entry.subsystem_nqn}"
        try:
            _check(entry)
            section = EnclosureSection.model_validate(
                {
                    "name": f"{discovery.name}.{hashlib.sha256(named.encode()).hexdigest()[:8]}",
                    "transport": transport,
                    "address": address,
                    "port": int(entry.service),
                    "nqn": entry.subsystem_nqn,
                    "header_digest": discovery.header_digest,
                    "data_digest": discovery.data_digest,
                    "host_secret_file": discovery.host_secret_file,
                    "controller_secret_file": discovery.controller_secret_file,
                }
            )
        except (ValidationError, ValueError):
            if len(refused) < REFUSED_MAX:
                refused.add(ascii(named))
            continue
        found[way_to(section)] = section
    return found, refused


def itself(discovery: DiscoverySection) -> EnclosureSection:
    """The discovery controller as something to connect to."""
    values = discovery.model_dump() | {"nqn": DISCOVERY_NQN}
    return EnclosureSection.model_validate(values)


def _known(entry: DiscoveryEntry) -> bool:
    return (
        entry.transport_type in _TRANSPORTS
        and entry.address_family in _FAMILIES
        and entry.subsystem_type == SubsystemType.NVM
    )


def _check(entry: DiscoveryEntry) -> None:
    """ValueError for what has no place in a log or a name: the peer chose it.

    TRADDR of these address families is an IP address in text; its scope is as free as a name, though. A host
    name would have this host ask its name server for what a stranger wrote.
    """
    ipaddress.ip_address(entry.address)
    for text in (entry.address, entry.subsystem_nqn):
        if not text.isprintable() or " " in text:
            raise ValueError("it does not print")
    if not (entry.service.isascii() and entry.service.isdecimal()):
        raise ValueError("no port number")


def _is_wildcard(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_unspecified
    except ValueError:
        return False


@dataclass(slots=True)
class _Known(Generic[E]):
    enclosure: E
    listed_by: set[str] = field(default_factory=set)


class Discovered(Generic[E]):
    """Enclosures by discovery. `begin` starts with one, `end` lets go of it."""

    def __init__(
        self,
        configured: Sequence[EnclosureSection],
        begin: Callable[[EnclosureSection], E],
        end: Callable[[E], None],
    ) -> None:
        self._configured = {way_to(section) for section in configured}
        self._begin, self._end = begin, end
        self._known: dict[Way, _Known[E]] = {}
        self._full = False
        self._complaints = Complaints(log)
        self._refused: dict[str, set[str]] = {}
        """What each discovery controller lists that is no way to an enclosure."""

    def __len__(self) -> int:
        return len(self._known)

    def listed(self, discovery: DiscoverySection, entries: Iterable[DiscoveryEntry]) -> None:
        """What one discovery controller lists now, instead of what it listed before."""
        wanted, refused = enclosures_in(discovery, entries)
        for named in sorted(refused - self._refused.get(discovery.name, set())):
            log.warning("discovery %s lists what is no way to an enclosure: %s", discovery.name, named)
        self._refused[discovery.name] = refused
        for way, known in self._known.items():
            if way not in wanted:
                known.listed_by.discard(discovery.name)
        for way, section in wanted.items():
            if way in self._configured:
                continue
            if way not in self._known:
                if len(self._known) >= DISCOVERED_MAX:
                    if not self._full:
                        log.warning("discovery lists over %d enclosures; the rest is left", DISCOVERED_MAX)
                    self._full = True
                    continue
                transport, address, port, nqn = way
                found = f"{section.name}, {transport} at {address} port {port}: {nqn}"
                self._complaints.world("an enclosure is found by discovery", found, logging.INFO)
                self._known[way] = _Known(self._begin(section))
            self._known[way].listed_by.add(discovery.name)

    def forget_gone(self, is_connected: Callable[[E], bool]) -> None:
        """Let go of enclosures that are neither listed nor connected."""
        gone = [
            way
            for way, known in self._known.items()
            if not known.listed_by and not is_connected(known.enclosure)
        ]
        for way in gone:
            known = self._known.pop(way)
            gone_way = f"{way[3]} at {way[1]} port {way[2]}"
            self._complaints.world("an enclosure is listed no longer, and is gone", gone_way, logging.INFO)
            self._end(known.enclosure)
