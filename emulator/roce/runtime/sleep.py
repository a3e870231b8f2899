"""Sleeps of the thread that drives a device: after a last look, in poll(), or for a fixed moment."""

import os
import select
import time
from collections.abc import Callable
from typing import Final

from emulator.roce.link.base import Link
from emulator.roce.runtime.lock_hold import LockHold

LINGER_S: Final = 50e-6
DOUBT: Final = 8
TRUST: Final = 2
RARELY: Final = 32
"""How long a driver looks before it sleeps; how many vain looks, less `TRUST` for each that was not, make it
stop doing so; and at which of the later sleeps it tries again. Measured between two processes on two idle
cores: a message of 64 bytes takes 43 us instead of 82, and less processor time in all; on busy cores nothing
is gained. Where one look in four is of use, as with gets of 1 MiB, the others cost 70 us of processor time a
MiB."""

NAP_S: Final = 60e-6
"""A nap while a long message comes; with the kernel's own slack it is some 110 us. Naps of twice the
length gained nothing."""

NAP_BYTES: Final = 192 << 10
"""Bytes still to come that justify a nap: no peer sends them in less time."""


class Sleep:
    """One thread's sleep: until a datagram, the end of the time, or a call.

    Each sleeper has its own eventfd: of two that poll the same one, either might read it before the other
    has looked.
    """

    def __init__(self, link: Link, clock: Callable[[], float]) -> None:
        self.until: float | None = None
        """When it ends by itself; None while the thread is awake."""
        self._clock = clock
        self._doubt = 0
        self._looks = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._receiving = self._new_poll(link, select.POLLIN)
        self._sending_too = self._new_poll(link, select.POLLIN | select.POLLOUT)

    def _new_poll(self, link: Link, events: int) -> select.poll:
        poll = select.poll()
        poll.register(link.fileno(), events)
        groups = link.groups_fileno()
        if groups >= 0:
            poll.register(groups, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        return poll

    def sleep(self, grip: LockHold, now: float, until: float, sending: bool, lively: bool) -> None:
        """Sleep without the lock; after an exception it may not be held.

        `lively`: something has just come, so more may come at once.
        """
        poll = self._sending_too if sending else self._receiving
        ready: list[tuple[int, int]] = []
        self.until = until
        try:
            grip.release()
            if lively:
                ready = self._linger(poll, min(now + LINGER_S, until))
            if not ready:
                # It counts in milliseconds and rounds up, so it never wakes too early to act.
                ready = poll.poll(max(until - now, 0.0) * 1000)
            grip.acquire()
        finally:
            self.until = None
        for descriptor, _ in ready:
            if descriptor == self._wake:
                os.eventfd_read(self._wake)

    def nap(self, grip: LockHold) -> None:
        """Let go of the lock for a moment, in the middle of a long message; as `sleep`.

        A driver in poll() wakes for every burst, which costs either side more than the burst. A driver that
        sleeps by the clock finds several bursts at once, and costs the sender nothing. It counts as awake, so
        no thread calls it.
        """
        grip.release()
        time.sleep(NAP_S)
        grip.acquire()

    def _linger(self, poll: select.poll, end: float) -> list[tuple[int, int]]:
        """Look again and again for a moment before falling asleep.

        To wake a sleeping thread on another core costs the sender some 50 us in a virtual machine, more than
        all else that it does for a small message; a thread that still looks costs nothing. Where that is
        mostly in vain it is rarely tried: then the peer is slow, or has no core to run on.
        """
        self._looks += 1
        if self._doubt >= DOUBT and self._looks % RARELY:
            return []
        while self._clock() < end:
            ready = poll.poll(0)
            if ready:
                self._doubt = max(0, self._doubt - TRUST)
                return ready
        self._doubt = min(DOUBT, self._doubt + 1)
        return []

    def call(self) -> None:
        if self.until is not None:
            os.eventfd_write(self._wake, 1)
            self.until = None

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._wake)
