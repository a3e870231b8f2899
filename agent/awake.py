"""Processors that stay awake while requests come.

A processor with nothing to do is put to sleep within microseconds, and where it sleeps deeply its caches go
with it; a virtual one is handed back to the host. A get of 64 KiB goes from client to agent to enclosure and
back, and so wakes a sleeping processor at every step. Linux asks how much of that may be: whoever holds
/dev/cpu_dma_latency open says in microseconds how long a wake-up may take, and at 0 idle processors poll
(Documentation/power/pm_qos_interface.rst).

It is asked for while there is work, and given back soon after, because it costs power, and threads that share
a core some of their speed.
"""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path

log = logging.getLogger(__name__)

DEVICE = Path("/dev/cpu_dma_latency")
IDLE_SECONDS = 2.0
"""Without any request for so long the processors may sleep again."""
_MICROSECONDS = struct.Struct("=i")


class Awake:
    """A request to Linux that processors be kept awake, to be taken back. Not for several threads."""

    def __init__(self, device: Path = DEVICE) -> None:
        self._device = device
        self._descriptor = -1
        self._is_refused = False

    @property
    def held(self) -> bool:
        return self._descriptor >= 0

    def may_hold(self) -> bool:
        """Whether `hold` would find it."""
        return os.access(self._device, os.W_OK)

    def hold(self) -> bool:
        """Keep them awake from now on. False where that is not to be had: it takes root, and the device."""
        if self.held or self._is_refused:
            return self.held
        try:
            self._descriptor = os.open(self._device, os.O_WRONLY | os.O_CLOEXEC)
            os.write(self._descriptor, _MICROSECONDS.pack(0))
        except OSError as error:
            # Said once: to ask again would be refused again.
            log.warning("stay_awake: processors sleep between requests: %s: %s", self._device, error.strerror)
            self._is_refused = True
            self.release()
        return self.held

    def release(self) -> None:
        """They may sleep again. The end of the process does the same."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class AwakeWhileBusy:
    """Holds `Awake` while a count goes on."""

    def __init__(self, awake: Awake, wanted: bool = True) -> None:
        self._awake = awake
        self._wanted = wanted
        self._count = 0
        self._since = 0.0

    def look(self, count: int, now: float) -> None:
        """`count` of what has been done so far; call it a few times a second. `now` in seconds."""
        if not self._wanted:
            return
        if count != self._count:
            self._count, self._since = count, now
            self._awake.hold()
        elif self._awake.held and now - self._since >= IDLE_SECONDS:
            self._awake.release()

    def end(self) -> None:
        self._awake.release()
