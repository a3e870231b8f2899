"""One processor for threads that work under the interpreter's lock alone, and let go of it only to wait.

Only one of them works at a time, wherever they run. On several processors each finds in its caches what it
left there, not what the one before has changed: objects go from processor to processor with the lock. On 16
processors a lent slot took 500 microseconds of processor time so, and 250 on one
(docs/decisions/0062-slots-that-are-lent.md). Threads that seal or copy meanwhile want several.
"""

import contextlib
import os


def chosen_processor() -> int:
    """One that this process may use: by its id, so several agents of a machine choose different ones."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[os.getpid() % len(allowed)]


def run_on(processor: int) -> None:
    """Have the calling thread run there alone. Where Linux refuses that, it runs as before, and is slower."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {processor})
