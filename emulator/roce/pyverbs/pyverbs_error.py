"""`pyverbs.pyverbs_error`: the errors of the stand-in."""

import os


class PyverbsError(Exception):
    """The base of them all. With an `error_code` (errno) the message ends in its number and its words."""

    def __init__(self, msg: str, error_code: int = -1) -> None:
        if error_code != -1:
            msg = f"{msg}. Errno: {error_code}, {os.strerror(error_code)}"
        super().__init__(msg)


class PyverbsRDMAError(PyverbsError):
    """The device or the connection manager refuses: the call was wrong, or the world is. See `error_code`."""

    def __init__(self, msg: str, error_code: int = -1) -> None:
        super().__init__(msg, error_code)
        self.error_code = error_code
        """The errno, -1 where there is none."""


class PyverbsUserError(PyverbsError):
    """The caller's arguments made no sense before any device was asked."""
