"""The namespaces of a controller, and how it reaches them: procedures over Identify and the ANA log."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from nvmeof.errors import CommandFailed, MalformedPdu
from nvmeof.host import commands
from nvmeof.host.procedure import Procedure, data_of, unless_lost
from nvmeof.wire import ana
from nvmeof.wire import identify as wire
from nvmeof.wire.kv import IdentifyKvNamespace, KvFormat, decode_identify_kv_namespace_untrusted
from nvmeof.wire.log_page import LogPage


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    nsid: int
    nguid: bytes
    """Sixteen bytes, all zero if it has none."""
    size_bytes: int
    lba_bytes: int
    kv: KvFormat | None = None
    """Present on a namespace of the KV command set: its bounds. It has no logical blocks (`lba_bytes` 1)."""
    used_bytes: int = field(default=0, compare=False)
    """The size of its values at the last look; of a KV namespace only."""
    ana_group: int = 0
    """Its ANA group; 0 where the controller does not report asymmetric access."""


def look_at_namespace(nsid: int) -> Procedure[NamespaceInfo | None]:
    """One namespace; None if it is not there, or has neither logical blocks nor keys.

    Raises CommandFailed where an answer was lost on the way: a namespace is not gone because of that.
    """
    try:
        data = yield from data_of(commands.identify(wire.IdentifyCns.NAMESPACE_DESCRIPTORS, nsid))
        names = wire.decode_namespace_descriptors_untrusted(data)
    except CommandFailed as failure:
        unless_lost(failure)
        # Controllers before version 1.3 have no descriptors.
        names = wire.NamespaceDescriptors()
    command = commands.identify(wire.IdentifyCns.NAMESPACE, nsid)
    if names.command_set == wire.CommandSet.KEY_VALUE:
        command = commands.identify(
            wire.IdentifyCns.COMMAND_SET_NAMESPACE, nsid, csi=wire.CommandSet.KEY_VALUE
        )
    elif names.command_set not in (None, wire.CommandSet.NVM):
        return None
    try:
        data = yield from data_of(command)
    except CommandFailed as failure:
        unless_lost(failure)
        # It went away between the list and here; the event that says so is under way.
        return None
    namespace: wire.IdentifyNamespace | IdentifyKvNamespace
    if names.command_set == wire.CommandSet.KEY_VALUE:
        namespace = decode_identify_kv_namespace_untrusted(data)
        kv, lba_bytes, used_bytes = namespace.formats[0], 1, namespace.nuse
    else:
        namespace = wire.decode_identify_namespace_untrusted(data)
        kv, lba_bytes, used_bytes = None, namespace.lba_bytes, 0
    if namespace.nsze == 0:
        return None
    return NamespaceInfo(
        nsid=nsid,
        nguid=names.nguid or namespace.nguid,
        size_bytes=namespace.nsze * lba_bytes,
        lba_bytes=lba_bytes,
        kv=kv,
        used_bytes=used_bytes,
        ana_group=namespace.anagrpid,
    )


def scan_namespaces() -> Procedure[dict[int, NamespaceInfo]]:
    """The active namespaces by id, as many as one list has (1024)."""
    found: dict[int, NamespaceInfo] = {}
    data = yield from data_of(commands.identify(wire.IdentifyCns.ACTIVE_NAMESPACES))
    for nsid in wire.decode_namespace_list_untrusted(data):
        namespace = yield from look_at_namespace(nsid)
        if namespace is not None:
            found[nsid] = namespace
    return found


Access: TypeAlias = Mapping[int, ana.AnaState]
"""By ANA group. Empty where the controller does not report."""

NO_ACCESS_REPORT: Access = MappingProxyType({})


def read_access(identify: wire.IdentifyController) -> Procedure[Access]:
    """The states of all ANA groups (NVMe Base 2.0, 8.1). The reading arms the event of the next change.

    Raises `MalformedPdu`, `CommandFailed` and `ConnectionLost`.
    """
    if not identify.cmic & ana.CMIC_ANA:
        return NO_ACCESS_REPORT
    if not 1 <= identify.nanagrpid <= ana.MAX_GROUPS:
        raise MalformedPdu(f"a controller with {identify.nanagrpid} ANA groups")
    size = ana.ana_log_bytes(identify.nanagrpid)
    data = yield from data_of(commands.get_log_page(LogPage.ANA, size, specific=ana.ANA_GROUPS_ONLY))
    log = ana.decode_ana_log_untrusted(data)
    return MappingProxyType({each.group: each.state for each in log.groups})
