"""One queue as threads use it: a ring, its two eventfds, and the threads that wait for answers.

One of the waiting threads, the leader, sleeps on the call eventfd and takes the answers of all; when its own
is there, another one leads. An answer costs its thread one wake-up at most.

The eventfds belong to the machine: they outlive a back-end that dies (vhost-user's inflight area).
"""

import contextlib
import os
import select
import threading
import time
from typing import Final

from agent.bench.virtio_driver.faults import DeviceSilent
from agent.bench.virtio_driver.guest_memory import GuestMemory
from agent.bench.virtio_driver.ring import DriverRing

WAIT_SECONDS: Final = 30.0
"""How long a request may take before the driver gives up on the device."""


class Waiter:
    """One request under way. `written`: what the used ring said, once `finished`."""

    __slots__ = ("bell", "finished", "written")

    def __init__(self) -> None:
        self.finished = False
        self.written = 0
        # A binary semaphore: held while there is nothing to wake up for.
        self.bell = threading.Lock()
        self.bell.acquire()


class RequestQueue:
    """Queue `index` of a device, with a ring of `size` entries in `memory`."""

    def __init__(self, memory: GuestMemory, index: int, size: int, *, first: int = 0) -> None:
        """`first`: the 16-bit number that its ring begins at. What it may use, the front-end agrees on."""
        self.index = index
        self.ring: DriverRing[Waiter] = DriverRing(memory, size, event_index=False, index=first)
        self.kick = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.call = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.error = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._led = False
        self._followers: list[Waiter] = []
        self._sleep = select.poll()
        self._sleep.register(self.call, select.POLLIN)

    @property
    def outstanding(self) -> int:
        return self.ring.outstanding

    def submit_table(self, address: int, count: int, room: int, waiter: Waiter) -> None:
        """Give the device a chain by its table (`DriverRing.add_table`), and kick it if it wants that."""
        with self._lock:
            self.ring.add_table(address, count, room, waiter)
            kick = self.ring.publish()
        if kick:
            self.kick_now()

    def kick_now(self) -> None:
        os.eventfd_write(self.kick, 1)

    def wake(self) -> None:
        """Have the waiters look at the ring: an interrupt may have died with the device."""
        os.eventfd_write(self.call, 1)

    def wait(self, waiter: Waiter, timeout: float = WAIT_SECONDS) -> int:
        """Until the device has answered; bytes that it wrote. DeviceSilent after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                if waiter.finished:
                    return waiter.written
                leads = not self._led
                if leads:
                    self._led = True
                else:
                    self._followers.append(waiter)
            if leads:
                try:
                    return self._lead(waiter, deadline)
                finally:
                    self._lead_no_longer()
            if not waiter.bell.acquire(timeout=max(0.0, deadline - time.monotonic())):
                with self._lock:
                    if waiter in self._followers:
                        self._followers.remove(waiter)
                        raise DeviceSilent(f"queue {self.index}: no answer within {timeout:g} s")

    def close(self) -> None:
        for descriptor in (self.kick, self.call, self.error):
            os.close(descriptor)

    def _lead(self, waiter: Waiter, deadline: float) -> int:
        while not self._is_answered(waiter):
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeviceSilent(f"queue {self.index}: no answer in time")
            if self._sleep.poll(left * 1000):
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.call)
        return waiter.written

    def _is_answered(self, waiter: Waiter) -> bool:
        """Take the answers; False where the waiter's is not there, and the next will interrupt."""
        with self._lock:
            self._take()
            while not waiter.finished and self.ring.want_interrupts():
                self._take()
            return waiter.finished

    def _lead_no_longer(self) -> None:
        with self._lock:
            self._led = False
            if self._followers:
                self._followers.pop(0).bell.release()

    def _take(self) -> None:
        for waiter, written in self.ring.take_used():
            waiter.written = written
            waiter.finished = True
            if waiter in self._followers:
                self._followers.remove(waiter)
                waiter.bell.release()
