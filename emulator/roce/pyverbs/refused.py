"""Objects that no device here has: they can be named, as in pyverbs, and not be made."""

from __future__ import annotations

import errno

from emulator.roce.pyverbs.base import PyverbsCM
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError


class Refused(PyverbsCM):
    """The device does not do this: EOPNOTSUPP, as a kernel device without the feature says."""

    __slots__ = ()

    def __init__(self, *arguments: object, **named: object) -> None:
        raise PyverbsRDMAError(f"Failed to create {type(self).__name__}", errno.EOPNOTSUPP)
