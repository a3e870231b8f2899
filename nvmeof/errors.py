"""Errors of nvmeof, named by whose fault they are.

NvmeofError
+-- LocalProtocolError    we called the protocol object wrongly; a bug on this side
|   +-- QueueFull         no command id is free; wait for one and submit again
+-- RemoteProtocolError   the peer broke the protocol; says what to answer before hanging up
|   +-- MalformedPdu      bytes of the peer that cannot be decoded
+-- CommandFailed         the peer answered a command with a status other than success
+-- ConnectionLost        the world: the connection ended, or never answered
+-- ConnectRefused        the peer answered Connect with a status: it does not want us
|   +-- AuthenticationFailed  one of the two could not prove itself to the other
"""

from enum import IntEnum


class FatalErrorStatus(IntEnum):
    """FES of a termination request (NVMe/TCP 1.0, 3.6.2.4 and 3.6.2.5)."""

    INVALID_HEADER_FIELD = 1
    SEQUENCE_ERROR = 2
    HEADER_DIGEST_ERROR = 3
    OUT_OF_RANGE = 4
    LIMIT_EXCEEDED = 5
    UNSUPPORTED_PARAMETER = 6


class NvmeofError(Exception):
    """Any failure of an NVMe-oF session."""


class LocalProtocolError(NvmeofError):
    """We did wrong: the call is illegal in this state. Nothing was sent."""


class QueueFull(LocalProtocolError):
    """Every command id of the queue is in flight (or abandoned and not yet answered)."""


class RemoteProtocolError(NvmeofError):
    """The peer did wrong, and the connection cannot go on.

    `fatal_error_status` and `information` (FEI: the byte offset of the bad field, or the digest that was
    received) are what a TCP transport puts into its termination request; None means hang up in silence.
    """

    def __init__(
        self,
        reason: str,
        *,
        fatal_error_status: FatalErrorStatus | None = FatalErrorStatus.INVALID_HEADER_FIELD,
        information: int = 0,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fatal_error_status = fatal_error_status
        self.information = information


class MalformedPdu(RemoteProtocolError):
    """The peer's bytes do not decode. The only exception that a `decode_*_untrusted` may raise."""


def exactly(data: bytes | bytearray | memoryview, size: int, name: str) -> None:
    """Raise `MalformedPdu` where a peer's record has another size than its layout."""
    if len(data) != size:
        raise MalformedPdu(f"{name} has {size} bytes, not {len(data)}")


class CommandFailed(NvmeofError):
    """A command was answered with a `status` other than success; `reason` names both."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class ConnectionLost(NvmeofError):
    """The connection to the peer has ended, or could not be made; what was in flight is lost."""


class ConnectRefused(NvmeofError):
    """The peer refused Connect; trying again with the same names will give the same answer.

    `retry_is_useless` follows the do-not-retry bit of the status, and its code.
    """

    def __init__(self, reason: str, *, retry_is_useless: bool) -> None:
        super().__init__(reason)
        self.retry_is_useless = retry_is_useless


class AuthenticationFailed(ConnectRefused):
    """One side could not prove itself (DH-HMAC-CHAP); the same secrets will fail again.

    `farewell` is the AUTH_Failure2 that is to be sent before hanging up, None where the peer knows.
    """

    def __init__(self, reason: str, *, farewell: bytes | None = None) -> None:
        super().__init__(reason, retry_is_useless=True)
        self.farewell = farewell
