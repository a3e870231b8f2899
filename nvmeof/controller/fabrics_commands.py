"""Fabrics commands as a controller carries them out (NVMe-oF 1.1, chapter 3).

Connect lets a host in or turns it away: every reason has the status and the parameter pointer that the
specification gives it. All are called with `Target.lock` held, but Authentication Send and Receive
(`nvmeof/authentication/controller_side.py` has the exchange): a Diffie-Hellman exchange takes milliseconds,
and other hosts go on meanwhile.
"""

from typing import NoReturn

from nvmeof.authentication.controller_side import LEAST_ROOM, ControllerAuthentication
from nvmeof.controller.controller import Controller
from nvmeof.controller.request import Direction, Outcome, Refusal, Request
from nvmeof.controller.served_queue import ServedQueue
from nvmeof.controller.target import Target
from nvmeof.errors import MalformedPdu
from nvmeof.wire import fabrics
from nvmeof.wire.authentication import MAX_MESSAGE_BYTES, PROTOCOL_SPECIFIC, SECURITY_PROTOCOL
from nvmeof.wire.properties import Property
from nvmeof.wire.sqe import AdminOpcode, Sqe
from nvmeof.wire.status import FabricsStatus, Status


def begin_fabrics(request: Request, queue: ServedQueue, *, connected: bool) -> None:
    """Set direction, length and window. Raises Refusal."""
    fctype = request.sqe.fctype
    if fctype == fabrics.FabricsType.CONNECT:
        # Also a second one, which is refused when its data have come.
        request.direction, request.length = Direction.FROM_HOST, fabrics.CONNECT_DATA_BYTES
        request.window = memoryview(bytearray(fabrics.CONNECT_DATA_BYTES))
    elif not connected:
        raise Refusal(Status.COMMAND_SEQUENCE_ERROR)
    elif is_authentication(request.sqe):
        begin_authentication(request, queue)
    elif fctype not in (
        fabrics.FabricsType.PROPERTY_GET,
        fabrics.FabricsType.PROPERTY_SET,
        fabrics.FabricsType.DISCONNECT,
    ):
        raise Refusal(Status.INVALID_OPCODE)


def execute_fabrics(request: Request, controller: Controller, queue: ServedQueue) -> Outcome:
    """Carry a command out that comes after Connect. Raises Refusal."""
    match request.sqe.fctype:
        case fabrics.FabricsType.CONNECT:
            raise Refusal(Status.COMMAND_SEQUENCE_ERROR)
        case fabrics.FabricsType.PROPERTY_GET:
            request.result = _property_get(request, controller, queue)
        case fabrics.FabricsType.PROPERTY_SET:
            _property_set(request, controller, queue)
        case fabrics.FabricsType.DISCONNECT:
            _disconnect(request, queue)
        case _:
            raise Refusal(Status.INVALID_OPCODE)
    return Outcome.DONE


def _invalid(where: fabrics.ConnectParameter) -> NoReturn:
    raise Refusal(FabricsStatus.CONNECT_INVALID_PARAMETERS, result=int(where))


def connect(request: Request, target: Target, queue: ServedQueue, now: float) -> Controller:
    """The controller that the queue is attached to, a new one for queue 0. Raises Refusal.

    The result of the command is the controller's id and AUTHREQ.
    """
    assert request.window is not None
    fields = fabrics.Connect.of(request.sqe)
    if fields.recfmt != 0:
        raise Refusal(FabricsStatus.CONNECT_INCOMPATIBLE_FORMAT)
    try:
        data = fabrics.decode_connect_data_untrusted(request.window)
    except MalformedPdu:
        _invalid(fabrics.ConnectParameter.SUBNQN)
    if not 1 <= fields.sqsize < queue.settings.max_queue_entries:
        _invalid(fabrics.ConnectParameter.SQSIZE)
    if not data.host_nqn:
        _invalid(fabrics.ConnectParameter.HOSTNQN)
    if fields.qid == 0:
        controller = _connect_admin(fields, data, target, queue, now)
    else:
        controller = _connect_io(fields, data, target, queue)
    no_flow_control = fields.cattr & fabrics.CATTR_NO_FLOW_CONTROL != 0
    queue.attach(fields.qid, fields.sqsize + 1, no_flow_control=no_flow_control)
    request.result = controller.cntlid
    is_proven = data.host_nqn not in controller.subsystem.credentials
    if is_proven or fields.qid == 0:
        # The id of an I/O queue is not a stranger's to keep from the host: it is had with the proof.
        controller.queues[fields.qid] = queue
    if not is_proven:
        require_authentication(controller, queue, now)
        request.result |= fabrics.RESULT_AUTH_REQUIRED
    elif not controller.subsystem.is_discovery:
        target.guests.leave(queue)
    return controller


def _connect_admin(
    fields: fabrics.Connect, data: fabrics.ConnectData, target: Target, queue: ServedQueue, now: float
) -> Controller:
    subsystem = target.find_subsystem(data.subsystem_nqn)
    if subsystem is None:
        _invalid(fabrics.ConnectParameter.SUBNQN)
    if not subsystem.allows(data.host_nqn):
        raise Refusal(FabricsStatus.CONNECT_INVALID_HOST)
    if data.cntlid != fabrics.DYNAMIC_CONTROLLER:
        _invalid(fabrics.ConnectParameter.CNTLID)
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


def _connect_io(
    fields: fabrics.Connect, data: fabrics.ConnectData, target: Target, queue: ServedQueue
) -> Controller:
    subsystem = target.find_subsystem(data.subsystem_nqn)
    if subsystem is None or subsystem.is_discovery:
        _invalid(fabrics.ConnectParameter.SUBNQN)
    controller = target.find_controller(data.cntlid)
    if controller is None or controller.subsystem is not subsystem or controller.ended is not None:
        _invalid(fabrics.ConnectParameter.CNTLID)
    if controller.port_id != queue.port_id:  # a controller is of one port
        _invalid(fabrics.ConnectParameter.CNTLID)
    if controller.host_nqn != data.host_nqn or controller.host_id != data.host_id:
        raise Refusal(FabricsStatus.CONNECT_INVALID_HOST)
    if not controller.enabled:
        raise Refusal(Status.COMMAND_SEQUENCE_ERROR)
    if fields.qid > controller.granted_io_queues:
        _invalid(fabrics.ConnectParameter.QID)
    if fields.qid in controller.queues:
        raise Refusal(Status.COMMAND_SEQUENCE_ERROR)
    return controller


def _property_get(request: Request, controller: Controller, queue: ServedQueue) -> int:
    if queue.qid != 0:
        raise Refusal(Status.INVALID_OPCODE)
    access = fabrics.decode_property_access(request.sqe)
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
    access = fabrics.decode_property_access(request.sqe)
    if access.offset != Property.CC or access.size != 4 or access.value is None:
        raise Refusal(Status.INVALID_FIELD)
    controller.configure(access.value)


def _disconnect(request: Request, queue: ServedQueue) -> None:
    """End an I/O queue; the transport closes the connection once the answer is out. CDW10 15:0 is RECFMT."""
    if request.sqe.cdw10 & 0xFFFF:
        raise Refusal(FabricsStatus.CONNECT_INCOMPATIBLE_FORMAT)
    if queue.qid == 0:
        raise Refusal(FabricsStatus.DISCONNECT_INVALID_QUEUE_TYPE)
    queue.close_when_answered()


def is_authentication(sqe: Sqe) -> bool:
    return sqe.opcode == AdminOpcode.FABRICS and sqe.fctype in (
        fabrics.FabricsType.AUTHENTICATION_SEND,
        fabrics.FabricsType.AUTHENTICATION_RECEIVE,
    )


def require_authentication(controller: Controller, queue: ServedQueue, now: float) -> None:
    """Connect succeeded, and the host has a secret here: the queue serves nothing else until it is proven.

    Called with `Target.lock` held.
    """
    queue.authentication = ControllerAuthentication(controller.host_nqn, controller.subsystem.nqn, now)
    queue.unproven = True


def begin_authentication(request: Request, queue: ServedQueue) -> None:
    """Set direction, length and window. Raises Refusal."""
    if queue.authentication is None:
        raise Refusal(Status.INVALID_OPCODE)
    fields = fabrics.decode_authentication(request.sqe)
    protocol = SECURITY_PROTOCOL, PROTOCOL_SPECIFIC, PROTOCOL_SPECIFIC
    if (fields.secp, fields.spsp0, fields.spsp1) != protocol:
        raise Refusal(Status.INVALID_FIELD)
    least = LEAST_ROOM if fields.receive else 1
    if not least <= fields.length <= MAX_MESSAGE_BYTES:
        raise Refusal(Status.INVALID_FIELD)
    request.length = fields.length
    if fields.receive:
        request.direction = Direction.TO_HOST
    else:
        request.direction = Direction.FROM_HOST
        request.window = memoryview(bytearray(fields.length))


def execute_authentication(
    request: Request, target: Target, controller: Controller, queue: ServedQueue, now: float
) -> Outcome:
    """One step of the exchange; a queue that failed ends with the answer. Raises Refusal."""
    authentication = queue.authentication
    if authentication is None:
        raise Refusal(Status.INVALID_OPCODE)
    successes = authentication.successes
    if request.sqe.fctype == fabrics.FabricsType.AUTHENTICATION_SEND:
        assert request.window is not None
        credentials = controller.subsystem.credentials.get(controller.host_nqn)
        authentication.receive(request.window, credentials, now)
    else:
        message = authentication.give(request.length)
        if controller.settings.pads_authentication:
            message = message.ljust(request.length, b"\0")
        request.data = memoryview(message)
    if authentication.over:
        give_up(target, controller, queue, now)
        queue.close_when_answered("authentication failed")
    elif authentication.successes != successes:
        with target.lock:
            target.unproven.leave(queue)
            target.guests.leave(queue)
            target.authentications.succeeded += 1
            if not controller.admits(queue):
                queue.close_when_answered("its controller or its queue id is not to be had any more")
        queue.unproven = False
    return Outcome.DONE


def give_up(target: Target, controller: Controller, queue: ServedQueue, now: float) -> None:
    """Authentication failed: nothing is served any more, and it is counted."""
    authentication = queue.authentication
    assert authentication is not None
    queue.unproven = True
    who = f"{controller.host_nqn} on queue {queue.qid} of {controller.subsystem.nqn}"
    with target.lock:
        target.unproven.leave(queue)
        target.authentications.fail(who, authentication.failure or "", now)
