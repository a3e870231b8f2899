"""Which namespaces a controller has, and what they are: procedures over Identify."""

from __future__ import annotations

from dataclasses import dataclass, field

from nvmeof.errors import CommandFailed, MalformedPdu
from nvmeof.host import commands
from nvmeof.host.procedure import Procedure, done, unless_lost
from nvmeof.limits import MAX_NAMESPACES
from nvmeof.wire.identify import (
    NAMESPACE_LIST_ENTRIES,
    CommandSet,
    IdentifyCns,
    NamespaceDescriptors,
    decode_identify_namespace_untrusted,
    decode_namespace_descriptors_untrusted,
    decode_namespace_list_untrusted,
)
from nvmeof.wire.kv import KvFormat, decode_identify_kv_namespace_untrusted


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """One active namespace."""

    nsid: int
    nguid: bytes
    """Sixteen bytes, all zero if it has none."""
    size_bytes: int
    lba_bytes: int
    kv: KvFormat | None = None
    """Present on a namespace of the KV command set: its bounds. It has no logical blocks (`lba_bytes` 1)."""
    used_bytes: int = field(default=0, compare=False)
    """What its values took up when it was looked at; of a KV namespace only."""
    eui64: bytes = field(default=bytes(8), repr=False)
    uuid: bytes | None = field(default=None, repr=False)
    ana_group: int = 0
    """Its ANA group; 0 where the controller does not report asymmetric access."""


def list_namespaces() -> Procedure[list[int]]:
    """Ids of the active namespaces, ascending."""
    found: list[int] = []
    while len(found) < MAX_NAMESPACES:
        after = found[-1] if found else 0
        command = yield from done(commands.identify(IdentifyCns.ACTIVE_NAMESPACES, after))
        assert command.data_in is not None
        page = decode_namespace_list_untrusted(command.data_in)
        if page and page[0] <= after:
            raise MalformedPdu("a namespace list repeats itself")
        found += page
        if len(page) < NAMESPACE_LIST_ENTRIES:
            break
    return found


def look_at_namespace(nsid: int) -> Procedure[NamespaceInfo | None]:
    """What a namespace is; None if it is not there, or neither one of logical blocks nor one of keys.

    Raises CommandFailed where an answer was lost on the way: a namespace is not gone because of that.
    """
    try:
        command = yield from done(commands.identify(IdentifyCns.NAMESPACE_DESCRIPTORS, nsid))
        assert command.data_in is not None
        names = decode_namespace_descriptors_untrusted(command.data_in)
    except CommandFailed as failure:
        unless_lost(failure)
        # Controllers before version 1.3 have no descriptors.
        names = NamespaceDescriptors()
    if names.command_set == CommandSet.KEY_VALUE:
        return (yield from _look_at_kv_namespace(nsid, names))
    if names.command_set not in (None, CommandSet.NVM):
        return None
    try:
        command = yield from done(commands.identify(IdentifyCns.NAMESPACE, nsid))
    except CommandFailed as failure:
        unless_lost(failure)
        # It went away between the list and here; the event that says so is under way.
        return None
    assert command.data_in is not None
    namespace = decode_identify_namespace_untrusted(command.data_in)
    if namespace.nsze == 0:
        return None
    return NamespaceInfo(
        nsid=nsid,
        nguid=names.nguid or namespace.nguid,
        size_bytes=namespace.nsze * namespace.lba_bytes,
        lba_bytes=namespace.lba_bytes,
        eui64=names.eui64 or namespace.eui64,
        uuid=names.uuid,
        ana_group=namespace.anagrpid,
    )


def _look_at_kv_namespace(nsid: int, names: NamespaceDescriptors) -> Procedure[NamespaceInfo | None]:
    try:
        command = yield from done(
            commands.identify(IdentifyCns.COMMAND_SET_NAMESPACE, nsid, csi=CommandSet.KEY_VALUE)
        )
    except CommandFailed as failure:
        unless_lost(failure)
        return None  # as above: it went away
    assert command.data_in is not None
    namespace = decode_identify_kv_namespace_untrusted(command.data_in)
    if namespace.nsze == 0:
        return None
    return NamespaceInfo(
        nsid=nsid,
        nguid=names.nguid or namespace.nguid,
        size_bytes=namespace.nsze,
        lba_bytes=1,
        kv=namespace.formats[0],
        used_bytes=namespace.nuse,
        eui64=names.eui64 or namespace.eui64,
        uuid=names.uuid,
        ana_group=namespace.anagrpid,
    )


def scan_namespaces() -> Procedure[dict[int, NamespaceInfo]]:
    """Every active namespace, by id."""
    found: dict[int, NamespaceInfo] = {}
    for nsid in (yield from list_namespaces()):
        namespace = yield from look_at_namespace(nsid)
        if namespace is not None:
            found[nsid] = namespace
    return found
