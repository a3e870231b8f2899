"""The end of a process whose parent has died: the kernel kills it (PR_SET_PDEATHSIG).

So even `kill -9` of the parent leaves nothing running.
"""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """To be called by the child, between fork and exec where there is one."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
