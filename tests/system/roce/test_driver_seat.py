"""The driver's seat with an engine and a link made for the test: fairness, errors, deadlines, the backlog."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from emulator.roce.link.base import LinkCounters, Received
from emulator.roce.nic.verbs import Address, Burst
from emulator.roce.runtime.driver_seat import LINGER_BYTES, ROUND_BURSTS, Seat
from emulator.roce.runtime.lock_hold import LockHold
from emulator.roce.runtime.sleep import DOUBT, LINGER_S, RARELY, TRUST, Sleep
from tests.support.waiting import wait_until


class PairLink:
    """One end of a socket pair; what arrives is bytes, what is sent is counted."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.counters = LinkCounters()
        self.address = Address("here")
        self.receive_buffer_bytes = 1 << 20
        self.waiting: list[bytes] = []
        self.blocked = False
        self.endless = False
        """There is always something to receive."""
        self.least = 0
        """What arrives is made as long as this."""

    @property
    def backlog(self) -> int:
        return len(self.waiting)

    def numbers_segments(self, ip: str) -> bool:
        return False

    def pending(self) -> Received | None:
        return None

    def receive(self) -> Received | None:
        if self.endless:
            return Received(memoryview(b"again"), 5, self.address)
        try:
            data = self.sock.recv(2048)
        except OSError:
            return None
        return Received(memoryview(data.ljust(self.least)), len(data), self.address) if data else None

    def send(self, burst: Burst) -> None:
        self.waiting.append(bytes(burst.data))
        self.flush()

    def flush(self) -> None:
        while self.waiting and not self.blocked:
            self.sock.send(self.waiting.pop(0))

    def groups_fileno(self) -> int:
        return -1

    def join(self, group: str) -> None:
        raise OSError

    def leave(self, group: str) -> None:
        raise OSError

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()


class CountingEngine:
    """Notes what it is given; sends and wakes as told."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.bursts = 0
        self.outgoing: list[bytes] = []
        self.due: float | None = None
        self.expects = 0
        self.advanced = 0
        self.trip: Callable[[bytes], None] = lambda data: None

    def receive(
        self,
        burst: memoryview,
        segment_size: int,
        source: Address,
        now: float,
        group: str = "",
        marked: bool = False,
    ) -> None:
        self.bursts += 1
        if len(self.got) < 1000:
            self.got.append(bytes(burst))
        self.trip(bytes(burst))

    def deadline(self) -> float | None:
        return self.due

    def advance(self, now: float) -> None:
        self.advanced += 1
        self.due = None

    def next_burst(self, now: float) -> Burst | None:
        if not self.outgoing:
            return None
        data = self.outgoing.pop(0)
        return Burst(memoryview(data), len(data), Address("there"))


class Stand:
    """A seat with its engine and link, and the other end of the link."""

    def __init__(self) -> None:
        own, self.other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.other.settimeout(20)
        self.link = PairLink(own)
        self.engine = CountingEngine()
        self.seat = Seat(self.engine, self.link, "test")
        self.seat.start()

    def close(self) -> None:
        self.seat.close()
        self.link.close()
        self.other.close()


@pytest.fixture
def stand() -> Iterator[Stand]:
    stand = Stand()
    try:
        yield stand
    finally:
        stand.link.endless = False
        stand.close()


def test_the_progress_thread_receives_when_nobody_drives(stand: Stand) -> None:
    stand.other.send(b"hello")
    wait_until(lambda: stand.engine.got == [b"hello"])


def test_a_driver_receives_for_itself(stand: Stand) -> None:
    stand.other.send(b"one")
    assert stand.seat.drive_until(lambda: b"one" in stand.engine.got, time.monotonic() + 20)


def test_a_turn_sends_what_it_has_caused(stand: Stand) -> None:
    with stand.seat.turn():
        stand.engine.outgoing.append(b"now")
    assert stand.other.recv(100) == b"now"


def test_a_deadline_is_kept_by_the_progress_thread(stand: Stand) -> None:
    with stand.seat.turn():
        stand.engine.due = time.monotonic() + 0.02
    wait_until(lambda: stand.engine.advanced)


def test_a_deadline_that_a_driver_leaves_behind_is_kept(stand: Stand) -> None:
    """The progress thread slept without end when the driver came; it must not go on sleeping."""
    wait_until(lambda: stand.seat._progress_sleep.until is not None)
    soon = time.monotonic() + 0.05

    def condition() -> bool:
        stand.engine.due = soon
        return True

    assert stand.seat.drive_until(condition, soon)
    assert not stand.seat.drive_until(lambda: False, time.monotonic())
    wait_until(lambda: stand.engine.advanced)


def test_what_the_link_could_not_send_goes_when_it_can(stand: Stand) -> None:
    stand.link.blocked = True
    with stand.seat.turn():
        stand.engine.outgoing.append(b"later")
    assert stand.link.backlog == 1
    stand.link.blocked = False
    # The socket is writable, which wakes whoever sleeps on it with something to send.
    assert stand.other.recv(100) == b"later"


def test_a_busy_driver_lets_others_have_their_turn(stand: Stand) -> None:
    stand.link.endless = True
    over = threading.Event()
    driver = threading.Thread(target=lambda: stand.seat.drive_until(over.is_set, None))
    driver.start()
    wait_until(lambda: stand.engine.bursts > 10 * ROUND_BURSTS)
    turns = 0

    def take_turns() -> None:
        nonlocal turns
        for _ in range(50):
            with stand.seat.turn():
                turns += 1

    other = threading.Thread(target=take_turns)
    other.start()
    other.join(60)
    over.set()
    driver.join(20)
    assert not driver.is_alive()
    other.join(20)
    assert turns == 50


def test_the_progress_thread_survives_a_bug(stand: Stand, expects_log: Callable[..., None]) -> None:
    expects_log("the progress thread met an error")

    def trip(data: bytes) -> None:
        if data == b"bad":
            raise RuntimeError("a bug")

    stand.engine.trip = trip
    stand.other.send(b"bad")
    wait_until(lambda: b"bad" in stand.engine.got)
    stand.other.send(b"good")
    wait_until(lambda: b"good" in stand.engine.got)


def test_an_error_that_stays_is_told_once_and_met_ever_more_rarely(
    stand: Stand, expects_log: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    expects_log("the progress thread met an error")
    met: list[float] = []

    def trip(data: bytes) -> None:
        met.append(time.monotonic())
        raise RuntimeError("a bug")

    stand.engine.trip = trip
    stand.link.endless = True
    stand.other.send(b"there is something")
    wait_until(lambda: len(met) > 10)
    # 1 ms, twice that, and so on to 250.
    assert met[10] - met[0] >= 0.75
    assert len([record for record in caplog.records if "met an error" in record.message]) == 1
    stand.engine.trip = lambda data: None
    stand.link.endless = False
    stand.other.send(b"good")
    wait_until(lambda: b"good" in stand.engine.got)


def test_an_error_in_a_drivers_round_is_the_drivers_and_frees_the_seat(stand: Stand) -> None:
    def condition() -> bool:
        raise RuntimeError("the condition's own")

    with pytest.raises(RuntimeError, match="own"):
        stand.seat.drive_until(condition, time.monotonic() + 20)
    stand.other.send(b"still here")
    assert stand.seat.drive_until(lambda: b"still here" in stand.engine.got, time.monotonic() + 20)


def test_the_one_who_waits_gets_the_seat_when_the_driver_leaves(stand: Stand) -> None:
    first_over = threading.Event()
    answered = threading.Event()

    def first() -> None:
        stand.seat.drive_until(lambda: b"first" in stand.engine.got, None)
        first_over.set()

    def second() -> None:
        stand.seat.drive_until(lambda: b"second" in stand.engine.got, None)
        answered.set()

    threads = [threading.Thread(target=first)]
    threads[0].start()
    wait_until(lambda: stand.seat._taken)
    threads.append(threading.Thread(target=second))
    threads[1].start()
    wait_until(lambda: stand.seat._waiters)
    stand.other.send(b"first")
    assert first_over.wait(20)
    stand.other.send(b"second")
    assert answered.wait(20)
    for thread in threads:
        thread.join(20)


def test_the_driver_serves_those_who_wait(stand: Stand) -> None:
    over = threading.Event()
    driver = threading.Thread(target=lambda: stand.seat.drive_until(lambda: b"end" in stand.engine.got, None))
    driver.start()
    wait_until(lambda: stand.seat._taken)
    waiter = threading.Thread(
        target=lambda: (stand.seat.drive_until(lambda: b"mine" in stand.engine.got, None), over.set())
    )
    waiter.start()
    wait_until(lambda: stand.seat._waiters)
    stand.other.send(b"mine")
    assert over.wait(20)
    assert stand.seat._taken
    stand.other.send(b"end")
    driver.join(20)
    waiter.join(20)


def test_who_receives_much_does_not_look_again(stand: Stand) -> None:
    def looks(least: int) -> int:
        """How often a driver looks before it sleeps, once it has received so much."""
        stand.link.least = least
        sleep, over, asked = stand.seat._driver_sleep, threading.Event(), 0
        before = sleep._looks

        def is_over() -> bool:
            nonlocal asked
            asked += 1
            if asked == 1:
                # We are in the seat, so nobody else receives it.
                stand.other.send(b"now")
            return over.is_set()

        def wake() -> None:
            wait_until(lambda: sleep.until is not None)
            over.set()
            with stand.seat.turn():
                pass

        waking = threading.Thread(target=wake)
        waking.start()
        assert stand.seat.drive_until(is_over, time.monotonic() + 20)
        waking.join(20)
        return sleep._looks - before

    assert looks(0) == 1
    assert looks(LINGER_BYTES) == 1
    assert looks(LINGER_BYTES + 1) == 0
    assert looks(0) == 1


def test_who_looks_in_vain_again_and_again_looks_rarely() -> None:
    """A sleep that follows a datagram begins with looking for the next, as long as that pays."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    asked = 0

    def clock() -> float:
        nonlocal asked
        asked += 1
        return asked * LINGER_S / 10

    link = PairLink(own)
    sleep = Sleep(link, clock)
    grip = LockHold(threading.Lock(), threading.Lock())
    grip.acquire()

    def looked() -> bool:
        """Whether a sleep of no length begins with looking."""
        before, now = asked, asked * LINGER_S / 10
        sleep.sleep(grip, now, now + LINGER_S / 2, False, lively=True)
        return asked > before

    try:
        assert [looked() for _ in range(DOUBT + 3)] == [True] * DOUBT + [False] * 3
        assert sum(looked() for _ in range(4 * RARELY)) == 4
        other.send(b"there it is")
        while not looked():
            pass
        # It has paid, so it is tried again, for as often as one look in so many pays.
        link.receive()
        assert [looked() for _ in range(TRUST + 1)] == [True] * TRUST + [False]
        for _ in range(DOUBT // TRUST):
            other.send(b"and again")
            while not looked():
                pass
        while link.receive() is not None:
            pass
        assert [looked() for _ in range(DOUBT + 1)] == [True] * DOUBT + [False]
        before = asked
        sleep.sleep(grip, 0.0, 0.0, False, lively=False)
        assert asked == before
    finally:
        sleep.close()
        link.close()
        other.close()


def _interrupted_at(number: int, call: Callable[[], object]) -> bool:
    """Run it in this thread, with a KeyboardInterrupt right after the given call of C that the seat's code
    makes, where a real one would come as well; False where it makes fewer."""
    made = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal made
        if event == "c_return" and "roce/runtime" in frame.f_code.co_filename:
            made += 1
            if made == number:
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False


@pytest.mark.parametrize("how", ["drive", "turn", "wait for the seat"])
def test_an_interrupt_at_any_step_leaves_the_seat_as_it_was(how: str) -> None:
    """Ctrl-C may come between any two steps. It may cost a datagram, as a network does; lock and seat are
    free afterwards, and the device goes on."""
    number = 1
    while _is_interrupted_and_as_it_was(how, number):
        number += 1
    assert number > (3 if how == "turn" else 10)


def _is_interrupted_and_as_it_was(how: str, number: int) -> bool:
    stand = Stand()
    seat, engine = stand.seat, stand.engine
    other = threading.Thread(target=seat.drive_until, args=(lambda: b"two" in engine.got,))

    def drive() -> None:
        engine.outgoing.append(b"answer")
        asked = 0

        def four_times() -> bool:
            """So that it has slept; a deadline might be over before that, and the rest would not be tried."""
            nonlocal asked
            asked += 1
            engine.due = time.monotonic() + 0.002
            return asked > 3

        assert seat.drive_until(four_times)

    def wait() -> None:
        engine.outgoing.append(b"answer")
        seat.drive_until(lambda: False, time.monotonic() + 0.002)

    def turn() -> None:
        with seat.turn():
            engine.outgoing.append(b"out")

    try:
        stand.other.send(b"one")
        if how == "wait for the seat":
            other.start()
            wait_until(lambda: seat._taken)
        call = {"drive": drive, "turn": turn, "wait for the seat": wait}[how]
        interrupted = _interrupted_at(number, call)
        assert seat.lock.acquire(timeout=20), f"the lock is lost after call {number}"
        seat.lock.release()
        stand.other.send(b"two")
        assert seat.drive_until(lambda: b"two" in engine.got, time.monotonic() + 20), number
        if how == "wait for the seat":
            other.join(20)
            assert not other.is_alive()
        assert not seat._taken
        assert not seat._waiters
    finally:
        stand.close()
    return interrupted
