"""A client whose calls are interrupted by signals, on the whole path."""

from __future__ import annotations

import errno
import random
import signal
import threading
import time
from types import FrameType

import pytest

from host_shim.block_key import key_of
from tests.support.pool_up import PoolUp
from tests.support.waiting import wait_until

KEYS = [key_of(f"interrupted {number}") for number in range(32)]
VALUES = [random.Random(number).randbytes(16 << 10) for number in range(32)]
INTERRUPTS = 120
TRIES_MAX = 4000


class Interrupter:
    """Raises an exception in this thread, out of the handler of a signal, a while after `arm`."""

    def __init__(self) -> None:
        self.seed = random.Random(35)
        self.raised: BaseException | None = None
        self.is_armed = False

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.is_armed:
            self.is_armed = False
            self.raised = self.seed.choice(
                [
                    KeyboardInterrupt(),
                    TimeoutError("an alarm"),
                    TimeoutError(errno.ETIMEDOUT, "an alarm"),
                    BlockingIOError(errno.EAGAIN, "not now"),
                    InterruptedError(errno.EINTR, "by hand"),
                    OSError(errno.EIO, "a log that cannot be written"),
                ]
            )
            raise self.raised

    def arm(self, seconds: float) -> threading.Timer:
        self.raised = None
        timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
        timer.start()
        self.is_armed = True
        return timer


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_each_reaches_the_caller_and_nothing_is_lost(whole_pool: PoolUp) -> None:
    interrupter, before = Interrupter(), None
    pool = whole_pool.pool()
    volume = pool.volume("kv")
    buffers = [memoryview(bytearray(16 << 10)) for _ in KEYS]
    rooms = pool.memory(len(KEYS) * (16 << 10))
    registered = [rooms[at * (16 << 10) :][: 16 << 10] for at in range(len(KEYS))]
    wait_until(lambda: all(volume.put_many(KEYS, VALUES)), 30)

    def check(lengths: list[int | None], views: list[memoryview]) -> None:
        for length, view, value in zip(lengths, views, VALUES, strict=True):
            assert length is None or view[:length] == value, "a wrong byte"

    calls = [
        lambda: check(volume.get_many(KEYS, buffers), buffers),
        lambda: check(volume.get_many(KEYS, registered), registered),
        lambda: check([volume.get_into(*each) for each in zip(KEYS, buffers, strict=True)], buffers),
        lambda: check([volume.get_into(*each) for each in zip(KEYS, registered, strict=True)], registered),
        lambda: volume.exists(KEYS),
        lambda: volume.put_many([key_of(f"new {time.monotonic_ns()} {at}") for at in range(8)], VALUES[:8]),
        lambda: volume.stats(),
    ]
    came, took = 0, [0.001] * len(calls)
    before = signal.signal(signal.SIGUSR1, interrupter.handle)
    try:
        for number in range(TRIES_MAX):
            which, caught = number % len(calls), None
            start = time.perf_counter()
            timer = interrupter.arm(random.Random(number).uniform(0, took[which]))
            try:
                calls[which]()
                took[which] = min(0.1, time.perf_counter() - start)
                interrupter.is_armed = False
            except (KeyboardInterrupt, OSError) as error:
                caught = error
            interrupter.is_armed = False
            timer.cancel()
            timer.join(20)
            assert caught is interrupter.raised
            came += caught is not None
            del caught
            if came == INTERRUPTS:
                break
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert came
    wait_until(lambda: volume.get_many(KEYS, buffers) == [len(value) for value in VALUES], 30)
    check(volume.get_many(KEYS, buffers), buffers)
    interrupter.raised = None
    assert len(pool._lender._open) == len(pool._lender.free)
    assert not any(each.is_lent for each in pool._memory._asides)
    assert pool.close()
