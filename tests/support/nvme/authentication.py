"""Authentication without queues: both sides' objects, and each message between them in a test's hands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nvmeof.authentication.controller_side import ControllerAuthentication
from nvmeof.authentication.host_side import HostAuthentication
from nvmeof.authentication.secret import Credentials
from nvmeof.errors import AuthenticationFailed

HOST, SUBSYSTEM = "nqn.2026-01.io.g35:host", "nqn.2026-01.io.g35:shelf"
ROOM = 4096

Meddler = Callable[[str, bytes], bytes]
"""Gets a message by name and returns what arrives instead."""


def honest(name: str, message: bytes) -> bytes:
    """Every message arrives as it was sent."""
    return message


@dataclass
class Outcome:
    """How an exchange ended, and what was sent."""

    host: HostAuthentication
    controller: ControllerAuthentication
    error: AuthenticationFailed | None = None
    sent: dict[str, bytes] = field(default_factory=dict)

    @property
    def both_are_content(self) -> bool:
        return self.error is None and self.controller.successes > 0 and self.controller.failure is None


def exchange(
    ours: Credentials,
    theirs: Credentials | None,
    meddle: Meddler = honest,
    controller: ControllerAuthentication | None = None,
    now: float = 0.0,
) -> Outcome:
    """One authentication from AUTH_Negotiate to its end, whatever that is."""
    outcome = Outcome(
        HostAuthentication(ours, HOST, SUBSYSTEM),
        controller or ControllerAuthentication(HOST, SUBSYSTEM, now),
    )
    host, far = outcome.host, outcome.controller

    def send(name: str, message: bytes) -> None:
        outcome.sent[name] = message
        far.receive(meddle(name, message), theirs, now)

    def receive(name: str) -> bytes:
        message = far.give(ROOM)
        outcome.sent[name] = message
        return meddle(name, message).ljust(ROOM, b"\0")

    try:
        send("negotiate", host.negotiate())
        send("reply", host.challenged(receive("challenge")))
        confirmation = host.concluded(receive("success1"))
        if confirmation is not None:
            send("success2", confirmation)
    except AuthenticationFailed as error:
        outcome.error = error
        if error.farewell is not None:
            send("failure2", error.farewell)
    return outcome
