"""How long an enclosure stays away once the path to it is good again, in virtual time: our supervisor, its
TCP session and our controller, over a path that swallows bytes for a while or flips a bit.

A connection that lost a byte is out of step for ever; what is sent on it gets no answer.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import trio
import trio.testing

from agent.config.configuration import EnclosureSection
from agent.remote.supervisor import Supervisor
from nvmeof.controller.tcp_queue import TcpControllerQueue
from nvmeof.errors import NvmeofError
from nvmeof.transport import tcp
from nvmeof.transport.controller import Controller
from nvmeof.transport.tcp import open_controller
from tests.support.nvme.nvme_ends import HOST, HOST_ID, SUBSYSTEM, Bench

AWAY_SECONDS_MAX = 5.0
"""What docs/concurrency.md says of an enclosure whose path is good again."""
BRING_UP_SECONDS = 0.1
NAMESPACES = 2

Change = Callable[[str, bytes], bytes]


class Path:
    """Makes connections to one target. While it is `lost` bytes vanish; one may be `deaf` then."""

    def __init__(self, change: Change | None = None, *, deaf: bool = False) -> None:
        self.bench = Bench(namespaces=NAMESPACES)
        self.lost = False
        self.change = change
        self._deaf = deaf

    async def open(self, *_: Any) -> MemoryStream:
        await trio.lowlevel.checkpoint()
        if self.lost and self._deaf:
            await trio.sleep_forever()
        return MemoryStream(self)


class MemoryStream:
    """As much of a `trio.SocketStream` and its socket as an admin link uses; the controller is behind it."""

    def __init__(self, path: Path) -> None:
        self.socket = self
        self._path = path
        self._queue = TcpControllerQueue(path.bench.target, now=trio.current_time())
        self._inbox = bytearray()
        self._news = trio.Event()
        self._silent = False

    def _through(self, way: str, data: bytes) -> bytes:
        self._silent = self._silent or self._path.lost
        if self._silent:
            return b""
        return data if self._path.change is None else self._path.change(way, data)

    def _run(self) -> None:
        queue = self._queue
        queue.run(trio.current_time())
        while queue.has_outgoing:
            sent = b"".join(bytes(part) for part in queue.outgoing())
            self._inbox += self._through("in", sent)
            queue.sent(len(sent))
            self._news.set()

    async def sendmsg(self, parts: Sequence[Any]) -> int:
        await trio.lowlevel.checkpoint()
        whole = b"".join(bytes(part) for part in parts)
        left = self._through("out", whole)
        while left and not self._queue.ending:
            into = self._queue.next_buffer()
            count = min(len(into), len(left))
            into[:count] = left[:count]
            left = left[count:]
            self._queue.received(count, trio.current_time())
        self._run()
        return len(whole)

    async def send(self, data: bytes) -> int:
        return await self.sendmsg([data])

    async def recv_into(self, buffer: memoryview) -> int:
        await trio.lowlevel.checkpoint()
        while not self._inbox:
            if self._queue.finished and not self._silent:
                return 0
            self._news = trio.Event()
            due = self._queue.deadline() if not self._queue.ending else math.inf
            with trio.move_on_at(max(due, trio.current_time() + 0.001)):
                await self._news.wait()
            self._run()
        count = min(len(buffer), len(self._inbox))
        buffer[:count] = self._inbox[:count]
        del self._inbox[:count]
        return count

    async def aclose(self) -> None:
        self._queue.connection_lost()
        await trio.lowlevel.checkpoint()


def virtually(main: Callable[..., Any], *arguments: Any) -> Any:
    return trio.run(main, *arguments, clock=trio.testing.MockClock(autojump_threshold=0))


async def _away_for(path: Path, begins: float, lasts: float, complaint: float | None) -> float:
    """Seconds from the end of a loss until the session stands for good."""
    section = EnclosureSection(name="shelf", address="192.0.2.1", nqn=SUBSYSTEM)
    supervisor = Supervisor([section], HOST, HOST_ID, io_queues=2)
    (enclosure,) = supervisor.fabric.enclosures
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await supervisor.all_tried(1)
        assert enclosure.session is not None
        await trio.sleep(begins)
        path.lost = True
        if complaint is not None:
            await trio.sleep(min(complaint, lasts))
            enclosure.complain(enclosure.epoch)
            await trio.sleep(max(0.0, lasts - complaint))
        else:
            await trio.sleep(lasts)
        path.lost = False
        good, stood = trio.current_time(), trio.current_time()
        while trio.current_time() < good + 20:
            if enclosure.session is None:
                stood = trio.current_time()
            epoch = enclosure.epoch
            await trio.sleep(0.04)
            if enclosure.epoch != epoch:
                stood = trio.current_time()
        assert enclosure.session is not None
        nursery.cancel_scope.cancel()
    return stood - good


@pytest.mark.expects_log(r"enclosure shelf: not connected, and tried again: ")
@pytest.mark.parametrize("deaf", [False, True], ids=["connects and is silent", "does not connect"])
@pytest.mark.parametrize("complaint", [None, 0.0, 0.3, 30.0], ids=["left", "reset at once", "reset", "late"])
def test_it_is_back_within_five_seconds(
    deaf: bool, complaint: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for begins, lasts in itertools.product((0.2, 2.45), (0.4, 2.3, 4.9, 7.1, 23.0)):
        path = Path(deaf=deaf)
        monkeypatch.setattr(tcp.trio, "open_tcp_stream", path.open)
        away = virtually(_away_for, path, begins, lasts, complaint)
        assert away <= AWAY_SECONDS_MAX + BRING_UP_SECONDS, f"{away:.2f} s after {begins}, {lasts}"


# -- a bit that is flipped while a controller is brought up -----------------------------------------


class Flip:
    """Flips one bit of what goes one way; without a bit it measures how much goes either way."""

    def __init__(self, way: str = "", bit: int = -1) -> None:
        self.bits = {"out": 0, "in": 0}
        self._way, self._bit = way, bit

    def __call__(self, way: str, data: bytes) -> bytes:
        at = self._bit - self.bits[way]
        self.bits[way] += 8 * len(data)
        if way != self._way or not 0 <= at < 8 * len(data):
            return data
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        return bytes(flipped)


async def _told(path: Path) -> Any:
    """What a controller that came up said of itself; None where it did not."""
    controller: Controller
    try:
        async with open_controller(
            "192.0.2.1", 4420, SUBSYSTEM, HOST, HOST_ID, keep_alive_s=5.0, io_queues=2, admin_timeout_s=2.5
        ) as controller:
            facts = replace(controller.facts, cntlid=0)
            identify = replace(facts.identify, cntlid=0)
            return replace(facts, identify=identify), controller.namespaces(), controller.access
    except NvmeofError:
        return None


def _differences(found: Any, truth: Any) -> list[str]:
    """What differs between two that were told, for people."""
    pairs = zip(found, truth, strict=True)
    names = [field.name for field in fields(truth[0])]
    facts = [name for name in names if getattr(found[0], name) != getattr(truth[0], name)]
    return facts + [f"{one} {other}" for one, other in list(pairs)[1:] if one != other]


def test_a_flipped_bit_never_tells_something_else_of_an_enclosure(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(change: Flip) -> Any:
        path = Path(change)
        monkeypatch.setattr(tcp.trio, "open_tcp_stream", path.open)
        return virtually(_told, path)

    measured = Flip()
    truth = told(measured)
    assert truth is not None
    assert len(truth[1]) == NAMESPACES
    dice = random.Random(seed)
    for way in ("out", "in"):
        for bit in sorted(dice.sample(range(measured.bits[way]), 250)):
            found = told(Flip(way, bit))
            assert found is None or _differences(found, truth) == [], f"bit {bit} {way}"
