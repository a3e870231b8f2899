"""The driver's seat: a waiting thread receives for all threads until its own condition holds.

A device has one UDP port, and many threads may wait for it: for completions, for connections. To hand every
datagram from a receiving thread to a waiting one would cost two context switches, and in Python the
interpreter lock besides. So a waiting thread takes the seat (the leader of the Leader/Followers pattern): it
receives, lets the engine work, sends the engine's packets, and checks its condition. Other waiting threads
register their conditions here. The driver checks these after each round, wakes the threads whose conditions
hold, and calls the next thread to the seat when it leaves.

The device must act without a waiting thread, too: a remote READ needs no help from the program whose memory
it reads. The progress thread does that. It drives when no driver has driven for `PARK_S`, so it does not
disturb a program that waits again and again, and it leaves as soon as another thread drives.

One lock guards engine, link and this file's state. The driver holds it during a round and releases it to
sleep in poll(). Calls of the engine from outside happen in a `turn()`, which sends on leaving, and wakes the
sleeping driver where a deadline has come nearer. A busy driver that releases the lock for a moment would
always win it back. So there is a second lock, the door, in front of the first: the thread in the door is
next.

What may interleave: two threads may sleep in poll() on the socket at once (the progress thread and a driver
that came while it slept). Both may wake for one datagram; the second finds nothing, and if it is the progress
thread, parks.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from emulator.roce.link.base import MAX_DATAGRAM, Link
from emulator.roce.nic.verbs import Address, Burst
from emulator.roce.runtime.errors import DeviceClosed
from emulator.roce.runtime.lock_hold import LockHold
from emulator.roce.runtime.sleep import NAP_BYTES, Sleep

PARK_S: Final = 0.001
"""How long the progress thread stays away after a driver was seen, and how often it looks at first."""

MAX_PARK_S: Final = 0.016
"""The longest interval of its looks, while it finds driver after driver: each look takes the interpreter from
a thread with work."""

ROUND_BURSTS: Final = 16
ROUND_BYTES: Final = 1 << 20
"""The most that a round receives before it offers the lock to others: some 0.3 ms."""

LINGER_BYTES: Final = 128 << 10
"""A driver that has received more since its last sleep does not look again before it sleeps: for long
messages a saved wake-up is a small part of the time. With gets of 1 MiB the looks took 40 us of processor
time for each get, though two in three of them found something."""

MAX_SLEEP_S: Final = 3600.0
"""Longest sleep in poll(), for want of a shorter reason."""

MAX_TROUBLE_S: Final = 0.25
TELL_S: Final = 60.0
"""After an error the progress thread waits, twice as long each time up to the first of these, and it tells of
errors once in the second: an error that stays takes neither the processor nor the disk."""

log = logging.getLogger(__name__)


class Station(Protocol):
    """A device, or a device with its connection manager. It has no clock of its own."""

    def receive(
        self,
        burst: memoryview,
        segment_size: int,
        source: Address,
        now: float,
        group: str = "",
        marked: bool = False,
    ) -> None:
        """Datagrams have arrived, for the station's own address or for a multicast group."""

    def deadline(self) -> float | None:
        """When `advance` must be called, if nothing happens before."""

    def advance(self, now: float) -> None:
        """It is `now`."""

    def next_burst(self, now: float) -> Burst | None:
        """The next burst, good until the next call; None when that is all."""


class Engine(Station, Protocol):
    """The interface of a driven protocol object (`emulator.roce.cm.gsi.Endpoint`)."""

    @property
    def expects(self) -> int:
        """Bytes still to come of the last burst's message that the peer sends without waiting for us."""


class _Waiter:
    """A thread that waits while another one drives."""

    __slots__ = ("condition", "gate", "told")

    def __init__(self, condition: Callable[[], object]) -> None:
        self.condition = condition
        self.told = False
        """The condition held, so the wait is over."""
        self.gate = threading.Lock()
        """Released to wake the thread. A bare lock: a Condition costs three times as much."""
        self.gate.acquire()


class Hold:
    """`with seat.hold():` holds the lock, for calls that send nothing and end no thread's wait."""

    __slots__ = ("_seat",)

    def __init__(self, seat: "Seat") -> None:
        self._seat = seat

    def __enter__(self) -> None:
        self._seat.enter()

    def __exit__(self, *_: object) -> None:
        self._seat.lock.release()


class Turn(Hold):
    """`with seat.turn():` holds the lock, and sends the engine's packets on leaving."""

    __slots__ = ()

    def __exit__(self, *_: object) -> None:
        try:
            self._seat.leave_turn()
        finally:
            self._seat.lock.release()


class Seat:
    """See the top of this file. `clock` is that of all deadlines."""

    def __init__(
        self, engine: Engine, link: Link, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lock = threading.Lock()
        self.closed = False
        self.drives = 0
        """How often a thread other than the progress thread took the seat."""
        self._engine = engine
        self._link = link
        self._bursts = 0
        """How many have been received."""
        self._bursts_at_sleep = 0
        self._bytes_since_sleep = 0
        self._clock = clock
        self._taken = False
        self._driver_condition: Callable[[], object] = _never
        self._waiters: list[_Waiter] = []
        self._driver_sleep = Sleep(link, clock)
        self._progress_sleep = Sleep(link, clock)
        self._turn = Turn(self)
        self._hold = Hold(self)
        self._door = threading.Lock()
        self._parked = threading.Event()
        self._parked_long = False
        self._told_at: float | None = None
        self._untold = 0
        """Errors of the progress thread since then."""
        self._progressing = threading.Thread(target=self._progress, name=f"roce-{name}", daemon=True)

    def start(self) -> None:
        """Let the progress thread run."""
        self._progressing.start()

    def turn(self) -> Turn:
        """The lock for a call of the engine from outside, and sending afterwards."""
        return self._turn

    def hold(self) -> Hold:
        """The lock alone: see `Hold`."""
        return self._hold

    def leave_turn(self) -> None:
        """Send the engine's packets, and wake sleepers that are needed. With the lock held."""
        if self.closed:
            return
        self._send(self._clock())
        self._let_nobody_oversleep()
        if self._waiters:
            self._tell_waiters()

    def enter(self) -> None:
        """Take the lock, as the next in the row."""
        grip = LockHold(self.lock, self._door)
        try:
            grip.enter()
        except BaseException:
            if grip.held:
                self.lock.release()
            raise

    def _let_nobody_oversleep(self) -> None:
        """Wake the driver, or else the progress thread, if it sleeps past the engine's deadline, has to send,
        or its condition holds: a turn may complete work or make an event without any datagram."""
        sleep = self._driver_sleep if self._taken else self._progress_sleep
        if sleep.until is not None:
            deadline = self._engine.deadline()
            if (
                (deadline is not None and deadline < sleep.until)
                or self._link.backlog
                or (self._taken and self._driver_condition())
            ):
                sleep.call()

    @staticmethod
    def _offer(grip: LockHold) -> None:
        """Let the thread in the door go first."""
        grip.release()
        grip.enter()

    def drive_until(self, condition: Callable[[], object], deadline: float | None = None) -> bool:
        """Wait until `condition()` is true (asked with the lock held), at most until `deadline`.

        Returns whether it is. Raises `DeviceClosed` where the device is closed, before or meanwhile.
        """
        grip = LockHold(self.lock, self._door)
        waiter: _Waiter | None = None
        try:
            grip.enter()
            while True:
                if self.closed:
                    raise DeviceClosed("the device is closed")
                if condition():
                    return True
                if not self._taken:
                    return self._take_seat(grip, condition, deadline)
                waiter = _Waiter(condition)
                in_time = self._hang_up(grip, waiter, deadline)
                if waiter.told:
                    return True
                if not in_time:
                    return bool(condition())
        finally:
            try:
                self._leave(grip, waiter)
            finally:
                # Only where an interrupt has kept us from it.
                if grip.held:
                    grip.release()

    def _leave(self, grip: LockHold, waiter: _Waiter | None) -> None:
        if waiter is not None and waiter in self._waiters:
            grip.regain()
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        if grip.held:
            try:
                if self._waiters and not self._taken:
                    # We leave the seat, or were called to it and have no more need of it.
                    self._waiters.pop(0).gate.release()
            finally:
                grip.release()

    def _hang_up(self, grip: LockHold, waiter: _Waiter, deadline: float | None) -> bool:
        """Let the driver check the condition, until it holds or we are called to the seat; False when the
        time is over. A thread whose condition held does not need the lock, which the driver keeps."""
        self._waiters.append(waiter)
        grip.release()
        in_time = self._wait_at(waiter.gate, deadline)
        if not waiter.told:
            grip.enter()
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        return in_time

    def _take_seat(self, grip: LockHold, condition: Callable[[], object], deadline: float | None) -> bool:
        """Drive until the condition holds or the time is over; the lock is held afterwards."""
        try:
            self._taken = True
            self._driver_condition = condition
            self.drives += 1
            return self._drive(grip, condition, deadline)
        finally:
            try:
                self._give_seat_back(grip)
            finally:
                if self._taken:
                    self._give_seat_back(grip)

    def _give_seat_back(self, grip: LockHold) -> None:
        grip.regain()
        self._taken = False
        self._driver_condition = _never
        try:
            self._let_nobody_oversleep()
        finally:
            if self._parked_long:
                self._parked_long = False
                self._parked.set()

    def drive_once(self) -> None:
        """Receive and handle due events without waiting: for programs that poll in a loop."""
        self.enter()
        try:
            if not self.closed and not self._taken:
                self.drives += 1
                self._round(_never)
                self._settle()
                self._let_nobody_oversleep()
        finally:
            self.lock.release()

    def _wait_at(self, gate: threading.Lock, deadline: float | None) -> bool:
        """Sleep until the gate opens; False when the time is over."""
        return gate.acquire(timeout=-1 if deadline is None else max(deadline - self._clock(), 0.0))

    def _tell_waiters(self) -> None:
        for waiter in self._waiters[:]:
            if waiter.condition():
                self._waiters.remove(waiter)
                waiter.told = True
                waiter.gate.release()

    def _drive(self, grip: LockHold, condition: Callable[[], object], deadline: float | None) -> bool:
        """With the lock held; it is free during sleeps."""
        while True:
            more = self._round(condition)
            self._settle()
            if condition():
                return True
            if self.closed:
                raise DeviceClosed("the device was closed")
            if more:
                self._offer(grip)
                continue
            now = self._clock()
            if deadline is not None and now >= deadline:
                return False
            self._sleep(grip, self._driver_sleep, now, deadline)
            if self.closed:
                raise DeviceClosed("the device was closed")

    def _round(self, condition: Callable[[], object]) -> bool:
        """Receive up to `ROUND_BURSTS`, or until the condition holds; whether there may be more.

        Sends after every second burst only, and else leaves it to `_settle`: acknowledgements of several
        bursts become one, and the peer still does not wait for them. Nothing stays in the link, since poll()
        would not report it.
        """
        link, take, clock = self._link, self._engine.receive, self._clock
        left = ROUND_BYTES
        for number in range(ROUND_BURSTS):
            received = link.receive()
            if received is None:
                return False
            self._bursts += 1
            now = clock()
            data = received[0]
            take(data, received[1], received[2], now, received[3], received[4])
            left -= len(data)
            self._bytes_since_sleep += len(data)
            if left <= 0 or condition():
                break
            if number & 1 or len(data) > MAX_DATAGRAM:
                self._send(now)
        while (received := link.pending()) is not None:
            take(received[0], received[1], received[2], clock(), received[3], received[4])
        return True

    def _send(self, now: float) -> None:
        engine, link = self._engine, self._link
        while (burst := engine.next_burst(now)) is not None:
            link.send(burst)

    def _settle(self) -> None:
        """Handle due events, send, and wake threads whose conditions hold."""
        engine, link = self._engine, self._link
        now = self._clock()
        deadline = engine.deadline()
        if deadline is not None and deadline <= now:
            engine.advance(now)
        if link.backlog:
            link.flush()
        self._send(now)
        if self._waiters:
            self._tell_waiters()

    def _sleep(self, grip: LockHold, sleep: Sleep, now: float, deadline: float | None) -> None:
        """Sleep until a datagram, a deadline or a call; without the lock."""
        until = now + MAX_SLEEP_S if deadline is None else deadline
        due = self._engine.deadline()
        if due is not None and due < until:
            until = due
        # Only a driver lingers: no thread waits for the progress thread.
        lively = self._bursts != self._bursts_at_sleep and sleep is self._driver_sleep
        little = self._bytes_since_sleep <= LINGER_BYTES
        self._bursts_at_sleep = self._bursts
        self._bytes_since_sleep = 0
        if lively and self._engine.expects >= NAP_BYTES and not self._link.backlog:
            sleep.nap(grip)
            return
        sleep.sleep(grip, now, until, self._link.backlog > 0, lively and little)

    def _progress(self) -> None:
        """Drive while no other thread does, until the device is closed."""
        grip = LockHold(self.lock, self._door)
        grip.acquire()
        try:
            while not self.closed:
                seen = self.drives
                if not self._taken:
                    self._drive_alone(grip, seen)
                self._park(grip)
        finally:
            if grip.held:
                grip.release()

    def _drive_alone(self, grip: LockHold, seen: int) -> None:
        """Drive without the seat, so that another thread can take it at once."""
        trouble = 0.0
        while not self.closed and not self._taken and self.drives == seen:
            try:
                more = self._round(_never)
                self._settle()
            except Exception:
                # A bug of ours. The device goes on for the other users' sake.
                self._tell_of_error()
                trouble = min(max(2 * trouble, PARK_S), MAX_TROUBLE_S)
                self._wait_parked(grip, trouble)
                continue
            trouble = 0.0
            if more:
                self._offer(grip)
            else:
                self._sleep(grip, self._progress_sleep, self._clock(), None)

    def _tell_of_error(self) -> None:
        now = self._clock()
        if self._told_at is None or now - self._told_at >= TELL_S:
            log.exception("the progress thread met an error; %d more since it said so last", self._untold)
            self._told_at, self._untold = now, 0
        else:
            self._untold += 1

    def _park(self, grip: LockHold) -> None:
        """Stay away until no driver has been seen for a while. With the lock held, let go inside."""
        patience = PARK_S
        while not self.closed:
            seen, occupied = self.drives, self._taken
            self._wait_parked(grip, patience)
            if self.drives != seen:
                patience = min(2 * patience, MAX_PARK_S)
                continue
            if not self._taken:
                return
            if occupied:
                # The same driver for all that time: it calls when it leaves.
                self._parked_long = True
                self._wait_parked(grip, None)

    def _wait_parked(self, grip: LockHold, patience: float | None) -> None:
        self._parked.clear()
        grip.release()
        self._parked.wait(patience)
        grip.acquire()

    def close(self) -> None:
        """End all waiting, with `DeviceClosed`, and the progress thread. Closing twice is fine."""
        with self.lock:
            already, self.closed = self.closed, True
            if not already:
                for waiter in self._waiters:
                    waiter.gate.release()
                self._waiters.clear()
                self._parked_long = False
                self._parked.set()
                self._driver_sleep.call()
                self._progress_sleep.call()
        if self._progressing.is_alive() and threading.current_thread() is not self._progressing:
            self._progressing.join()
        if already:
            return
        while self._busy():
            # The driver has been woken and is on its way out; it still polls these descriptors.
            time.sleep(PARK_S)
        self._driver_sleep.close()
        self._progress_sleep.close()

    def _busy(self) -> bool:
        with self.lock:
            return self._taken


def _never() -> bool:
    return False
