"""Keeps a process with keys in its memory from a core dump, and other processes of the same user from tracing
it or reading its memory (prctl(2), PR_SET_DUMPABLE). Root can.
"""

import ctypes
import logging
import os
import resource

log = logging.getLogger(__name__)

PR_SET_DUMPABLE = 4


def keep_memory_private() -> None:
    """For the rest of this process's life; a program that it executes is as ever."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    # The limit alone does not hold for a core that is piped to a handler (core(5)).
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        log.warning("core dumps are not switched off: %s", os.strerror(ctypes.get_errno()))
