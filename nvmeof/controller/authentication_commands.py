"""Authentication Send and Receive as a controller carries them out (NVMe-oF 1.1, 3.1 and 3.2).

The exchange itself is `nvmeof/authentication/controller_side.py`; here are its commands, what is refused as
long as a queue has not authenticated, and the count of how it went. Unlike other Fabrics commands they are
executed without `Target.lock`: a Diffie-Hellman exchange takes milliseconds, and other hosts go on.
"""

from __future__ import annotations

from nvmeof.authentication.controller_side import LEAST_ROOM, ControllerAuthentication
from nvmeof.controller.controller import Controller
from nvmeof.controller.request import Direction, Outcome, Refusal, Request
from nvmeof.controller.served_queue import ServedQueue
from nvmeof.controller.target import Target
from nvmeof.wire.authentication import MAX_MESSAGE_BYTES, PROTOCOL_SPECIFIC, SECURITY_PROTOCOL
from nvmeof.wire.fabrics import FabricsType, decode_authentication
from nvmeof.wire.sqe import AdminOpcode, Sqe
from nvmeof.wire.status import FabricsStatus, Status


def is_authentication(sqe: Sqe) -> bool:
    return sqe.opcode == AdminOpcode.FABRICS and sqe.fctype in (
        FabricsType.AUTHENTICATION_SEND,
        FabricsType.AUTHENTICATION_RECEIVE,
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
    fields = decode_authentication(request.sqe)
    if (fields.secp, fields.spsp0, fields.spsp1) != (
        SECURITY_PROTOCOL,
        PROTOCOL_SPECIFIC,
        PROTOCOL_SPECIFIC,
    ):
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
    if request.sqe.fctype == FabricsType.AUTHENTICATION_SEND:
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


def not_proven() -> Refusal:
    """What a command other than these gets on a queue that has yet to authenticate."""
    return Refusal(FabricsStatus.AUTHENTICATION_REQUIRED)
