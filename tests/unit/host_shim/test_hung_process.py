"""A client of an agent of several processes, of which one hangs: few threads wait for it. In virtual time."""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Sequence

import pytest

from host_shim.agent_processes import UNHEARD_MAX, AgentProcesses
from host_shim.block_key import key_of
from host_shim.control_session import Session, SessionLender
from host_shim.pool import Pool
from host_shim.session_files import Files
from tests.support.engines.several_processes import SeveralProcesses
from tests.support.waiting import wait_until

SERVICE = 50e-6
MORE = UNHEARD_MAX + 2
"""Threads that may come to stand still beside those that had asked already: for moments others have their
share."""


def give_back(lender: SessionLender, session: Session) -> None:
    lender.free.append(session)
    lender.tend(session)


class Opens(Files):
    """Sessions that can be opened, and no more."""

    def __init__(self, readers: int) -> None:
        self.readers = readers

    def open(self, path: str) -> int:
        return 1

    def close(self, descriptor: int) -> None:
        return

    def processes(self, folder: str) -> list[str]:
        return [f"process-{number}" for number in range(1, self.readers + 1)]


class Client:
    """So many threads, each of which asks, waits for the answer, and asks again, after `thinks` seconds on
    average. A process serves one request at a time, in their order."""

    def __init__(
        self, processes: int, threads: int, *, putting: int = 0, thinks: float = 0.0, seed: int = 35
    ) -> None:
        files, self.now, self._random = Opens(processes - 1), 0.0, random.Random(seed)
        first = SessionLender("/mnt/.g35/session", files, 64)
        self.all = [first]

        def lender(path: str) -> SessionLender:
            self.all.append(SessionLender(path, files, 64))
            return self.all[-1]

        self.processes = AgentProcesses("/mnt", files, first, lender, clock=lambda: self.now)
        give_back(first, first.take() or pytest.fail("no session"))
        self.processes.next("kv", ())  # it looks for processes
        self._putting, self._thinks = range(putting), thinks
        self._waiting: dict[SessionLender, list[tuple[int, Session]]] = {}
        self._events: list[tuple[float, int, int]] = []
        """When, process and thread: it has an answer; -1 for a process: it asks."""
        self.hung: set[int] = set()
        self.answered = [0] * threads
        """By thread."""
        self.served = [0] * processes
        for thread in range(threads):
            self._go_on_with(thread)

    def _go_on_with(self, thread: int) -> None:
        if not self._thinks:
            self._ask(thread)
            return
        after = self._random.expovariate(1 / self._thinks)
        heapq.heappush(self._events, (self.now + after, -1, thread))

    def _ask(self, thread: int) -> None:
        if thread in self._putting:
            lender = self.processes.begin_put("kv", 8)
        else:
            lender = self.processes.next("kv", (b"key",))
        session = lender.take()
        assert session is not None
        queue = self._waiting.setdefault(lender, [])
        queue.append((thread, session))
        if len(queue) == 1:
            self._serve(lender)

    def _serve(self, lender: SessionLender) -> None:
        number = self.all.index(lender)
        if number not in self.hung and self._waiting.get(lender):
            takes = self._random.expovariate(1 / SERVICE)
            heapq.heappush(self._events, (self.now + takes, number, self._waiting[lender][0][0]))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, number, thread = heapq.heappop(self._events)
            if number in self.hung:
                continue
            if number < 0:
                self._ask(thread)
                continue
            lender = self.all[number]
            _, session = self._waiting[lender].pop(0)
            self.answered[thread] += 1
            self.served[number] += 1
            give_back(lender, session)
            if thread in self._putting:
                self.processes.end_put(lender)
            self._serve(lender)
            self._go_on_with(thread)
        self.now = until

    def hang(self, number: int) -> int:
        """How many requests it has at that moment."""
        self.hung.add(number)
        return self.all[number].under_way()

    def go_on(self, number: int) -> None:
        self.hung.discard(number)
        self._serve(self.all[number])

    def standing_still(self, seconds: float) -> int:
        before = list(self.answered)
        self.run(seconds)
        return sum(now == was for now, was in zip(self.answered, before, strict=True))

    def shares(self, seconds: float) -> Sequence[float]:
        before = list(self.served)
        self.run(seconds)
        served = [now - was for now, was in zip(self.served, before, strict=True)]
        return [each / sum(served) for each in served]


@pytest.mark.parametrize("thinks", [0.0, SERVICE, 20 * SERVICE])
@pytest.mark.parametrize("threads", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("processes", [2, 3, 4, 9])
def test_few_threads_wait_for_a_process_that_hangs(processes: int, threads: int, thinks: float) -> None:
    client = Client(processes, threads, thinks=thinks)
    client.run(0.05)
    for number in {0, 1, processes - 1}:  # the first as well
        had = client.hang(number)
        assert had <= threads / processes + UNHEARD_MAX
        client.run(0.05)
        still = client.all[number].under_way()
        assert still <= min(threads - 1, had + 1 + threads // 3)
        assert client.standing_still(0.1) == still
        client.go_on(number)
        client.run(0.01)
        fair = 1 / processes
        assert all(0.7 * fair < share < 1.3 * fair for share in client.shares(0.1))
        assert not client.standing_still(0.05)


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_gets_go_on_beside_puts_and_puts_by_another_process(processes: int) -> None:
    client = Client(processes, 8, putting=4, thinks=SERVICE)
    client.run(0.05)
    had = client.hang(1)
    assert client.standing_still(0.1) <= had + MORE
    before = list(client.answered)
    client.run(0.1)
    gone_on = [now > was for now, was in zip(client.answered, before, strict=True)]
    assert any(gone_on[4:])
    late = Client(processes, 8, putting=8, thinks=SERVICE)
    late.hang(1)  # before a thread has asked
    assert late.standing_still(0.1) <= MORE
    client.go_on(1)
    client.run(0.02)
    assert not client.standing_still(0.05)


def test_puts_go_to_all_but_the_first_while_all_answer() -> None:
    client = Client(3, 8, putting=8)
    client.run(0.1)
    assert client.shares(0.1)[0] < 0.05
    client.hang(2)
    client.run(0.1)
    client.go_on(2)
    client.run(0.02)
    assert client.shares(0.1)[0] < 0.05


def test_threads_that_come_at_once_are_divided_among_all_that_answer() -> None:
    client, taken = Client(4, 0), list[Session | None]()
    for _ in range(16):
        taken.append(client.processes.next("kv", (b"key",)).take())
    assert [each.under_way() for each in client.all] == [4, 4, 4, 4]


def test_the_one_that_was_heard_of_last_is_asked_where_none_is_ready() -> None:
    client, taken = Client(2, 0), list[Session | None]()
    for _ in range(4):
        taken.append(client.processes.next("kv", (b"key",)).take())
    first, reader = client.all
    assert [each.under_way() for each in client.all] == [2, 2]
    client.now += 0.05  # the first answers once, and is sent one more; the reader is silent
    session = first.take()
    assert session is not None
    give_back(first, session)
    for _ in range(8):
        chosen = client.processes.next("kv", (b"key",))
        assert chosen is first
        taken.append(chosen.take())
    assert reader.under_way() == 2


class Blocking(SeveralProcesses):
    """An agent whose first reader may hang."""

    def __init__(self, readers: int) -> None:
        super().__init__(readers)
        self.goes_on = threading.Event()
        self.goes_on.set()

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        if self._of(descriptor)[0] is self.all[1]:
            self.goes_on.wait()
        return super().preadv(descriptor, into, offset)


def test_threads_of_a_pool_go_on() -> None:
    agent = Blocking(2)
    stop, done = threading.Event(), [0] * 8
    with Pool("/mnt", files=agent) as pool:
        volume, key = pool.volume("kv"), key_of("block")
        assert volume.put(key, b"value")

        def client(number: int) -> None:
            buffer = bytearray(16)
            while not stop.is_set():
                assert volume.get_into(key, buffer) == 5
                done[number] += 1

        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]

        def wait_for(many: int) -> None:
            before = list(done)

            def gone_on() -> bool:
                return sum(now >= was + 20 for now, was in zip(done, before, strict=True)) >= many

            wait_until(gone_on, 60, f"{many} threads to go on")

        for each in threads:
            each.start()
        try:
            wait_for(8)
            agent.goes_on.clear()
            wait_for(1)
            wait_for(1)
            agent.goes_on.set()
            wait_for(8)
        finally:
            agent.goes_on.set()
            stop.set()
            for each in threads:
                each.join()
