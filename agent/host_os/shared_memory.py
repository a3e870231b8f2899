"""Memory that the processes of one agent share: made by the first of them, and mapped by all."""

import os


def shared_memory(name: str, size: int) -> int:
    """A descriptor of `size` new bytes of zeros. Raises OSError."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
