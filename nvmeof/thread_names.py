"""The kernel knows threads by the names that they have in Python, so `top -H` and /proc tell them apart.

Python does that itself from 3.14 on. Before, all threads of a process have the process' own name.
"""

import ctypes
import sys
import threading
from types import FrameType
from typing import Final

KERNEL_NAME_BYTES: Final = 15
"""TASK_COMM_LEN without its final zero (include/linux/sched.h)."""

_PR_SET_NAME: Final = 15
_libc: Final = ctypes.PyDLL(None)


def show_thread_names() -> None:
    """From now on each thread that starts tells the kernel its name. A profiler that was set stays."""
    if sys.version_info < (3, 14) and threading.getprofile() is None:
        # The hook runs in the new thread before the thread's own code. No other place is common to all
        # threads, those of libraries included.
        threading.setprofile(_began)


def _began(_frame: FrameType, _event: str, _argument: object) -> None:
    sys.setprofile(None)  # once: what the thread does afterwards is as quick as before
    name = threading.current_thread().name.encode(errors="replace")[:KERNEL_NAME_BYTES]
    _libc.prctl(_PR_SET_NAME, name, 0, 0, 0)
