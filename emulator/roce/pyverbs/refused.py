"""Objects that no device here has: their attributes can be made, as in pyverbs, and they themselves not."""

from __future__ import annotations

import errno

from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError


def not_here(what: str) -> PyverbsRDMAError:
    """The error of a device that does not do this: EOPNOTSUPP, as a kernel device without it says."""
    return PyverbsRDMAError(f"Failed to create {what}", errno.EOPNOTSUPP)
