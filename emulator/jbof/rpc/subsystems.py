"""Transports, subsystems, namespaces, listeners and hosts: the nvmf_* methods, on the running target."""

import dataclasses
import errno
import ipaddress
import re
import uuid
from dataclasses import dataclass, field
from typing import Any, Final

from emulator.jbof.enclosure import Enclosure, EnclosureError
from emulator.jbof.rpc import faults, parameters
from emulator.jbof.rpc.bdevs import Bdev, Bdevs
from emulator.jbof.rpc.keyring import Keyring
from nvmeof.authentication.secret import CONTROLLER_GROUPS, Credentials
from nvmeof.controller.settings import NAMESPACE_ID_LIMIT
from nvmeof.controller.subsystem import KvNamespace, Namespace, PortAccess, Subsystem
from nvmeof.wire.fabrics import DISCOVERY_NQN

SUBSYSTEMS_MAX: Final = 256
LISTENERS_MAX: Final = 64
HOSTS_MAX: Final = 1024

_TRTYPES: Final = {"TCP": "tcp", "RDMA": "rdma"}
_OPTIONS: Final = {
    "max_queue_depth": "max_queue_entries",
    "max_io_qpairs_per_ctrlr": "max_io_queues",
    "in_capsule_data_size": "in_capsule_bytes",
    "max_io_size": "max_transfer_bytes",
}


@dataclass(frozen=True, slots=True)
class _Place:
    trtype: str
    address: str
    port: int

    def as_json(self) -> dict[str, str]:
        family = "IPv6" if ":" in self.address else "IPv4"
        return {
            "trtype": self.trtype, "adrfam": family, "traddr": self.address, "trsvcid": str(self.port),
        }  # fmt: skip


@dataclass(slots=True)
class _Offer:
    """A subsystem, and its names of bdevs and keys."""

    subsystem: Subsystem
    max_namespaces: int
    allow_any_host: bool
    hosts: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    bdevs: dict[int, str] = field(default_factory=dict)
    listeners: list[_Place] = field(default_factory=list)


class Subsystems:
    """The subsystems of one enclosure. Called with the lock of the dispatcher held."""

    def __init__(self, enclosure: Enclosure, bdevs: Bdevs, keyring: Keyring) -> None:
        self._enclosure = enclosure
        self._bdevs = bdevs
        self._keyring = keyring
        self._transports: list[str] = []
        self._offers: dict[str, _Offer] = {}
        settings = enclosure.settings
        if not settings.bare:
            own = enclosure.subsystem
            offer = _Offer(own, NAMESPACE_ID_LIMIT, own.allowed_hosts is None)
            offer.hosts = {nqn: (None, None) for nqn in sorted(own.allowed_hosts or ())}
            self._transports = [each.upper() for each in settings.transports]
            offer.listeners = [_Place(each, settings.address, enclosure.port) for each in self._transports]
            self._offers[own.nqn] = offer

    def create_transport(self, asked: parameters.CreateTransport) -> bool:
        """nvmf_create_transport. All transports of the target share its options."""
        trtype = asked.trtype.upper()
        if trtype not in _TRTYPES:
            raise faults.RpcFault(faults.INVALID_PARAMETERS, f"Invalid transport type '{asked.trtype}'")
        if trtype in self._transports:
            raise faults.RpcFault(faults.INTERNAL_ERROR, f"Transport type '{trtype}' already exists")
        target = self._enclosure.target
        wanted = {
            ours: value
            for theirs, ours in _OPTIONS.items()
            if (value := getattr(asked, theirs)) is not None and value != getattr(target.settings, ours)
        }
        if wanted:
            if self._transports:
                raise faults.of_errno(errno.EINVAL)
            try:
                target.settings = dataclasses.replace(target.settings, **wanted)
            except ValueError:
                raise faults.of_errno(errno.EINVAL) from None
        self._transports.append(trtype)
        return True

    def get_transports(self, asked: parameters.GetTransports) -> list[dict[str, Any]]:
        settings = self._enclosure.target.settings
        return [
            {"trtype": trtype, **{theirs: getattr(settings, ours) for theirs, ours in _OPTIONS.items()}}
            for trtype in self._transports
            if asked.trtype is None or asked.trtype.upper() == trtype
        ]

    def _find(self, nqn: str) -> _Offer:
        offer = self._offers.get(nqn)
        if offer is None:
            raise faults.RpcFault(faults.INVALID_PARAMETERS, f"Subsystem with NQN '{nqn}' not found")
        return offer

    def create(self, asked: parameters.CreateSubsystem) -> bool:
        try:
            if len(self._offers) >= SUBSYSTEMS_MAX or not _is_nqn(asked.nqn):
                raise ValueError("too many, or no NQN")
            if asked.max_namespaces > NAMESPACE_ID_LIMIT:
                raise ValueError("more than this enclosure has ids for")
            for text in (asked.serial_number, asked.model_number):
                if not (text.isascii() and text.isprintable()):
                    raise ValueError("not printable")
            subsystem = Subsystem(
                asked.nqn,
                serial=asked.serial_number,
                model=asked.model_number,
                allowed_hosts=None if asked.allow_any_host else (),
            )
            subsystem.access = PortAccess() if asked.ana_reporting else None
            self._enclosure.target.add_subsystem(subsystem)
        except ValueError:
            raise faults.RpcFault(faults.INTERNAL_ERROR, f"Unable to create subsystem {asked.nqn}") from None
        self._offers[asked.nqn] = _Offer(subsystem, asked.max_namespaces or 32, asked.allow_any_host)
        return True

    def delete(self, asked: parameters.OfSubsystem) -> bool:
        offer = self._find(asked.nqn)
        for place in list(offer.listeners):
            self._stop_listening(offer, place)
        self._enclosure.target.remove_subsystem(asked.nqn)
        del self._offers[asked.nqn]
        return True

    def get(self, asked: parameters.GetSubsystems) -> list[dict[str, Any]]:
        """nvmf_get_subsystems; the discovery subsystem comes first and lacks the last members."""
        if asked.nqn is not None and asked.nqn not in (DISCOVERY_NQN, *self._offers):
            raise faults.no_device()
        discovery = {
            "nqn": DISCOVERY_NQN, "subtype": "Discovery", "listen_addresses": [],
            "allow_any_host": True, "hosts": [],
        }  # fmt: skip
        everything = [discovery, *(self._describe(each) for each in self._offers.values())]
        return [each for each in everything if asked.nqn in (None, each["nqn"])]

    def _describe(self, offer: _Offer) -> dict[str, Any]:
        subsystem = offer.subsystem
        names = {each.drive: each.name for each in self._bdevs.all().values()}
        namespaces = []
        for nsid, namespace in subsystem.namespaces.items():
            if isinstance(namespace, KvNamespace):
                continue  # Not on a bdev, so nothing here could name it.
            bdev = offer.bdevs.get(nsid) or next(
                (name for drive, name in names.items() if drive is namespace.storage), ""
            )
            described = {
                "nsid": nsid, "bdev_name": bdev, "name": bdev, "nguid": namespace.nguid.hex().upper(),
            }  # fmt: skip
            described["uuid"] = str(uuid.UUID(bytes=namespace.uuid or namespace.nguid))
            namespaces.append(described)
        return {
            "nqn": subsystem.nqn,
            "subtype": "NVMe",
            "listen_addresses": [place.as_json() for place in offer.listeners],
            "allow_any_host": offer.allow_any_host,
            "hosts": [_host_json(nqn, keys) for nqn, keys in offer.hosts.items()],
            "serial_number": subsystem.serial,
            "model_number": subsystem.model,
            "max_namespaces": offer.max_namespaces,
            "min_cntlid": 1,
            "max_cntlid": 0xFFEF,
            "passthrough": False,
            "dmrsl": 0,
            "wzsl": 0,
            "namespaces": namespaces,
        }

    def get_controllers(self, asked: parameters.OfSubsystem) -> list[dict[str, Any]]:
        subsystem = self._find(asked.nqn).subsystem
        return [
            {
                "cntlid": each.cntlid,
                "hostnqn": each.host_nqn,
                "hostid": str(uuid.UUID(bytes=bytes(each.host_id))),
                "num_io_qpairs": max(0, len(each.queues) - 1),
            }
            for each in self._enclosure.target.controllers
            if each.subsystem is subsystem
        ]

    def add_namespace(self, asked: parameters.AddNamespace) -> int:
        """nvmf_subsystem_add_ns: the namespace id."""
        offer, wanted = self._find(asked.nqn), asked.namespace
        try:
            bdev = self._bdevs.find(wanted.bdev_name)
        except faults.RpcFault:
            raise faults.invalid_parameters() from None
        taken = offer.subsystem.namespaces
        nsid = wanted.nsid or next(each for each in range(1, NAMESPACE_ID_LIMIT + 2) if each not in taken)
        if nsid in taken or nsid > offer.max_namespaces:
            raise faults.invalid_parameters()
        named = _identifier(wanted.uuid) or bdev.uuid.bytes
        nguid = _identifier(wanted.nguid) or named
        claimed = self._enclosure.is_attached(bdev.drive.number)
        if claimed or any(nguid == each.nguid or named == each.uuid for each in taken.values()):
            raise faults.invalid_parameters()
        self._enclosure.target.attach(offer.subsystem, Namespace(nsid, bdev.drive, nguid=nguid, uuid=named))
        offer.bdevs[nsid] = bdev.name
        return nsid

    def remove_namespace(self, asked: parameters.RemoveNamespace) -> bool:
        offer = self._find(asked.nqn)
        if asked.nsid not in offer.subsystem.namespaces:
            raise faults.invalid_parameters()
        self._enclosure.target.remove_namespace(offer.subsystem, asked.nsid)
        offer.bdevs.pop(asked.nsid, None)
        return True

    def forget(self, bdev: Bdev) -> None:
        """Forget a deleted bdev, whose namespaces are gone."""
        for offer in self._offers.values():
            offer.bdevs = {nsid: name for nsid, name in offer.bdevs.items() if name != bdev.name}

    def _place(self, said: parameters.ListenAddress) -> _Place:
        """RpcFault where it is no address, or the transport was not created."""
        trtype = said.trtype.upper()
        if trtype not in self._transports or said.adrfam.lower() not in ("ipv4", "ipv6"):
            raise faults.invalid_parameters()
        try:
            address = ipaddress.ip_address(said.traddr)
        except ValueError:
            raise faults.invalid_parameters() from None
        # `int` takes " +1_000 " too; a service is digits.
        port = int(said.trsvcid) if re.fullmatch("[0-9]{1,5}", said.trsvcid) else 0
        if not 1 <= port <= 65535 or f"ipv{address.version}" != said.adrfam.lower():
            raise faults.invalid_parameters()
        return _Place(trtype, str(address), port)

    def add_listener(self, asked: parameters.AddListener) -> bool:
        offer, place = self._find(asked.nqn), self._place(asked.listen_address)
        if place in offer.listeners or len(offer.listeners) >= LISTENERS_MAX:
            raise faults.invalid_parameters()
        try:
            self._enclosure.listen(_TRTYPES[place.trtype], place.address, place.port, asked.nqn)
        except EnclosureError:
            raise faults.invalid_parameters() from None
        offer.listeners.append(place)
        return True

    def remove_listener(self, asked: parameters.RemoveListener) -> bool:
        """nvmf_subsystem_remove_listener; connections end with the last subsystem that listens there."""
        offer, place = self._find(asked.nqn), self._place(asked.listen_address)
        if place not in offer.listeners:
            raise faults.invalid_parameters()
        self._stop_listening(offer, place)
        return True

    def _stop_listening(self, offer: _Offer, place: _Place) -> None:
        offer.listeners.remove(place)
        self._enclosure.stop_listening(_TRTYPES[place.trtype], place.address, place.port, offer.subsystem.nqn)

    def get_listeners(self, asked: parameters.OfSubsystem) -> list[dict[str, Any]]:
        return [
            {"address": place.as_json(), "ana_state": "optimized"}
            for place in self._find(asked.nqn).listeners
        ]

    def add_host(self, asked: parameters.OfHost) -> bool:
        offer = self._find(asked.nqn)
        credentials = self._credentials(asked)
        if asked.host in offer.hosts:
            raise faults.internal_error()
        if not _is_nqn(asked.host) or len(asked.host) > 223 or len(offer.hosts) >= HOSTS_MAX:
            raise faults.invalid_parameters()
        # The key first: nobody may come in without it in between.
        self._enclosure.target.set_credentials(offer.subsystem, asked.host, credentials)
        offer.hosts[asked.host] = (asked.dhchap_key, asked.dhchap_ctrlr_key)
        self._let_in(offer)
        return True

    def set_keys(self, asked: parameters.OfHost) -> bool:
        offer = self._find(asked.nqn)
        if asked.host not in offer.hosts:
            raise faults.invalid_parameters()
        self._enclosure.target.set_credentials(offer.subsystem, asked.host, self._credentials(asked))
        offer.hosts[asked.host] = (asked.dhchap_key, asked.dhchap_ctrlr_key)
        return True

    def key_users(self, name: str) -> int:
        """How many hosts have a key, each once in every subsystem and for each direction."""
        return sum(keys.count(name) for offer in self._offers.values() for keys in offer.hosts.values())

    def _credentials(self, asked: parameters.OfHost) -> Credentials | None:
        host = self._keyring.secret(asked.dhchap_key)
        controller = self._keyring.secret(asked.dhchap_ctrlr_key)
        if host is None:
            if controller is not None:
                raise faults.invalid_parameters()
            return None
        try:
            return Credentials(host, controller, groups=CONTROLLER_GROUPS)
        except ValueError:
            raise faults.invalid_parameters() from None

    def remove_host(self, asked: parameters.RemoveHost) -> bool:
        """nvmf_subsystem_remove_host; its controllers end."""
        offer = self._find(asked.nqn)
        if offer.hosts.pop(asked.host, None) is None:
            raise faults.internal_error()
        self._let_in(offer)
        self._enclosure.target.set_credentials(offer.subsystem, asked.host, None)
        return True

    def allow_any_host(self, asked: parameters.AllowAnyHost) -> bool:
        offer = self._find(asked.nqn)
        offer.allow_any_host = asked.allow_any_host
        self._let_in(offer)
        return True

    def _let_in(self, offer: _Offer) -> None:
        allowed = None if offer.allow_any_host else offer.hosts
        self._enclosure.target.set_allowed_hosts(offer.subsystem, allowed)


def _is_nqn(text: str) -> bool:
    return text.startswith("nqn.") and text.isascii() and text.isprintable()


def _host_json(nqn: str, keys: tuple[str | None, str | None]) -> dict[str, str]:
    names = {"nqn": nqn, "dhchap_key": keys[0], "dhchap_ctrlr_key": keys[1]}
    return {name: value for name, value in names.items() if value is not None}


def _identifier(text: str | None) -> bytes | None:
    """16 bytes of a UUID or NGUID; None for none and for zeros. RpcFault."""
    if text is None:
        return None
    try:
        found = uuid.UUID(text)
    except ValueError:
        raise faults.invalid_parameters() from None
    return found.bytes if found.int else None
