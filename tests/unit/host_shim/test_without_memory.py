"""A client for which the machine has no memory: misses and puts that did not happen, and no exception."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from host_shim import control_session as session_module
from host_shim.block_key import key_of
from host_shim.control_wire import Outcome
from host_shim.named_values import NamedValues
from host_shim.pool import Fetched, Pool, Volume
from host_shim.session_files import Refusal
from tests.support.engines.scripted_agent import ScriptedAgent

KEY, OTHER = key_of("one"), key_of("other")
LONG = b"x" * 200_000


class StarvedAgent(ScriptedAgent):
    """The call with this number, counted from `starve` on, finds no memory."""

    def __init__(self, failure: BaseException) -> None:
        super().__init__()
        self.failure = failure
        self.left = -1

    def starve(self, calls: int) -> None:
        self.left = calls

    def _count(self) -> None:
        self.left -= 1
        if self.left == -1:
            raise self.failure

    def open(self, path: str) -> int:
        self._count()
        return super().open(path)

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        self._count()
        return super().pwrite(descriptor, data, offset)

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        self._count()
        return super().preadv(descriptor, into, offset)


CALLS: dict[str, tuple[Callable[[Volume], object], object]] = {
    "get_into": (lambda volume: volume.get_into(KEY, bytearray(300_000)), len(LONG)),
    "get_into, a full buffer": (lambda volume: volume.get_into(KEY, bytearray(len(LONG))), len(LONG)),
    "get": (lambda volume: volume.get(KEY), LONG),
    "get_many": (lambda volume: volume.get_many([KEY], [bytearray(len(LONG))]), [len(LONG)]),
    "fetch": (
        lambda volume: volume.fetch([KEY, OTHER], [bytearray(300_000), bytearray(10)]),
        [Fetched(len(LONG), Outcome.HIT), Fetched(None, Outcome.NEVER_STORED)],
    ),
    "put": (lambda volume: volume.put(OTHER, b"value"), True),
    "exists": (lambda volume: volume.exists([KEY]), [True]),
    "stats": (lambda volume: volume._pool.stats().get("values"), 1),
}
MISSES: tuple[object, ...] = (
    None,
    False,
    [False],
    [None],
    [Fetched(None, None)] * 2,
    [Fetched(None, None), Fetched(None, Outcome.NEVER_STORED)],
    [Fetched(len(LONG), Outcome.HIT), Fetched(None, None)],
)


@pytest.mark.parametrize("failure", [MemoryError(), Refusal(errno.ENOMEM, "none")], ids=["python", "linux"])
@pytest.mark.parametrize("name", CALLS)
def test_no_call_raises_wherever_memory_ends(name: str, failure: BaseException) -> None:
    call, whole = CALLS[name]
    for number in range(12):
        agent = StarvedAgent(failure)
        agent.values["kv", KEY] = LONG
        with Pool("/nowhere", files=agent, sessions=1, parallel=1) as pool:
            volume = pool.volume("kv")
            agent.starve(number)
            found = call(volume)
            assert found == whole or found in MISSES, f"memory ended at call {number}"
            agent.starve(-1)
            pool._lender.ask_at_once()
            call(volume)
            assert volume.get(KEY) == LONG, "the one session there may be was given back"
        assert agent.open_files == 0


@pytest.mark.parametrize("failure", [MemoryError(), Refusal(errno.ENOMEM, "none")], ids=["python", "linux"])
def test_an_answer_without_a_buffer_is_not_asked_for(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(_size: int) -> memoryview:
        raise failure

    agent = ScriptedAgent()
    agent.values["kv", KEY] = b"value"
    with Pool("/nowhere", files=agent, sessions=1) as pool:
        volume = pool.volume("kv")
        with monkeypatch.context() as patched:
            patched.setattr(session_module, "new_memory", nothing)
            assert volume.exists([KEY]) == [False]
            assert not agent.requests
        assert volume.exists([KEY]) == [True]


def test_a_connector_goes_on_without_memory() -> None:
    for number in range(6):
        agent = StarvedAgent(MemoryError())
        with Pool("/nowhere", files=agent, sessions=1, parallel=1) as pool:
            values = NamedValues(pool, "kv")
            agent.starve(number)
            stored, room = values.store([b"name"], [[b"block"]]), bytearray(5)
            assert stored in ([True], [False])
            assert values.load([b"name"], [[room]]) in ([5], [None])
            agent.starve(-1)
            pool._lender.ask_at_once()
            assert values.store([b"name"], [[b"block"]]) == [True]
            assert values.load([b"name"], [[room]]) == [5]
            assert room == b"block"


PROGRAM = """
import os, resource, sys, threading, time
from host_shim.block_key import key_of
from host_shim.pool import Pool
from tests.support.engines.scripted_agent import ScriptedAgent
agent = ScriptedAgent()
pool = Pool("/nowhere", files=agent, sessions=4)
volume, key = pool.volume("kv"), key_of("one")
agent.values["kv", key] = b"x" * 300_000
buffers = [bytearray(300_000) for _ in range(20)]
ended, raised, got = threading.Event(), [], [0] * 20
def work(number):
    hoard = []
    while not ended.is_set():
        try:
            length = volume.get_into(key, buffers[number])
        except BaseException as error:
            raised.append(repr(error))
            return
        if length is not None and length != 300_000:
            raised.append(str(length))
        got[number] += length is not None
        try:
            hoard.append(bytearray(10_000))
        except MemoryError:
            del hoard[-5:]
threading.stack_size(256 << 10)
threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(20)]
for thread in threads:
    thread.start()
with open("/proc/self/statm") as statm:
    size = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20),) * 2)
ended.wait(1.0)
ended.set()
os.write(1, b"some" if sum(got) else b"none")
os.write(2, b"\\n".join(str(each).encode() for each in raised[:3]))
os._exit(bool(raised))
"""


def test_twenty_threads_in_a_process_that_has_no_memory_left() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[3],
    )
    assert (done.returncode, done.stdout) == (0, "some"), done.stderr
