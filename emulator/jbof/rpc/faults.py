"""Errors of the RPC, with the codes and texts of a real SPDK target for the same mistakes."""

import errno
import os
from typing import Final

INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMETERS: Final = -32602
INTERNAL_ERROR: Final = -32603
WRONG_STATE: Final = -1


class RpcFault(Exception):
    """The answer of a method that failed."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def of_errno(number: int) -> RpcFault:
    """A negative errno with its text."""
    return RpcFault(-number, os.strerror(number))


def no_device() -> RpcFault:
    """There is no bdev of that name."""
    return of_errno(errno.ENODEV)


def invalid_parameters() -> RpcFault:
    """An nvmf or keyring call with wrong parameters, or unknown names."""
    return RpcFault(INVALID_PARAMETERS, "Invalid parameters")


def internal_error() -> RpcFault:
    """An nvmf call that failed inside."""
    return RpcFault(INTERNAL_ERROR, "Internal error")
