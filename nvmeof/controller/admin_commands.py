"""Admin commands other than Fabrics ones: Identify, Get Log Page, features, events, Abort, Keep Alive.

`begin_admin` says how many bytes move, `execute_admin` answers. Both run with `Target.lock` held; none of
this is on the data path. Fabrics commands are in `fabrics_commands.py`.
"""

from typing import Final

from nvmeof.controller.controller import ADMIN_OPCODES, Controller
from nvmeof.controller.identify_data import identify
from nvmeof.controller.log_data import log_page
from nvmeof.controller.request import Direction, Outcome, Refusal, Request
from nvmeof.controller.served_queue import ServedQueue
from nvmeof.controller.target import Target
from nvmeof.wire.features import (
    AEC_ANA_CHANGED,
    AEC_DISCOVERY_CHANGED,
    AEC_NAMESPACE_CHANGED,
    FEATURE_SAVE,
    Feature,
    decode_queue_count,
    encode_queue_count,
)
from nvmeof.wire.identify import IDENTIFY_BYTES
from nvmeof.wire.log_page import LogPageRequest
from nvmeof.wire.sqe import AdminOpcode
from nvmeof.wire.status import Status

_HOST_ID_EXTENDED: Final = 1  # command dword 11 bit 0 of Get Features, Host Identifier
_HOST_ID_BYTES: Final = 16
_ABORTED: Final = 0
_NOT_ABORTED: Final = 1  # result of Abort

_DISCOVERY_FEATURES: Final = frozenset({Feature.ASYNC_EVENT_CONFIG, Feature.KEEP_ALIVE_TIMER})


def begin_admin(request: Request, controller: Controller) -> None:
    """Set direction and length. Raises Refusal for what cannot be."""
    sqe = request.sqe
    if sqe.opcode not in ADMIN_OPCODES:
        raise Refusal(Status.INVALID_OPCODE)
    if not controller.enabled and sqe.opcode != AdminOpcode.KEEP_ALIVE:
        raise Refusal(Status.COMMAND_SEQUENCE_ERROR)
    match sqe.opcode:
        case AdminOpcode.IDENTIFY:
            request.direction, request.length = Direction.TO_HOST, IDENTIFY_BYTES
        case AdminOpcode.GET_LOG_PAGE:
            length = LogPageRequest.of(sqe).length
            if length > controller.settings.max_transfer_bytes:
                raise Refusal(Status.INVALID_FIELD)
            request.direction, request.length = Direction.TO_HOST, length
        case AdminOpcode.GET_FEATURES if sqe.cdw10 & 0xFF == Feature.HOST_ID:
            request.direction, request.length = Direction.TO_HOST, _HOST_ID_BYTES
        case _:
            pass


def execute_admin(request: Request, target: Target, controller: Controller, admin: ServedQueue) -> Outcome:
    """Answer the command, which came by the queue `admin`. Raises Refusal."""
    sqe = request.sqe
    match sqe.opcode:
        case AdminOpcode.IDENTIFY:
            request.data = memoryview(identify(controller, sqe))
        case AdminOpcode.GET_LOG_PAGE:
            request.data = memoryview(log_page(target, controller, LogPageRequest.of(sqe)))
        case AdminOpcode.SET_FEATURES:
            request.result = _set_feature(controller, sqe.cdw10, sqe.cdw11)
        case AdminOpcode.GET_FEATURES:
            _get_feature(request, controller)
        case AdminOpcode.ASYNC_EVENT_REQUEST:
            if not controller.request_event(sqe.cid):
                raise Refusal(Status.AER_LIMIT_EXCEEDED)
            return Outcome.PARKED
        case AdminOpcode.ABORT:
            request.result = _abort(controller, admin, sqid=sqe.cdw10 & 0xFFFF, cid=sqe.cdw10 >> 16)
        case AdminOpcode.KEEP_ALIVE:
            pass  # That it came is all there is to it; the session has noted the time.
        case _:  # begin_admin has let nothing else through
            raise Refusal(Status.INVALID_OPCODE)
    return Outcome.DONE


def _abort(controller: Controller, admin: ServedQueue, *, sqid: int, cid: int) -> int:
    """0 if the command was stopped before its end, 1 if it was not: it has ended, or is ending."""
    if sqid == 0 and controller.abort_event_request(cid):
        admin.complete_aborted(cid)
        return _ABORTED
    queue = controller.queues.get(sqid)
    if queue is not None and queue.abort(cid):
        return _ABORTED
    return _NOT_ABORTED


def _set_feature(controller: Controller, cdw10: int, value: int) -> int:
    feature = cdw10 & 0xFF
    if cdw10 & FEATURE_SAVE:
        raise Refusal(Status.FEATURE_NOT_SAVEABLE)
    if controller.subsystem.is_discovery and feature not in _DISCOVERY_FEATURES:
        raise Refusal(Status.INVALID_FIELD)
    match feature:
        case Feature.QUEUE_COUNT:
            wanted = decode_queue_count(value)
            if max(wanted) > 0xFFFF:
                raise Refusal(Status.INVALID_FIELD)
            # Fabrics queues come in pairs, so both counts are the smaller one.
            granted = min(*wanted, controller.settings.max_io_queues)
            controller.granted_io_queues = granted
            return encode_queue_count(granted, granted)
        case Feature.KEEP_ALIVE_TIMER:
            controller.set_keep_alive(value)
        case Feature.ASYNC_EVENT_CONFIG:
            known = AEC_NAMESPACE_CHANGED | AEC_ANA_CHANGED | AEC_DISCOVERY_CHANGED | 0xFF
            controller.features[feature] = value & known
        case Feature.VOLATILE_WRITE_CACHE:
            raise Refusal(Status.FEATURE_NOT_CHANGEABLE)
        case Feature.POWER_MANAGEMENT if value & 0x1F:
            raise Refusal(Status.INVALID_FIELD)  # there is one power state, 0
        case Feature.COMMAND_SET_PROFILE if value & 0x1FF:
            raise Refusal(Status.IO_COMMAND_SET_COMBINATION_REJECTED)  # CNS 1C lists one combination
        case Feature.HOST_ID:
            # Over Fabrics the host id is said in Connect and nowhere else.
            raise Refusal(Status.COMMAND_SEQUENCE_ERROR)
        case _ if feature in controller.features:
            controller.features[feature] = value
        case _:
            raise Refusal(Status.INVALID_FIELD)
    return 0


def _get_feature(request: Request, controller: Controller) -> None:
    feature, select = request.sqe.cdw10 & 0xFF, request.sqe.cdw10 >> 8 & 7
    if select != 0:
        raise Refusal(Status.INVALID_FIELD)  # only the current value; ONCS says that we have no others
    if controller.subsystem.is_discovery and feature not in _DISCOVERY_FEATURES:
        raise Refusal(Status.INVALID_FIELD)
    match feature:
        case Feature.QUEUE_COUNT:
            request.result = encode_queue_count(controller.granted_io_queues, controller.granted_io_queues)
        case Feature.KEEP_ALIVE_TIMER:
            request.result = controller.keep_alive_ms
        case Feature.VOLATILE_WRITE_CACHE:
            request.result = 1
        case Feature.HOST_ID:
            if not request.sqe.cdw11 & _HOST_ID_EXTENDED:
                raise Refusal(Status.INVALID_FIELD)
            request.data = memoryview(controller.host_id)
        case _ if feature in controller.features:
            request.result = controller.features[feature]
        case _:
            raise Refusal(Status.INVALID_FIELD)
