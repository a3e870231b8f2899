"""Fabrics commands as a controller carries them out: Connect, Property Get and Set, Disconnect.

NVMe-oF 1.1, chapter 3. Connect is where a host is let in or turned away, so every reason has the status and
the parameter pointer that the specification gives it. Called with `Target.lock` held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from nvmeof.controller.authentication_commands import (
    begin_authentication,
    is_authentication,
    require_authentication,
)
from nvmeof.controller.controller import Controller
from nvmeof.controller.request import Direction, Outcome, Refusal, Request
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

if TYPE_CHECKING:
    from nvmeof.controller.session import QueueSession
    from nvmeof.controller.subsystem import Target

# Where in the command (SQE) or in the data the wrong parameter is, for the result of a refused Connect.
_IN_DATA: Final = 1 << 16
_AT_QID: Final = 42
_AT_SQSIZE: Final = 44
_AT_CNTLID: Final = _IN_DATA | 16
_AT_SUBNQN: Final = _IN_DATA | 256
_AT_HOSTNQN: Final = _IN_DATA | 512

SQHD_DISABLED: Final = 0xFFFF
"""SQHD of the answer to a Connect that asked for no flow control, and was granted it."""


def begin_fabrics(request: Request, session: QueueSession) -> None:
    """Set direction, length and window. Raises Refusal."""
    fctype = request.sqe.fctype
    if session.controller is None:
        if fctype != FabricsType.CONNECT:
            raise Refusal(Status.COMMAND_SEQUENCE_ERROR)
        request.direction, request.length = Direction.FROM_HOST, CONNECT_DATA.size
        request.window = memoryview(bytearray(CONNECT_DATA.size))
    elif fctype == FabricsType.CONNECT:
        # Once per connection. Its data still come, and are read and ignored.
        request.direction, request.length = Direction.FROM_HOST, CONNECT_DATA.size
        request.window = memoryview(bytearray(CONNECT_DATA.size))
    elif is_authentication(request.sqe):
        begin_authentication(request, session)
    elif fctype not in (FabricsType.PROPERTY_GET, FabricsType.PROPERTY_SET, FabricsType.DISCONNECT):
        raise Refusal(Status.INVALID_OPCODE)


def execute_fabrics(request: Request, target: Target, session: QueueSession, now: float) -> Outcome:
    """Carry the command out. Raises Refusal."""
    match request.sqe.fctype:
        case FabricsType.CONNECT:
            request.result = _connect(request, target, session, now)
        case FabricsType.PROPERTY_GET:
            request.result = _property_get(request, session)
        case FabricsType.PROPERTY_SET:
            _property_set(request, session)
        case FabricsType.DISCONNECT:
            _disconnect(request, session)
        case _:
            raise Refusal(Status.INVALID_OPCODE)
    return Outcome.DONE


# --- Connect --------------------------------------------------------------------------------------------


def _invalid(where: int) -> NoReturn:
    raise Refusal(FabricsStatus.CONNECT_INVALID_PARAMETERS, result=where)


def _connect(request: Request, target: Target, session: QueueSession, now: float) -> int:
    """Attach the session to a controller, a new one for queue 0; the controller's id and AUTHREQ."""
    if session.controller is not None:
        raise Refusal(Status.COMMAND_SEQUENCE_ERROR)
    assert request.window is not None
    connect = decode_connect(request.sqe)
    if connect.recfmt != 0:
        raise Refusal(FabricsStatus.CONNECT_INCOMPATIBLE_FORMAT)
    try:
        data = decode_connect_data_untrusted(request.window)
    except MalformedPdu:
        _invalid(_AT_SUBNQN)
    if not 1 <= connect.sqsize < session.settings.max_queue_entries:
        _invalid(_AT_SQSIZE)
    if not data.host_nqn:
        _invalid(_AT_HOSTNQN)
    if connect.qid == 0:
        controller = _connect_admin(connect, data, session, now)
    else:
        controller = _connect_io(connect, data, session)
    no_flow_control = connect.cattr & CATTR_NO_FLOW_CONTROL != 0
    session.attach(controller, connect.qid, connect.sqsize + 1, no_flow_control=no_flow_control)
    is_proven = data.host_nqn not in controller.subsystem.credentials
    if is_proven or connect.qid == 0:
        # The id of an I/O queue is not a stranger's to keep from the host: it is had with the proof.
        controller.queues[connect.qid] = session
    if is_proven:
        if not controller.subsystem.is_discovery:
            session.target.guests.leave(session)
        return controller.cntlid
    require_authentication(session, now)
    return controller.cntlid | RESULT_AUTH_REQUIRED


def _connect_admin(connect: Connect, data: ConnectData, session: QueueSession, now: float) -> Controller:
    target = session.target
    subsystem = target.find_subsystem(data.subsystem_nqn)
    if subsystem is None:
        _invalid(_AT_SUBNQN)
    if not subsystem.allows(data.host_nqn):
        raise Refusal(FabricsStatus.CONNECT_INVALID_HOST)
    if data.cntlid != DYNAMIC_CONTROLLER:
        _invalid(_AT_CNTLID)
    if data.host_nqn in subsystem.credentials and not target.unproven.admit(session, now):
        # A stranger may open as many as he likes and never prove himself.
        target.authentications.turned_away += 1
        raise Refusal(FabricsStatus.CONNECT_CONTROLLER_BUSY, do_not_retry=False)

    def make(cntlid: int) -> Controller:
        return Controller(
            cntlid,
            subsystem,
            host_nqn=data.host_nqn,
            host_id=data.host_id,
            keep_alive_ms=connect.kato,
            settings=session.settings,
            transport=session.transport,
            now=now,
            port_id=session.port_id,
        )

    controller = target.register(make)
    if controller is None:
        target.unproven.leave(session)
        raise Refusal(FabricsStatus.CONNECT_CONTROLLER_BUSY, do_not_retry=False)
    return controller


def _connect_io(connect: Connect, data: ConnectData, session: QueueSession) -> Controller:
    target = session.target
    subsystem = target.find_subsystem(data.subsystem_nqn)
    if subsystem is None or subsystem.is_discovery:
        _invalid(_AT_SUBNQN)
    controller = target.find_controller(data.cntlid)
    if controller is None or controller.subsystem is not subsystem or controller.ended is not None:
        _invalid(_AT_CNTLID)
    if controller.port_id != session.port_id:  # a controller is of one port
        _invalid(_AT_CNTLID)
    if controller.host_nqn != data.host_nqn or controller.host_id != data.host_id:
        raise Refusal(FabricsStatus.CONNECT_INVALID_HOST)
    if not controller.enabled:
        raise Refusal(Status.COMMAND_SEQUENCE_ERROR)
    if connect.qid > controller.granted_io_queues:
        _invalid(_AT_QID)
    if connect.qid in controller.queues:
        raise Refusal(Status.COMMAND_SEQUENCE_ERROR)
    return controller


# --- properties and Disconnect ---------------------------------------------------------------------------


def _property_get(request: Request, session: QueueSession) -> int:
    if session.qid != 0:
        raise Refusal(Status.INVALID_OPCODE)
    controller = session.controller
    assert controller is not None
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


def _property_set(request: Request, session: QueueSession) -> None:
    if session.qid != 0:
        raise Refusal(Status.INVALID_OPCODE)
    controller = session.controller
    assert controller is not None
    access = decode_property_access(request.sqe)
    if access.offset != Property.CC or access.size != 4 or access.value is None:
        raise Refusal(Status.INVALID_FIELD)
    controller.configure(access.value)


def _disconnect(request: Request, session: QueueSession) -> None:
    """End an I/O queue; the transport closes the connection once the answer is out."""
    if decode_disconnect(request.sqe).recfmt != 0:
        raise Refusal(FabricsStatus.CONNECT_INCOMPATIBLE_FORMAT)
    if session.qid == 0:
        raise Refusal(FabricsStatus.DISCONNECT_INVALID_QUEUE_TYPE)
    session.close_when_answered()
