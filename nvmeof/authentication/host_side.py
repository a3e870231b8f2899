"""The host's side of one authentication of one queue, without I/O.

    exchange = HostAuthentication(credentials, host_nqn, subsystem_nqn)
    send(exchange.negotiate()); send(exchange.challenged(receive()))
    last = exchange.concluded(receive()); if last is not None: send(last)

`challenged` and `concluded` raise `AuthenticationFailed`, whose `farewell` (AUTH_Failure2) is to be sent
where there is one. An exchange is used once.
"""

import hmac
from enum import Enum
from typing import NoReturn

from nvmeof.authentication.groups import BadPublicValue, KeyPair, value_bytes
from nvmeof.authentication.responses import HASH_BYTES, Exchange, new_challenge
from nvmeof.authentication.secret import Credentials
from nvmeof.errors import AuthenticationFailed, LocalProtocolError, MalformedPdu
from nvmeof.wire import authentication as wire


class HostState(Enum):
    """Where an exchange is. There is no way back."""

    NEW = "new"
    NEGOTIATING = "waiting for the challenge"
    REPLIED = "waiting for the verdict"
    PROVEN = "authenticated"
    FAILED = "failed"


class HostAuthentication:
    def __init__(self, credentials: Credentials, host_nqn: str, subsystem_nqn: str) -> None:
        self.state = HostState.NEW
        self._credentials = credentials
        self._host_nqn = host_nqn
        self._subsystem_nqn = subsystem_nqn
        self._transaction = credentials.numbers.next_transaction()
        self._exchange: Exchange | None = None
        self._challenge: bytes | None = None
        self._sequence = 0

    def negotiate(self) -> bytes:
        """AUTH_Negotiate: what we can do."""
        self._step(HostState.NEW, HostState.NEGOTIATING)
        credentials = self._credentials
        return wire.Negotiate(
            self._transaction, (wire.Protocol(credentials.hashes, credentials.groups),)
        ).encode()

    def challenged(self, data: bytes | memoryview) -> bytes:
        """The controller's first answer; our Reply to it. Raises `AuthenticationFailed`."""
        self._step(HostState.NEGOTIATING, HostState.REPLIED)
        message = self._decode(data)
        if not isinstance(message, wire.Challenge):
            self._refuse(wire.FailureReason.INCORRECT_MESSAGE, "the controller did not send a challenge")
        credentials = self._credentials
        if message.hash_id not in credentials.hashes:
            self._refuse(wire.FailureReason.HASH_UNUSABLE, f"the controller wants hash {message.hash_id}")
        if message.group_id not in credentials.groups:
            self._refuse(
                wire.FailureReason.GROUP_UNUSABLE, f"the controller wants DH group {message.group_id}"
            )
        hash_id, group = wire.HashId(message.hash_id), wire.GroupId(message.group_id)
        if len(message.challenge) != HASH_BYTES[hash_id] or not message.sequence:
            self._refuse(wire.FailureReason.INCORRECT_PAYLOAD, "the controller's challenge is not one")
        value, shared = b"", None
        if len(message.dh_value) != value_bytes(group):
            self._refuse(wire.FailureReason.INCORRECT_PAYLOAD, "the controller's DH value has a wrong length")
        if group is not wire.GroupId.NULL:
            try:
                pair = KeyPair(group)
                value, shared = pair.public, pair.shared(message.dh_value)
            except BadPublicValue as error:
                self._refuse(wire.FailureReason.INCORRECT_PAYLOAD, f"the controller sent {error}")
        exchange = Exchange(hash_id, self._transaction, self._host_nqn, self._subsystem_nqn, shared)
        self._exchange = exchange
        if credentials.controller_secret is not None:
            self._challenge = new_challenge(hash_id)
            self._sequence = credentials.numbers.next_sequence()
        response = exchange.host_response(credentials.host_secret, message.challenge, message.sequence)
        return wire.Reply(self._transaction, response, self._sequence, self._challenge, value).encode()

    def concluded(self, data: bytes | memoryview) -> bytes | None:
        """The controller's verdict; Success2 if it had to prove itself. Raises `AuthenticationFailed`."""
        self._step(HostState.REPLIED, HostState.PROVEN)
        message = self._decode(data)
        exchange, secret = self._exchange, self._credentials.controller_secret
        assert exchange is not None
        if not isinstance(message, wire.Success1):
            self._refuse(wire.FailureReason.INCORRECT_MESSAGE, "the controller did not send a verdict")
        if secret is None or self._challenge is None:
            if message.response is not None:
                self._refuse(
                    wire.FailureReason.INCORRECT_PAYLOAD, "the controller answers what was not asked"
                )
            return None
        expected = exchange.controller_response(secret, self._challenge, self._sequence)
        # A controller that leaves its response out has not proven anything.
        if message.response is None or not hmac.compare_digest(message.response, expected):
            self._refuse(
                wire.FailureReason.FAILED,
                "the controller could not prove itself: its secret (controller_secret_file here) is another, "
                "or it is not the controller that it claims to be",
            )
        return wire.Success2(self._transaction).encode()

    def _step(self, before: HostState, after: HostState) -> None:
        if self.state is not before:
            raise LocalProtocolError(f"an authentication that is {self.state.value} is not {before.value}")
        self.state = after

    def _decode(self, data: bytes | memoryview) -> wire.ControllerMessage:
        try:
            message = wire.decode_controller_message_untrusted(data)
        except MalformedPdu as error:
            self._refuse(wire.FailureReason.INCORRECT_PAYLOAD, f"the controller sent {error}")
        if isinstance(message, wire.Failure):
            self.state = HostState.FAILED
            raise AuthenticationFailed(self._why_refused(message.reason))
        if message.transaction != self._transaction:
            self._refuse(wire.FailureReason.INCORRECT_PAYLOAD, "the controller answers another transaction")
        return message

    def _why_refused(self, reason: int) -> str:
        if reason == wire.FailureReason.FAILED:
            return (
                f"the controller does not accept the secret of {self._host_nqn} (host_secret_file here): "
                "it has another one for this host, or the subsystem's own is missing there"
            )
        return f"the controller refuses to authenticate: {wire.describe_reason(reason)}"

    def _refuse(self, reason: wire.FailureReason, why: str) -> NoReturn:
        self.state = HostState.FAILED
        farewell = wire.Failure(self._transaction, reason, from_host=True).encode()
        raise AuthenticationFailed(why, farewell=farewell)
