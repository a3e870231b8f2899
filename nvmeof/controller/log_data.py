"""The log pages of a controller: what Get Log Page answers. Called with `Target.lock` held."""

from collections.abc import Callable
from typing import Final

from nvmeof.controller.controller import ADMIN_OPCODES, ERROR_LOG_ENTRIES, Controller
from nvmeof.controller.request import Refusal
from nvmeof.controller.settings import NAMESPACE_ID_LIMIT
from nvmeof.controller.subsystem import ANA_GROUP
from nvmeof.controller.target import Target
from nvmeof.wire import log_page as wire
from nvmeof.wire.ana import ANA_GROUPS_ONLY, AnaGroup, AnaLog, ana_log_bytes
from nvmeof.wire.identify import CommandSet
from nvmeof.wire.kv import KvOpcode
from nvmeof.wire.sqe import IoOpcode
from nvmeof.wire.status import Status

_ROOM_TEMPERATURE_K: Final = 298

_ADMIN_EFFECTS: Final[dict[int, int]] = dict.fromkeys(ADMIN_OPCODES, wire.EFFECT_SUPPORTED)
_CHANGES: Final = wire.EFFECT_SUPPORTED | wire.EFFECT_CONTENT_CHANGE
_IO_EFFECTS: Final[dict[int, int]] = {
    IoOpcode.FLUSH: wire.EFFECT_SUPPORTED,
    IoOpcode.READ: wire.EFFECT_SUPPORTED,
    IoOpcode.COMPARE: wire.EFFECT_SUPPORTED,
    IoOpcode.WRITE: _CHANGES,
    IoOpcode.WRITE_ZEROES: _CHANGES,
    IoOpcode.DATASET_MANAGEMENT: _CHANGES,
}
_KV_EFFECTS: Final[dict[int, int]] = {
    KvOpcode.FLUSH: wire.EFFECT_SUPPORTED,
    KvOpcode.RETRIEVE: wire.EFFECT_SUPPORTED,
    KvOpcode.LIST: wire.EFFECT_SUPPORTED,
    KvOpcode.EXIST: wire.EFFECT_SUPPORTED,
    KvOpcode.STORE: _CHANGES,
    KvOpcode.DELETE: _CHANGES,
}


def log_page(target: Target, controller: Controller, wanted: wire.LogPageRequest) -> bytes:
    """`wanted.length` bytes of a page from `wanted.offset`; zeros after its end. Raises Refusal."""
    builder = (_DISCOVERY if controller.subsystem.is_discovery else _BUILDERS).get(wanted.page)
    if builder is None or (wanted.page == wire.LogPage.ANA and controller.subsystem.access is None):
        raise Refusal(Status.INVALID_LOG_PAGE)
    page = builder(target, controller, wanted)
    if wanted.offset % 4 or wanted.offset > len(page):
        raise Refusal(Status.INVALID_FIELD)
    if not wanted.retain_event:
        controller.log_page_read(wanted.page)
    return page[wanted.offset : wanted.offset + wanted.length].ljust(wanted.length, b"\0")


def _supported(target: Target, controller: Controller, wanted: wire.LogPageRequest) -> bytes:
    pages = set(_DISCOVERY if controller.subsystem.is_discovery else _BUILDERS)
    if controller.subsystem.access is None:
        pages.discard(wire.LogPage.ANA)
    return b"".join((1 if page in pages else 0).to_bytes(4, "little") for page in range(256))


def _errors(target: Target, controller: Controller, wanted: wire.LogPageRequest) -> bytes:
    entries = b"".join(entry.encode() for entry in controller.error_log)
    return entries.ljust(ERROR_LOG_ENTRIES * wire.ERROR_ENTRY_BYTES, b"\0")


def _smart(target: Target, controller: Controller, wanted: wire.LogPageRequest) -> bytes:
    return wire.encode_smart_log(_ROOM_TEMPERATURE_K, controller.error_count)


def _firmware(target: Target, controller: Controller, wanted: wire.LogPageRequest) -> bytes:
    """512 bytes: byte 0 the active slot, 8..15 the revision in slot 1."""
    revision = controller.subsystem.firmware.encode("ascii", "replace").ljust(8)[:8]
    return (b"\x01".ljust(8, b"\0") + revision).ljust(512, b"\0")


def _changed(target: Target, controller: Controller, wanted: wire.LogPageRequest) -> bytes:
    return wire.encode_changed_namespaces(controller.changed_namespaces)


def _ana(target: Target, controller: Controller, wanted: wire.LogPageRequest) -> bytes:
    access = controller.subsystem.access
    assert access is not None
    groups_only = wanted.specific & ANA_GROUPS_ONLY
    nsids = () if groups_only else tuple(sorted(each.nsid for each in controller.namespaces))
    state = access.state(controller.port_id)
    page = AnaLog(access.change_count, (AnaGroup(ANA_GROUP, state, access.change_count, nsids),)).encode()
    # As long as it can become: nvme-cli reads that much, in pieces.
    return page.ljust(ana_log_bytes(1) + 4 * NAMESPACE_ID_LIMIT, b"\0")


def _effects(target: Target, controller: Controller, wanted: wire.LogPageRequest) -> bytes:
    # The Linux host asks for the page of every command set that it meets, and drops a namespace without.
    effects = {CommandSet.NVM: _IO_EFFECTS, CommandSet.KEY_VALUE: _KV_EFFECTS}.get(wanted.csi)  # type: ignore[call-overload]
    if effects is None:
        raise Refusal(Status.INVALID_FIELD)
    return wire.encode_command_effects(_ADMIN_EFFECTS, effects)


def _discovery(target: Target, controller: Controller, wanted: wire.LogPageRequest) -> bytes:
    return target.discovery_log(controller.host_nqn).encode()


_Builder = Callable[[Target, Controller, wire.LogPageRequest], bytes]

_DISCOVERY: Final[dict[int, _Builder]] = {
    wire.LogPage.SUPPORTED: _supported,
    wire.LogPage.ERROR: _errors,
    wire.LogPage.DISCOVERY: _discovery,
}

_BUILDERS: Final[dict[int, _Builder]] = {
    wire.LogPage.SUPPORTED: _supported,
    wire.LogPage.ERROR: _errors,
    wire.LogPage.SMART: _smart,
    wire.LogPage.FIRMWARE_SLOT: _firmware,
    wire.LogPage.CHANGED_NAMESPACES: _changed,
    wire.LogPage.COMMAND_EFFECTS: _effects,
    wire.LogPage.ANA: _ana,
}
