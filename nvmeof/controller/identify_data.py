"""What a controller says about itself and its namespaces: the answers to Identify, by CNS.

Each builder returns 4096 bytes or raises `Refusal`. What the Linux host insists on is marked.
"""

from collections.abc import Callable
from typing import Final

from nvmeof.controller.controller import ERROR_LOG_ENTRIES, Controller
from nvmeof.controller.request import Refusal
from nvmeof.controller.settings import NAMESPACE_ID_LIMIT
from nvmeof.controller.subsystem import ANA_GROUP, ANA_TRANSITION_S, AnyNamespace, KvNamespace, Namespace
from nvmeof.wire import identify as wire
from nvmeof.wire.ana import ANACAP_ALL_STATES, CMIC_ANA
from nvmeof.wire.cqe import CQE
from nvmeof.wire.features import AEC_ANA_CHANGED, AEC_DISCOVERY_CHANGED, AEC_NAMESPACE_CHANGED
from nvmeof.wire.kv import IdentifyKvNamespace
from nvmeof.wire.log_page import TransportType
from nvmeof.wire.sqe import Sqe
from nvmeof.wire.status import Status

_CTRATT_TRAFFIC_KEEP_ALIVE: Final = 1 << 6
_VWC_FLUSH_BROADCAST: Final = 3 << 1
_OFCS_DISCONNECT: Final = 1
_NSFEAT_THIN: Final = 1 << 0
_NSFEAT_PREFERRED_SIZES: Final = 1 << 4
_DLFEAT_ZEROS: Final = 1
_DLFEAT_WRITE_ZEROES: Final = 1 << 3
_CMIC_MULTIPLE_PORTS: Final = 1 << 0
_CMIC_MULTIPLE_CONTROLLERS: Final = 1 << 1
_NMIC_SHARED: Final = 1
_SENSIBLE_WRITE_BLOCKS: Final = 16  # NPWG and NPWA: 64 KiB of 4 KiB blocks


def identify(controller: Controller, sqe: Sqe) -> bytes:
    """The 4096 bytes that an Identify command asks for."""
    cns = sqe.cdw10 & 0xFF
    builder = (_DISCOVERY if controller.subsystem.is_discovery else _BUILDERS).get(cns)
    if builder is None:
        raise Refusal(Status.INVALID_FIELD)
    return builder(controller, sqe)


def _controller(controller: Controller, sqe: Sqe) -> bytes:
    settings, subsystem = controller.settings, controller.subsystem
    discovery = subsystem.is_discovery
    ana = subsystem.access is not None
    keyed = wire.SGLS_KEYED if controller.transport == TransportType.RDMA else 0  # Linux: for RDMA
    events = AEC_NAMESPACE_CHANGED | (AEC_ANA_CHANGED if ana else 0)
    return wire.IdentifyController(
        serial=subsystem.serial,
        model=subsystem.model,
        firmware=subsystem.firmware,
        cmic=0 if discovery else _CMIC_MULTIPLE_CONTROLLERS | (_CMIC_MULTIPLE_PORTS | CMIC_ANA if ana else 0),
        mdts=settings.mdts,
        cntlid=controller.cntlid,  # Linux: equal to the result of Connect
        version=controller.version,
        oaes=AEC_DISCOVERY_CHANGED if discovery else events,
        ctratt=wire.CTRATT_HOST_ID_128 | _CTRATT_TRAFFIC_KEEP_ALIVE,
        cntrltype=wire.ControllerKind.DISCOVERY if discovery else wire.ControllerKind.IO,
        acl=settings.abort_limit - 1,
        aerl=settings.async_event_limit - 1,
        frmw=0x03,  # one firmware slot, read-only
        lpa=wire.LPA_EFFECTS | wire.LPA_EXTENDED,
        elpe=ERROR_LOG_ENTRIES - 1,
        wctemp=353,
        cctemp=363,
        kas=max(1, round(settings.keep_alive_granularity_s * 10)),  # Linux: not 0
        anatt=ANA_TRANSITION_S if ana else 0,
        anacap=ANACAP_ALL_STATES if ana else 0,
        anagrpmax=ANA_GROUP if ana else 0,
        nanagrpid=1 if ana else 0,
        sqes=0x66,
        cqes=0x44,
        maxcmd=settings.max_queue_entries,
        nn=0 if discovery else NAMESPACE_ID_LIMIT,
        oncs=0 if discovery else wire.ONCS_COMPARE | wire.ONCS_DATASET_MANAGEMENT | wire.ONCS_WRITE_ZEROES,
        vwc=0 if discovery else wire.VWC_PRESENT | _VWC_FLUSH_BROADCAST,
        sgls=wire.SGLS_SUPPORTED | wire.SGLS_OFFSET | keyed,  # Linux: SGLs at all, in-capsule data by offset
        mnan=NAMESPACE_ID_LIMIT if ana else 0,  # Linux: wanted where there is ANA
        subnqn=subsystem.nqn,
        ioccsz=settings.ioccsz,  # Linux: at least 4
        iorcsz=CQE.size // 16,  # Linux: at least 1
        icdoff=0,
        msdbd=1,
        ofcs=_OFCS_DISCONNECT,
    ).encode()


def _ana_group(controller: Controller) -> int:
    return 0 if controller.subsystem.access is None else ANA_GROUP


def _namespace_of(controller: Controller, nsid: int) -> AnyNamespace | None:
    """The active namespace, None for an inactive id; Refusal for one that cannot be."""
    if not 1 <= nsid <= NAMESPACE_ID_LIMIT:
        raise Refusal(Status.INVALID_NAMESPACE)
    namespace = controller.subsystem.namespaces.get(nsid)
    return namespace if isinstance(namespace, Namespace) or controller.all_command_sets else None


def _namespace(controller: Controller, sqe: Sqe) -> bytes:
    namespace = _namespace_of(controller, sqe.nsid)
    if namespace is None or isinstance(namespace, KvNamespace):
        # Zeros are how an inactive id is told. KV namespaces have CNS 05 and 08. SPDK's host asks this of all
        # ids in the list of CNS 02 and takes a refusal (Invalid I/O Command Set) for a broken controller.
        return bytes(wire.IDENTIFY_BYTES)
    blocks = namespace.block_count
    return wire.IdentifyNamespace(
        nsze=blocks,
        ncap=blocks,
        nuse=namespace.storage.used_blocks(),
        nsfeat=_NSFEAT_THIN | _NSFEAT_PREFERRED_SIZES,
        nmic=_NMIC_SHARED,
        dlfeat=_DLFEAT_ZEROS | _DLFEAT_WRITE_ZEROES,
        npwg=_SENSIBLE_WRITE_BLOCKS - 1,
        npwa=_SENSIBLE_WRITE_BLOCKS - 1,
        anagrpid=_ana_group(controller),
        nguid=namespace.nguid,
        formats=(wire.LbaFormat(namespace.lba_bytes.bit_length() - 1),),
    ).encode()


def _active_namespaces(controller: Controller, sqe: Sqe) -> bytes:
    if sqe.nsid >= 0xFFFF_FFFE:
        raise Refusal(Status.INVALID_NAMESPACE)
    return wire.encode_namespace_list(each.nsid for each in controller.namespaces if each.nsid > sqe.nsid)


def _descriptors(controller: Controller, sqe: Sqe) -> bytes:
    namespace = _namespace_of(controller, sqe.nsid)
    if namespace is None:
        raise Refusal(Status.INVALID_NAMESPACE)
    return wire.NamespaceDescriptors(
        nguid=namespace.nguid, uuid=namespace.uuid, command_set=_command_set(namespace)
    ).encode()


def _command_set(namespace: AnyNamespace) -> wire.CommandSet:
    return wire.CommandSet.KEY_VALUE if isinstance(namespace, KvNamespace) else wire.CommandSet.NVM


def _asked_command_set(sqe: Sqe) -> wire.CommandSet:
    """The CSI of an Identify that is about one command set. Raises Refusal for one that we have not."""
    csi = sqe.cdw11 >> 24
    if csi not in (wire.CommandSet.NVM, wire.CommandSet.KEY_VALUE):
        raise Refusal(Status.INVALID_FIELD)
    return wire.CommandSet(csi)


def _set_namespace(controller: Controller, sqe: Sqe) -> bytes:
    asked = _asked_command_set(sqe)
    namespace = _namespace_of(controller, sqe.nsid)
    if namespace is None:
        return bytes(wire.IDENTIFY_BYTES)
    if _command_set(namespace) is not asked:
        raise Refusal(Status.INVALID_IO_COMMAND_SET)
    if not isinstance(namespace, KvNamespace):
        return bytes(wire.IDENTIFY_BYTES)  # NVM: no extended protection information
    storage = namespace.storage
    return IdentifyKvNamespace(
        nsze=storage.capacity_bytes,
        nuse=storage.used_bytes(),
        nsfeat=_NSFEAT_THIN,
        nmic=_NMIC_SHARED,
        anagrpid=_ana_group(controller),
        nguid=namespace.nguid,
        formats=(storage.format,),
    ).encode()


def _set_controller(controller: Controller, sqe: Sqe) -> bytes:
    if _asked_command_set(sqe) is wire.CommandSet.KEY_VALUE:
        return bytes(wire.IDENTIFY_BYTES)  # The KV command set has nothing to say of a controller.
    return wire.encode_nvm_controller(dataset_ranges=255)


def _set_active_namespaces(controller: Controller, sqe: Sqe) -> bytes:
    asked = _asked_command_set(sqe)
    if sqe.nsid >= 0xFFFF_FFFE:
        raise Refusal(Status.INVALID_NAMESPACE)
    of_the_set = (each for each in controller.namespaces if _command_set(each) is asked)
    return wire.encode_namespace_list(each.nsid for each in of_the_set if each.nsid > sqe.nsid)


def _independent(controller: Controller, sqe: Sqe) -> bytes:
    if _namespace_of(controller, sqe.nsid) is None:
        return bytes(wire.IDENTIFY_BYTES)
    return wire.encode_independent_namespace(_NMIC_SHARED, _ana_group(controller))


def _command_sets(controller: Controller, sqe: Sqe) -> bytes:
    return wire.encode_command_sets(1 << wire.CommandSet.NVM | 1 << wire.CommandSet.KEY_VALUE)


_Builder = Callable[[Controller, Sqe], bytes]

_DISCOVERY: Final[dict[int, _Builder]] = {wire.IdentifyCns.CONTROLLER: _controller}

_BUILDERS: Final[dict[int, _Builder]] = {
    wire.IdentifyCns.NAMESPACE: _namespace,
    wire.IdentifyCns.CONTROLLER: _controller,
    wire.IdentifyCns.ACTIVE_NAMESPACES: _active_namespaces,
    wire.IdentifyCns.NAMESPACE_DESCRIPTORS: _descriptors,
    wire.IdentifyCns.COMMAND_SET_NAMESPACE: _set_namespace,
    wire.IdentifyCns.COMMAND_SET_CONTROLLER: _set_controller,
    wire.IdentifyCns.COMMAND_SET_ACTIVE_NAMESPACES: _set_active_namespaces,
    wire.IdentifyCns.INDEPENDENT_NAMESPACE: _independent,
    wire.IdentifyCns.COMMAND_SETS: _command_sets,
}
