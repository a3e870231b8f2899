"""The controller's side of authentication on one queue, without I/O.

    proof = ControllerAuthentication(host_nqn, subsystem_nqn, now)
    proof.receive(message, credentials, now)       # for each Authentication Send
    data = proof.give(room)                        # for each Authentication Receive
    if proof.over: hang up                         # it failed, and the host has been told

Whatever the host does wrong is told to it with its next Authentication Receive, as AUTH_Failure1; nothing
raises. A host that was authenticated may do it again (Linux does, when it is given a new secret): commands
go on meanwhile, and a second attempt that fails ends the queue as the first would have.

Bounds: one exchange at a time, `AUTHENTICATION_S` for each, and one hash of a challenge with one key pair.
"""

import hmac
import math
from enum import Enum
from typing import Final

from nvmeof.authentication.groups import BadPublicValue, KeyPair
from nvmeof.authentication.responses import HASH_BYTES, Exchange, new_challenge
from nvmeof.authentication.secret import Credentials
from nvmeof.errors import MalformedPdu
from nvmeof.limits import AUTHENTICATION_S
from nvmeof.wire import authentication as wire

LEAST_ROOM: Final = wire.FAILURE.size
"""An Authentication Receive for less could not even be told that it failed."""


class ControllerState(Enum):
    """The next step."""

    IDLE = "the host negotiates"
    CHALLENGE_DUE = "the host receives the challenge"
    REPLY_DUE = "the host replies"
    VERDICT_DUE = "the host receives the verdict"
    CONFIRMATION_DUE = "the host confirms"
    FAILURE_DUE = "the host receives the failure"
    OVER = "nothing"


class ControllerAuthentication:
    """See the module's docstring. Used by the thread of its queue."""

    def __init__(self, host_nqn: str, subsystem_nqn: str, now: float) -> None:
        self.state = ControllerState.IDLE
        self.successes = 0
        """How often the host has proven itself on this queue."""
        self.failure: str | None = None
        """Why it failed, for a log line; None as long as it has not."""
        self.deadline = now + AUTHENTICATION_S
        """When the exchange has to be through; infinity while none is under way."""
        self._host_nqn = host_nqn
        self._subsystem_nqn = subsystem_nqn
        self._reason = wire.FailureReason.FAILED
        self._credentials: Credentials | None = None
        self._transaction = 0
        self._hash = wire.HashId.SHA256
        self._group = wire.GroupId.NULL
        self._challenge = b""
        self._sequence = 0
        self._pair: KeyPair | None = None
        self._response: bytes | None = None

    @property
    def over(self) -> bool:
        """It failed and the host knows: the queue ends."""
        return self.state is ControllerState.OVER

    def receive(
        self, data: bytes | bytearray | memoryview, credentials: Credentials | None, now: float
    ) -> None:
        """A message of the host. `credentials` are those of host and subsystem at this moment."""
        if self.state in (ControllerState.FAILURE_DUE, ControllerState.OVER):
            return  # It stays failed, whatever else is sent.
        self.deadline = min(self.deadline, now + AUTHENTICATION_S)
        try:
            message = wire.decode_host_message_untrusted(data)
        except MalformedPdu as error:
            self._transaction = wire.transaction_of(data)
            self._fail(wire.FailureReason.INCORRECT_PAYLOAD, str(error))
            return
        match self.state, message:
            case ControllerState.IDLE, wire.Negotiate():
                self._negotiate(message, credentials)
            case _, wire.Negotiate():
                self._transaction = message.transaction
                self._fail(wire.FailureReason.INCORRECT_MESSAGE, "AUTH_Negotiate amid an authentication")
            case _, _ if message.transaction != self._transaction:
                self._fail(wire.FailureReason.INCORRECT_PAYLOAD, "a message of another transaction")
            case ControllerState.CONFIRMATION_DUE, wire.Failure(reason=wire.FailureReason.FAILED):
                self._end("the host does not accept our proof: it has another secret for this subsystem")
            case _, wire.Failure(reason=reason):
                self._end(f"the host gives up: {wire.describe_reason(reason)}")
            case ControllerState.REPLY_DUE, wire.Reply():
                self._reply(message)
            case ControllerState.CONFIRMATION_DUE, wire.Success2():
                self._succeed()
            case _:
                self._fail(wire.FailureReason.INCORRECT_MESSAGE, f"{type(message).__name__} out of order")

    def _negotiate(self, message: wire.Negotiate, credentials: Credentials | None) -> None:
        self._transaction = message.transaction
        if message.concatenation:
            self._fail(wire.FailureReason.CONCATENATION_MISMATCH, "the host wants a secure channel on top")
            return
        ours = [each for each in message.protocols if each.authid == wire.AuthType.DHCHAP]
        if credentials is None or not ours:
            why = "the host has no secret here" if credentials is None else "the host cannot do DH-HMAC-CHAP"
            self._fail(wire.FailureReason.NOT_USABLE, why)
            return
        hashes = {number for each in ours for number in each.hashes}
        groups = {number for each in ours for number in each.groups}
        hash_id = next((each for each in credentials.hashes if each in hashes), None)
        group = next((each for each in credentials.groups if each in groups), None)
        if hash_id is None:
            self._fail(wire.FailureReason.HASH_UNUSABLE, "the host offers none of our hashes")
        elif group is None:
            self._fail(wire.FailureReason.GROUP_UNUSABLE, "the host offers none of our DH groups")
        else:
            self._credentials, self._hash, self._group = credentials, hash_id, group
            self.state = ControllerState.CHALLENGE_DUE

    def _reply(self, message: wire.Reply) -> None:
        credentials = self._credentials
        assert credentials is not None
        if len(message.response) != HASH_BYTES[self._hash]:
            self._fail(wire.FailureReason.INCORRECT_PAYLOAD, "a response of a wrong length")
            return
        shared = None
        if self._pair is not None:
            try:
                shared = self._pair.shared(message.dh_value)
            except BadPublicValue as error:
                self._fail(wire.FailureReason.INCORRECT_PAYLOAD, f"the host sent {error}")
                return
        elif message.dh_value:
            self._fail(wire.FailureReason.INCORRECT_PAYLOAD, "a DH value without a group")
            return
        exchange = Exchange(self._hash, self._transaction, self._host_nqn, self._subsystem_nqn, shared)
        expected = exchange.host_response(credentials.host_secret, self._challenge, self._sequence)
        if not hmac.compare_digest(message.response, expected):
            self._fail(wire.FailureReason.FAILED, "the host's response is wrong: it has another secret")
            return
        if message.challenge is not None:
            secret = credentials.controller_secret
            if secret is None:
                self._fail(
                    wire.FailureReason.FAILED, "the host asks for our secret, and there is none for it"
                )
                return
            if message.challenge == self._challenge or not message.sequence:
                self._fail(wire.FailureReason.INCORRECT_PAYLOAD, "the host's challenge is ours, or not one")
                return
            self._response = exchange.controller_response(secret, message.challenge, message.sequence)
        self.state = ControllerState.VERDICT_DUE

    def give(self, room: int) -> bytes:
        """The message that is due, in at most `room` bytes (at least `LEAST_ROOM`)."""
        match self.state:
            case ControllerState.CHALLENGE_DUE:
                message = self._make_challenge()
                following = ControllerState.REPLY_DUE
            case ControllerState.VERDICT_DUE:
                message = wire.Success1(self._transaction, HASH_BYTES[self._hash], self._response).encode()
                following = ControllerState.CONFIRMATION_DUE
            case _:
                self._fail(wire.FailureReason.INCORRECT_MESSAGE, "there is nothing to receive")
                message, following = b"", self.state
        if len(message) > room:
            self._fail(wire.FailureReason.INCORRECT_PAYLOAD, f"{room} bytes are too few to receive it")
        if self.state is ControllerState.FAILURE_DUE:
            self._end(self.failure or "")
        if self.state is ControllerState.OVER:
            return wire.Failure(self._transaction, self._reason, from_host=False).encode()
        self.state = following
        if following is ControllerState.CONFIRMATION_DUE and self._response is None:
            self._succeed()
        return message

    def _make_challenge(self) -> bytes:
        credentials = self._credentials
        assert credentials is not None
        self._challenge = new_challenge(self._hash)
        self._sequence = credentials.numbers.next_sequence()
        self._pair = None if self._group is wire.GroupId.NULL else KeyPair(self._group)
        value = b"" if self._pair is None else self._pair.public
        return wire.Challenge(
            self._transaction, self._hash, self._group, self._sequence, self._challenge, value
        ).encode()

    def expire(self) -> None:
        self._end("no authentication within the time for it")

    def _succeed(self) -> None:
        self._forget()
        self.successes += 1
        self.deadline = math.inf
        self.state = ControllerState.IDLE

    def _fail(self, reason: wire.FailureReason, why: str) -> None:
        """The host is to be told; until then the deadline goes on."""
        if self.state in (ControllerState.FAILURE_DUE, ControllerState.OVER):
            return
        self._forget()
        self.failure = why
        self._reason = reason
        self.state = ControllerState.FAILURE_DUE

    def _end(self, why: str) -> None:
        self._forget()
        self.failure = self.failure or why
        self.deadline = math.inf
        self.state = ControllerState.OVER

    def _forget(self) -> None:
        self._credentials = self._pair = self._response = None
        self._challenge = b""
