"""An exception of a signal's handler amid a call of the client: it reaches the caller, whatever it is, and
leaves nothing behind.

Python runs such handlers when a function begins, and when a call into C has returned. A profiler hears of
both, so that one that raises stands for a handler at each of these places in turn.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

import host_shim
from agent.fs.control.registered_memory import RegisteredMemory
from host_shim.connector_jobs import JobRunner, share, within
from host_shim.control_wire import Outcome
from host_shim.pool import Pool, Volume
from host_shim.session_files import Files, Refusal, is_own
from host_shim.transfer_wire import SHORT_BYTES
from tests.support.engines import session_door
from tests.support.engines.counted_door import Counted, agent_with, filled, value_of
from tests.support.engines.drained import drained
from tests.support.engines.scripted_agent import AgentThatGivesAtOnce, ScriptedAgent
from tests.support.pool.memory_pool import key_of
from tests.support.waiting import wait_until

OURS = f"{host_shim.__path__[0]}/"
KEYS = [key_of(number) for number in range(4)]
LENGTHS = [len(value_of(number)) for number in range(4)]
EXCEPTIONS: list[BaseException] = [
    KeyboardInterrupt(),
    TimeoutError("an alarm"),
    TimeoutError(errno.ETIMEDOUT, "an alarm"),
    BlockingIOError(errno.EAGAIN, "not now"),
    InterruptedError(errno.EINTR, "by hand"),
    OSError(errno.EIO, "a log that cannot be written"),
    ConnectionAbortedError(errno.ECONNABORTED, "no answer"),
]


def is_agents(frame: FrameType | None) -> bool:
    """Whether it is the agent, of this process here, that calls this."""
    while frame is not None:
        if frame.f_code.co_filename == session_door.__file__:
            return True
        frame = frame.f_back
    return False


class Interrupts:
    """While it is entered, the handler runs at the place with this number in the client's code."""

    def __init__(self, at: int, raised: BaseException) -> None:
        self.left = at
        self.raised = raised
        self.has_come = ""
        """Where."""

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        # What a handler raises amid `__del__` is written to stderr by Python, and ends there.
        if event not in ("call", "c_return") or frame.f_code.co_name == "__del__":
            return
        if not frame.f_code.co_filename.startswith(OURS) or is_agents(frame):
            return
        self.left -= 1
        if self.left < 0 and not self.has_come:
            self.has_come = f"{event} in {frame.f_code.co_name}, line {frame.f_lineno}"
            raise self.raised

    def __enter__(self) -> Interrupts:
        sys.setprofile(self)
        return self

    def __exit__(self, *_exception: object) -> None:
        sys.setprofile(None)


def get_into(volume: Volume, size: int = SHORT_BYTES) -> bool:
    buffer = memoryview(bytearray(size))
    length = volume.get_into(KEYS[2], buffer)
    return length is not None and buffer[:length] == value_of(2)


def get_registered(volume: Volume) -> bool:
    buffer = volume._pool.memory(SHORT_BYTES)
    length = volume.get_into(KEYS[2], buffer)
    return length is not None and buffer[:length] == value_of(2)


def fetch(volume: Volume, size: int = SHORT_BYTES) -> bool:
    buffers = [bytearray(size) for _ in KEYS]
    found = volume.fetch([*KEYS, key_of(99)], [*buffers, bytearray(size)])
    return [one.length for one in found] == [*LENGTHS, None] and all(
        buffer[:length] == value_of(number)
        for number, (buffer, length) in enumerate(zip(buffers, LENGTHS, strict=True))
    )


CALLS: dict[str, Callable[[Volume], bool]] = {
    "get_into": get_into,
    "get_into, long": lambda volume: get_into(volume, 300_000),
    "get_into, registered": get_registered,
    "get": lambda volume: volume.get(KEYS[2]) == value_of(2),
    "fetch": fetch,
    "fetch, each": lambda volume: fetch(volume, SHORT_BYTES + 1),
    "put": lambda volume: volume.put(KEYS[3], value_of(3)),
    "put_many": lambda volume: all(volume.put_many(KEYS, [value_of(number) for number in range(4)])),
    "lookup": lambda volume: volume.lookup([KEYS[0], key_of(99)]) == [Outcome.HIT, Outcome.NEVER_STORED],
    "stats": lambda volume: volume.stats()["name"] == "v",
}


@pytest.mark.parametrize("name", CALLS)
def test_wherever_it_comes_it_reaches_the_caller_and_leaves_nothing(
    name: str, memory: RegisteredMemory
) -> None:
    call, number, is_whole = CALLS[name], 0, False
    agent = agent_with()
    with Pool("/nowhere", files=Counted(agent, memory)) as pool:
        filled(pool, 10)
    while not is_whole:
        pool = Pool("/nowhere", files=Counted(agent, memory), sessions=2, parallel=3)
        volume, lender = pool.volume("v"), pool._lender
        interrupts = Interrupts(number, EXCEPTIONS[number % len(EXCEPTIONS)])
        with interrupts:
            is_whole, caught = outcome_of(call, volume)
        place = interrupts.has_come
        # The traceback of `caught` still has what the call's functions held.
        assert caught is (interrupts.raised if place else None), f"swallowed: {place}"
        assert is_whole or place, "a miss"
        assert len(lender._open) == len(lender.free), f"a session was lost: {place}"
        assert not any(each.is_lent for each in pool._memory._asides), f"memory was lost: {place}"
        assert call(volume), f"a miss after {place}"
        assert len(pool._memory._by_address[1]) <= 3
        assert pool.close(0), f"under way after {place}"
        interrupts.raised.__traceback__ = None
        number += 1
    assert number > 20


def outcome_of(call: Callable[[Volume], bool], volume: Volume) -> tuple[bool, BaseException | None]:
    try:
        return call(volume), None
    except BaseException as caught:
        return False, caught


class WithHandler:
    """The next call of these files is interrupted by a signal whose handler raises."""

    def __init__(self, raised: BaseException) -> None:
        self.raised = raised
        self.calls_left = -1

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        raise self.raised

    def count(self) -> None:
        self.calls_left -= 1
        if self.calls_left == -1:
            signal.raise_signal(signal.SIGUSR1)


class InterruptedAgent(AgentThatGivesAtOnce):
    def __init__(self, handler: WithHandler) -> None:
        super().__init__()
        self.handler = handler

    def open(self, path: str) -> int:
        self.handler.count()
        return super().open(path)

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        written = super().pwrite(descriptor, data, offset)
        self.handler.count()
        return written

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        length = super().preadv(descriptor, into, offset)
        self.handler.count()
        return length

    def fgetxattr(self, descriptor: int, name: bytes, into: memoryview) -> int:
        length = super().fgetxattr(descriptor, name, into)
        self.handler.count()
        return length


@contextlib.contextmanager
def handling(handler: WithHandler) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handler.handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("raised", EXCEPTIONS, ids=repr)
@pytest.mark.parametrize(
    "name", ["get_into", "get_into, long", "get", "fetch", "put_many", "lookup", "stats"]
)
def test_no_system_call_takes_it_for_an_answer(name: str, raised: BaseException) -> None:
    handler = WithHandler(raised)
    agent = InterruptedAgent(handler)
    with Pool("/nowhere", files=agent, sessions=2, parallel=1) as pool, handling(handler):
        volume = pool.volume("v")
        agent.serve(("v",))
        agent.values.update({("v", KEYS[number]): value_of(number) for number in range(4)})
        number, is_whole = 0, False
        while not is_whole:
            handler.calls_left = number
            is_whole, caught = outcome_of(CALLS[name], volume)
            if caught is not None:
                assert caught is raised
                assert CALLS[name](volume), "the answer of the one before was taken for its own"
            number += 1
        assert handler.calls_left >= 0, "the exception was swallowed"
        assert number > 1
    assert not agent.open_files


def test_what_a_system_call_says_is_a_refusal_and_what_a_handler_raises_is_none(tmp_path: object) -> None:
    files = Files()
    with pytest.raises(Refusal) as refused:
        files.open(f"{tmp_path}/nothing")
    assert refused.value.errno == errno.ENOENT
    assert "nothing" in str(refused.value)
    for call in (
        lambda: files.pwrite(-1, b"x", 0),
        lambda: files.preadv(-1, memoryview(bytearray(1)), 0),
        lambda: files.pwritev(-1, [memoryview(b"x")], 0),
        lambda: files.preadv_parts(-1, [memoryview(bytearray(1))], 0),
        lambda: files.ioctl(1 << 20, 0, bytearray(8)),
        lambda: files.ioctl(-1, 0, bytearray(4096)),
        lambda: files.fgetxattr(-1, b"user.x", memoryview(bytearray(8))),
        lambda: files.close(1 << 20),
    ):
        with pytest.raises(Refusal) as refused:
            call()
        assert refused.value.errno == errno.EBADF
    with pytest.raises(OSError, match="a handler's") as caught:
        raise OSError(errno.EIO, "a handler's")
    assert not is_own(caught.value)
    assert not is_own(OSError(errno.EIO, "made and never raised"))


@pytest.mark.parametrize("raised", EXCEPTIONS[:3], ids=repr)
def test_the_callers_own_goes_before_what_a_helper_raises(raised: BaseException) -> None:
    runner, caller = JobRunner("test-interrupts", threads=1), threading.current_thread()
    helped, failed = threading.Event(), threading.Event()

    def work(_number: int) -> None:
        if threading.current_thread() is caller:
            assert helped.wait(20)
            failed.set()
            raise raised
        helped.set()
        assert failed.wait(20)
        raise Refusal(errno.EIO, "a helper's")

    with pytest.raises(type(raised)) as caught:
        share(runner, 1, work, 100)
    assert caught.value is raised
    assert drained(runner, 10)
    assert runner.close(10)


def test_helpers_are_waited_for_wherever_it_comes() -> None:
    caller, number, has_come = threading.current_thread(), 0, "yes"
    while has_come:
        runner, under_way = JobRunner("test-interrupts", threads=2), []
        go = threading.Event()

        def work(number: int) -> None:
            if threading.current_thread() is caller:
                go.set()  # noqa: B023
                return
            under_way.append(number)  # noqa: B023
            assert go.wait(0.05) or True  # noqa: B023
            under_way.remove(number)  # noqa: B023

        interrupts = Interrupts(number, KeyboardInterrupt())
        with contextlib.suppress(KeyboardInterrupt), interrupts:
            share(runner, 2, work, 6)
        assert not under_way, f"a helper is at work after an interrupt at {number}"
        has_come = interrupts.has_come
        number += 1
        assert runner.close(10)
    assert number > 10


def test_an_alarm_amid_a_wait_for_an_answer_reaches_the_caller() -> None:
    raised, go = TimeoutError("an alarm"), threading.Event()
    handler = WithHandler(raised)
    with handling(handler):
        interrupting = threading.Timer(0.02, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
        interrupting.start()
        with pytest.raises(TimeoutError) as caught:
            within(20, lambda: go.wait(20), None)
    go.set()
    interrupting.join()
    assert caught.value is raised


def test_a_session_that_is_lost_makes_room_for_another() -> None:
    agent = ScriptedAgent(("v",))
    with Pool("/nowhere", files=agent, sessions=1) as pool:
        assert pool.alive()
        pool._lender.free.pop().close()  # and nobody has it any more
        assert pool.alive()
        assert len(pool._lender._open) == 1


def test_a_call_that_waits_sees_a_session_that_came_back_unheard() -> None:
    agent = ScriptedAgent(("v",))
    with Pool("/nowhere", files=agent, sessions=1) as pool:
        session = pool._lender.take()
        assert session is not None
        found: list[bool] = []
        waiting = threading.Thread(target=lambda: found.append(pool.alive()))
        waiting.start()
        pool._lender.free.append(session)
        waiting.join(20)
        assert found == [True]
        session = pool._lender.take()
        assert session is not None
        dropping = threading.Thread(target=lambda: found.append(pool.alive()))
        dropping.start()
        session.close()
        del session
        dropping.join(20)
        assert found == [True, True]


def test_a_call_that_waits_is_given_no_session_whose_answer_may_be_waiting() -> None:
    agent = ScriptedAgent(("v",))
    with Pool("/nowhere", files=agent, sessions=1) as pool:
        session = pool._lender.take()
        assert session is not None
        session.dead = True
        found: list[bool] = []
        waiting = threading.Thread(target=lambda: found.append(pool.alive()))
        waiting.start()
        wait_until(lambda: bool(pool._lender._waiting), 20)
        pool._lender.free.append(session)  # an interrupt comes before it is tended
        del session
        waiting.join(20)
        assert found == [True]
        assert agent.opens == 2
