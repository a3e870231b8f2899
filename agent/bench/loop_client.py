"""A process with an event loop and a ticker in it.

    python -m agent.bench.loop_client calls MOUNT VALUE-BYTES SECONDS CPU,CPU,...
    python -m agent.bench.loop_client watch CPU

`calls`: four tasks get, put, look up and prestage values of a volume `kv`, each call by `asyncio.to_thread`.
The ticker is a timer of the kernel: the loop's own timers are a millisecond late by themselves. One line of
JSON says how late the ticks were seen. `watch`: the ticker alone, on one processor, until standard input
ends.

Where they may, the processes run before all others (SCHED_RR): an engine's host has no agent and no enclosure
that would wait for its cores. Those that watch go before the one that calls.
"""

import asyncio
import ctypes
import json
import os
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from agent.bench.contents import Contents, pages
from agent.errors import G35Error
from host_shim.block_key import key_of
from host_shim.pool import Pool, Volume

CALLS, WATCH = "calls", "watch"
TASKS = 4
THREADS = TASKS + 1
VALUES = 16
TICK_SECONDS = 1e-3
SEEN_MS = 0.05
"""Ticks that were later than that are told one by one."""
_EXPIRATIONS = struct.Struct("=Q")
"""What a read of a timerfd brings: how often it expired since the last (timerfd_create(2))."""
_ITIMERSPEC = struct.Struct("@qqqq")
"""Interval and first expiry, each seconds and nanoseconds; the ABI of 64-bit Linux."""
_TFD_NONBLOCK, _TFD_CLOEXEC, _TFD_TIMER_ABSTIME = 0o4000, 0o2000000, 1


@dataclass(slots=True)
class Ticks:
    """What the ticker saw, each time that it looked: when it was due (seconds of the monotonic clock), and by
    how many milliseconds it was late."""

    late: list[tuple[float, float]] = field(default_factory=list)
    calls: int = 0
    compare: list[tuple[int, memoryview]] = field(default_factory=list)
    """A value's number, and what a task got last for it, where its last get was no miss."""

    def said(self) -> dict[str, Any]:
        told = [one for one in self.late if one[1] > SEEN_MS]
        return {"late": told, "ticks": len(self.late), "calls": self.calls}


class Ticker:
    """A timer that expires every TICK_SECONDS. Only Linux has it, as everything here."""

    def __init__(self, ticks: Ticks) -> None:
        self._ticks = ticks
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._descriptor < 0:
            raise G35Error(f"no timer: {os.strerror(ctypes.get_errno())}")
        self._next = 0.0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._next = time.monotonic() + TICK_SECONDS
        whole, part = divmod(round(self._next * 1e9), 10**9)
        settings = _ITIMERSPEC.pack(0, round(TICK_SECONDS * 1e9), whole, part)
        if self._libc.timerfd_settime(self._descriptor, _TFD_TIMER_ABSTIME, settings, None):
            raise G35Error(f"the timer was not set: {os.strerror(ctypes.get_errno())}")
        loop.add_reader(self._descriptor, self._seen)

    def stop(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _seen(self) -> None:
        """The loop is here: late by the time since the first expiry that it has not seen yet."""
        (expired,) = _EXPIRATIONS.unpack(os.read(self._descriptor, _EXPIRATIONS.size))
        self._ticks.late.append((self._next, (time.monotonic() - self._next) * 1e3))
        self._next += expired * TICK_SECONDS


async def calling(volume: Volume, task: int, buffer: memoryview, end: float, ticks: Ticks) -> None:
    """Gets, mostly, and each other call once among eight; what was got last is compared at the end."""
    contents = Contents(len(buffer))
    number, got, own = task, -1, key_of(f"loop put {task} of {os.getpid()}")
    while time.monotonic() < end:
        key = key_number(number % VALUES)
        match ticks.calls % 8:
            case 5:
                await asyncio.to_thread(volume.exists, [key])
            case 6:
                await asyncio.to_thread(volume.prestage, [key])
            case 7:
                await asyncio.to_thread(volume.delete, [own])
                await asyncio.to_thread(volume.put, own, contents.value(number % VALUES))
            case _:
                length = await asyncio.to_thread(volume.get_into, key, buffer)
                # A miss may have broken off amid the buffer.
                got = -1 if length is None else number % VALUES
        ticks.calls += 1
        number += TASKS
    if got >= 0:
        ticks.compare.append((got, buffer))


async def call(mount: str, value_bytes: int, seconds: float) -> Ticks:
    ticks, loop = Ticks(), asyncio.get_running_loop()
    # Before the clock runs: memory, and the threads that an engine's loop has long since had.
    Contents(value_bytes)
    buffers = [pages(value_bytes) for _ in range(TASKS)]
    # And no more of them: an executor starts one where none is idle yet, and the loop waits for it.
    loop.set_default_executor(ThreadPoolExecutor(THREADS))
    await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.05) for _ in range(THREADS)))
    ticker = Ticker(ticks)
    with Pool(mount, sessions=THREADS) as pool:
        volume, end = pool.volume("kv"), time.monotonic() + seconds
        ticker.start(loop)
        try:
            await asyncio.gather(
                *(calling(volume, task, buffer, end, ticks) for task, buffer in enumerate(buffers))
            )
        finally:
            ticker.stop(loop)
    if not ticks.compare:
        raise G35Error("no get brought a value")
    for number, got in ticks.compare:
        if got != Contents(value_bytes).value(number):
            raise G35Error(f"wrong bytes in value {number}")
    return ticks


async def watch() -> Ticks:
    ticks, loop, ended = Ticks(), asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    ticker = Ticker(ticks)
    ticker.start(loop)
    try:
        await ended.wait()
    finally:
        ticker.stop(loop)
    return ticks


def goes_before_others(by: int = 0) -> bool:
    """See the top of this file. False where it may not: without CAP_SYS_NICE."""
    least = os.sched_get_priority_min(os.SCHED_RR)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(least + by))
    except PermissionError:
        return False
    return True


def key_number(number: int) -> bytes:
    return key_of(f"loop {number}")


def main() -> None:
    if sys.argv[1] == WATCH:
        os.sched_setaffinity(0, {int(sys.argv[2])})
        before_others = goes_before_others(by=1)
        said = asyncio.run(watch()).said()
    else:
        mount, value_bytes, seconds, processors = sys.argv[2:]
        os.sched_setaffinity(0, map(int, processors.split(",")))
        before_others = goes_before_others()
        said = asyncio.run(call(mount, int(value_bytes), float(seconds))).said()
    print(json.dumps({**said, "before_others": before_others}))


if __name__ == "__main__":
    main()
