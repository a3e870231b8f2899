"""Fabrics commands as a controller carries them out: Connect, Property Get and Set, Disconnect.

NVMe-oF 1.1, chapter 3. Connect is where a host is let in or turned away, so every reason has the status and
the parameter pointer that the specification gives it. Called with `Target.lock` held.
"""

from __future__ import annotations

from typing import Final, NoReturn

from nvmeof.controller.authentication_commands import (
    begin_authentication,
    is_authentication,
    require_authentication,
)
from nvmeof.controller.controller import Controller
from nvmeof.controller.request import Direction, Outcome, Refusal, Request
from nvmeof.controller.served_queue import ServedQueue
from nvmeof.controller.target import Target
from nvmeof.errors import MalformedPdu
from nvmeof.wire.fabrics import (
    CATTR_NO_FLOW_CONTROL,
    CONNECT_DATA,
    DYNAMIC_CONTROLLER,
    RESULT_AUTH_REQUIRED,
    Connect,
    ConnectData,
    FabricsType,
    decode_connect,
    decode_connect_data_untrusted,
    decode_disconnect,
    decode_property_access,
)
from nvmeof.wire.properties import Property
from nvmeof.wire.status import FabricsStatus, Status

# Where in the command (SQE) or in the data the wrong parameter is, for the result of a refused Connect.
_IN_DATA: Final = 1 << 16
_AT_QID: Final = 42
_AT_SQSIZE: Final = 44
_AT_CNTLID: Final = _IN_DATA | 16
_AT_SUBNQN: Final = _IN_DATA | 256
_AT_HOSTNQN: Final = _IN_DATA | 512


def begin_fabrics(request: Request, queue: ServedQueue, *, connected: bool) -> None:
    """Set direction, length and window. Raises Refusal."""
    fctype = request.sqe.fctype
    if fctype == FabricsType.CONNECT:
        # Also a second one, which is refused when its data have come.
        request.direction, request.length = Direction.FROM_HOST, CONNECT_DATA.size
        request.window = memoryview(bytearray(CONNECT_DATA.size))
    elif not connected:
        raise Refusal(Status.COMMAND_SEQUENCE_ERROR)
    elif is_authentication(request.sqe):
        begin_authentication(request, queue)
    elif fctype not in (FabricsType.PROPERTY_GET, FabricsType.PROPERTY_SET, FabricsType.DISCONNECT):
        raise Refusal(Status.INVALID_OPCODE)


def execute_fabrics(request: Request, controller: Controller, queue: ServedQueue) -> Outcome:
    """Carry a command out that comes after Connect. Raises Refusal."""
    match request.sqe.fctype:
        case FabricsType.CONNECT:
            raise Refusal(Status.COMMAND_SEQUENCE_ERROR)
        case FabricsType.PROPERTY_GET:
            request.result = _property_get(request, controller, queue)
        case FabricsType.PROPERTY_SET:
            _property_set(request, controller, queue)
        case FabricsType.DISCONNECT:
            _disconnect(request, queue)
        case _:
            raise Refusal(Status.INVALID_OPCODE)
    return Outcome.DONE


# --- Connect --------------------------------------------------------------------------------------------


def _invalid(where: int) -> NoReturn:
    raise Refusal(FabricsStatus.CONNECT_INVALID_PARAMETERS, result=where)


def connect(request: Request, target: Target, queue: ServedQueue, now: float) -> Controller:
    """The controller that the queue is attached to, a new one for queue 0. Raises Refusal.

    The result of the command is the controller's id and AUTHREQ.
    """
    assert request.window is not None
    fields = decode_connect(request.sqe)
    if fields.recfmt != 0:
        raise Refusal(FabricsStatus.CONNECT_INCOMPATIBLE_FORMAT)
    try:
        data = decode_connect_data_untrusted(request.window)
    except MalformedPdu:
        _invalid(_AT_SUBNQN)
    if not 1 <= fields.sqsize < queue.settings.max_queue_entries:
        _invalid(_AT_SQSIZE)
    if not data.host_nqn:
        _invalid(_AT_HOSTNQN)
    if fields.qid == 0:
        controller = _connect_admin(fields, data, target, queue, now)
    else:
        controller = _connect_io(fields, data, target, queue)
    no_flow_control = fields.cattr & CATTR_NO_FLOW_CONTROL != 0
    queue.attach(fields.qid, fields.sqsize + 1, no_flow_control=no_flow_control)
    request.result = controller.cntlid
    is_proven = data.host_nqn not in controller.subsystem.credentials
    if is_proven or fields.qid == 0:
        # The id of an I/O queue is not a stranger's to keep from the host: it is had with the proof.
        controller.queues[fields.qid] = queue
    if not is_proven:
        require_authentication(controller, queue, now)
        request.result |= RESULT_AUTH_REQUIRED
    elif not controller.subsystem.is_discovery:
        target.guests.leave(queue)
    return controller


def _connect_admin(
    fields: Connect, data: ConnectData, target: Target, queue: ServedQueue, now: float
) -> Controller:
    subsystem = target.find_subsystem(data.subsystem_nqn)
    if subsystem is None:
        _invalid(_AT_SUBNQN)
    if not subsystem.allows(data.host_nqn):
        raise Refusal(FabricsStatus.CONNECT_INVALID_HOST)
    if data.cntlid != DYNAMIC_CONTROLLER:
        _invalid(_AT_CNTLID)
    if data.host_nqn in subsystem.credentials and not target.unproven.admit(queue, now):
        # A stranger may open as many as he likes and never prove himself.
        target.authentications.turned_away += 1
        raise Refusal(FabricsStatus.CONNECT_CONTROLLER_BUSY, do_not_retry=False)

    def make(cntlid: int) -> Controller:
        return Controller(
            cntlid,
            subsystem,
            host_nqn=data.host_nqn,
            host_id=data.host_id,
            keep_alive_ms=fields.kato,
            settings=queue.settings,
            transport=queue.transport,
            now=now,
            port_id=queue.port_id,
        )

    controller = target.register(make)
    if controller is None:
        target.unproven.leave(queue)
        raise Refusal(FabricsStatus.CONNECT_CONTROLLER_BUSY, do_not_retry=False)
    return controller


def _connect_io(fields: Connect, data: ConnectData, target: Target, queue: ServedQueue) -> Controller:
    subsystem = target.find_subsystem(data.subsystem_nqn)
    if subsystem is None or subsystem.is_discovery:
        _invalid(_AT_SUBNQN)
    controller = target.find_controller(data.cntlid)
    if controller is None or controller.subsystem is not subsystem or controller.ended is not None:
        _invalid(_AT_CNTLID)
    if controller.port_id != queue.port_id:  # a controller is of one port
        _invalid(_AT_CNTLID)
    if controller.host_nqn != data.host_nqn or controller.host_id != data.host_id:
        raise Refusal(FabricsStatus.CONNECT_INVALID_HOST)
    if not controller.enabled:
        raise Refusal(Status.COMMAND_SEQUENCE_ERROR)
    if fields.qid > controller.granted_io_queues:
        _invalid(_AT_QID)
    if fields.qid in controller.queues:
        raise Refusal(Status.COMMAND_SEQUENCE_ERROR)
    return controller


# --- properties and Disconnect ---------------------------------------------------------------------------


def _property_get(request: Request, controller: Controller, queue: ServedQueue) -> int:
    if queue.qid != 0:
        raise Refusal(Status.INVALID_OPCODE)
    access = decode_property_access(request.sqe)
    match access.offset, access.size:
        case Property.CAP, 8:
            return controller.capabilities
        case Property.VS, 4:
            return controller.version
        case Property.CC, 4:
            return controller.configuration
        case Property.CSTS, 4:
            return controller.status
        case _:
            raise Refusal(Status.INVALID_FIELD)


def _property_set(request: Request, controller: Controller, queue: ServedQueue) -> None:
    if queue.qid != 0:
        raise Refusal(Status.INVALID_OPCODE)
    access = decode_property_access(request.sqe)
    if access.offset != Property.CC or access.size != 4 or access.value is None:
        raise Refusal(Status.INVALID_FIELD)
    controller.configure(access.value)


def _disconnect(request: Request, queue: ServedQueue) -> None:
    """End an I/O queue; the transport closes the connection once the answer is out."""
    if decode_disconnect(request.sqe).recfmt != 0:
        raise Refusal(FabricsStatus.CONNECT_INCOMPATIBLE_FORMAT)
    if queue.qid == 0:
        raise Refusal(FabricsStatus.DISCONNECT_INVALID_QUEUE_TYPE)
    queue.close_when_answered()
