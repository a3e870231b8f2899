"""Discarded drives: their media stay open a little longer, for commands that have just begun.

A thread gives them back in time, and ends when none is left. `add` waits at the bound.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from emulator.jbof.drive import Drive
from emulator.jbof.kv_drive import KvDrive

RETIRE_S: Final = 2.0
"""How long a medium stays open after its drive was discarded."""

RETIRED_MAX: Final = 32
"""Waiting drives."""

_STOP_S: Final = 5.0


class RetiredDrives:
    """`give_back` is called once for each drive, from a thread of our own or from `close`."""

    def __init__(self, give_back: Callable[[Drive | KvDrive], None]) -> None:
        self._give_back = give_back
        self._changed = threading.Condition()
        self._waiting: deque[tuple[float, Drive | KvDrive]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._waiting)

    def add(self, drive: Drive | KvDrive) -> None:
        """To be given back in `RETIRE_S`. Blocks while `RETIRED_MAX` wait; call it without a lock held."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < RETIRED_MAX or self._closed)
            self._waiting.append((time.monotonic() + RETIRE_S, drive))
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._serve, name="retired-drives", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while self._waiting and not self._closed:
                    left = self._waiting[0][0] - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left)
                if self._closed or not self._waiting:
                    self._thread = None
                    return
                _, drive = self._waiting.popleft()
                self._changed.notify_all()
            self._give_back(drive)

    def close(self) -> None:
        """Give back all that wait, at once. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(_STOP_S)
        with self._changed:
            left, self._waiting = self._waiting, deque()
        for _, drive in left:
            self._give_back(drive)
