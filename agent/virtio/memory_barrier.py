"""A full memory barrier, which Python has no word for.

Both sides of a ring write one word and then read another: the write must be seen before the read is made, or
both wait for ever. x86 reorders exactly that pair, Arm more. To take a free lock is an atomic exchange, a
full barrier on x86; elsewhere membarrier(2) is one. A sleeper on a ring should still look at it once in a
while: where neither can be had, that is the price of a lost wake-up.
"""

import ctypes
import platform
import threading
from collections.abc import Callable
from typing import Final

_SYS_MEMBARRIER: Final = {"aarch64": 283, "riscv64": 283}
_PRIVATE_EXPEDITED: Final = 1 << 3
_REGISTER_PRIVATE_EXPEDITED: Final = 1 << 4


def _by_lock() -> Callable[[], object]:
    make_lock = threading.Lock

    def fence() -> None:
        # A lock of its own, which nobody else can hold: one that is taken is found so by a plain read,
        # and that is no barrier.
        make_lock().acquire()

    return fence


def _by_membarrier(number: int) -> Callable[[], object] | None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, _REGISTER_PRIVATE_EXPEDITED, 0, 0):
        return None

    def fence() -> object:
        return library.syscall(number, _PRIVATE_EXPEDITED, 0, 0)

    return fence


def _choose() -> Callable[[], object]:
    machine = platform.machine()
    if machine in _SYS_MEMBARRIER:
        return _by_membarrier(_SYS_MEMBARRIER[machine]) or _by_lock()
    return _by_lock()


full_fence = _choose()
"""Writes before the call are seen by other processors before reads after it are made."""


def _nothing() -> None:
    return None


ordering_fence: Callable[[], object] = _nothing if platform.machine() == "x86_64" else full_fence
"""Reads stay behind earlier reads and writes behind earlier writes. x86 keeps that by itself."""
