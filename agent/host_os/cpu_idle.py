"""Keeps processors awake while requests come.

Linux puts an idle processor to sleep within microseconds; a deep sleep costs it its caches, and a virtual one
is handed back to the host. A get of 64 KiB wakes a sleeping processor at every step from client to agent to
enclosure. A program that holds /dev/cpu_dma_latency open says in microseconds how long a wake-up may take; at
0, idle processors poll (Documentation/power/pm_qos_interface.rst).

That costs power, and threads that share a core some of their speed: more than it gives for long values. So it
is asked for while there is work. Where no two processors share a core it helps long values as well (a get of
1 MiB, one at a time, is a quarter quicker), so `auto` looks whether they do.
"""

import logging
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import trio

from agent.host_os.ticks import next_tick

log = logging.getLogger(__name__)

StayAwake = Literal["never", "short", "auto", "always"]

DEVICE: Final = Path("/dev/cpu_dma_latency")
PROCESSORS: Final = Path("/sys/devices/system/cpu")
LOOK_SECONDS: Final = 0.1
REST_SECONDS: Final = 0.25
"""Between two looks while nothing is asked: an idle agent looks in step with its other tasks."""
SHORT_BYTES: Final = 128 << 10
"""Values that are longer on average keep processors busy by themselves, if with gaps."""
REQUESTS_PER_SECOND: Final = 100.0
"""Fewer are not worth the power of processors that poll in between."""
_MICROSECONDS: Final = struct.Struct("=i")


def wake_up_microseconds(device: Path = DEVICE) -> int | None:
    """How long a wake-up may take at present, by all requests to the device; None if unknown."""
    try:
        with open(device, "rb", buffering=0) as file:
            said = file.read(_MICROSECONDS.size)
    except OSError:
        return None
    return int(_MICROSECONDS.unpack(said)[0]) if len(said) == _MICROSECONDS.size else None


def cores_are_shared(processors: Path = PROCESSORS) -> bool:
    """Whether two processors are threads of one core; True where the machine tells nothing.

    Documentation/admin-guide/cputopology.rst, thread_siblings_list: `0,64` and `0-1` are threads of one core.
    """
    lists = list(processors.glob("cpu[0-9]*/topology/thread_siblings_list"))
    try:
        return not lists or any(not each.read_text().strip().isdecimal() for each in lists)
    except (OSError, ValueError):
        return True


class Awake:
    """A request to Linux to keep processors awake. For one thread. `complain`: the level at which a refusal
    is logged."""

    def __init__(self, device: Path = DEVICE, complain: int = logging.INFO) -> None:
        self._device = device
        self._complain = complain
        self._descriptor = -1
        self._is_refused = False

    @property
    def held(self) -> bool:
        return self._descriptor >= 0

    def hold(self) -> bool:
        """Keep them awake from now on. False without root, or without the device."""
        if self.held or self._is_refused:
            return self.held
        try:
            self._descriptor = os.open(self._device, os.O_WRONLY | os.O_CLOEXEC)
            os.write(self._descriptor, _MICROSECONDS.pack(0))
        except OSError as error:
            # Said once: to ask again would be refused again.
            log.log(
                self._complain,
                "stay_awake: processors sleep between requests: %s: %s",
                self._device,
                error.strerror,
            )
            self._is_refused = True
            self.release()
        return self.held

    def release(self) -> None:
        """They may sleep again. The end of the process does the same."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Work:
    """What was done so far. `transfers`: gets and puts among `requests`; `bytes`: those of their values."""

    requests: int
    transfers: int
    bytes: int


class AwakeWhileBusy:
    """Holds `Awake` while work goes on that `when` is about."""

    def __init__(
        self, awake: Awake, when: StayAwake = "auto", shared: Callable[[], bool] = cores_are_shared
    ) -> None:
        self._awake = awake
        self._long_too = when == "auto" and not shared()
        self._when = when
        self._before = Work(0, 0, 0)
        self._looked = 0.0

    def look(self, work: Work, now: float) -> bool:
        """Call it every `LOOK_SECONDS`. `now` in seconds. Whether anything was asked since the last look."""
        before, seconds = self._before, now - self._looked
        self._before, self._looked = work, now
        requests = work.requests - before.requests
        if self._when in ("short", "auto"):
            mean_most = SHORT_BYTES * max(1, work.transfers - before.transfers)
            is_short = work.bytes - before.bytes <= mean_most
            is_wanted = requests >= REQUESTS_PER_SECOND * seconds and (is_short or self._long_too)
        else:
            is_wanted = self._when == "always" and requests > 0
        if is_wanted:
            self._awake.hold()
        else:
            self._awake.release()
        return requests > 0

    async def keep(self, work_done: Callable[[], Work]) -> None:
        try:
            while True:
                is_asked = self.look(work_done(), time.monotonic())
                await trio.sleep_until(
                    trio.current_time() + LOOK_SECONDS if is_asked else next_tick(REST_SECONDS)
                )
        finally:
            self._awake.release()


async def keep_awake(when: StayAwake, work_done: Callable[[], Work]) -> None:
    """Until cancelled. `always` warns where the device, which takes root, cannot be had."""
    if when != "never":
        awake = Awake(complain=logging.WARNING if when == "always" else logging.INFO)
        await AwakeWhileBusy(awake, when).keep(work_done)
