"""Flash behind two paths, in memory and virtual time: a channel sends to it, a test breaks the paths.

A path that is lost or stopped keeps the writes that were under way and carries them out when its controller
gets round to it, which is what a fence has to be right about. What a queue that only stalls holds may come
much later, until a supervisor ends the session (`supervise`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from agent.remote import channel as channel_module
from agent.remote import queue_slot
from agent.remote.channel import WorkerChannel
from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from nvmeof.host.command import Command
from nvmeof.host.namespaces import NamespaceInfo
from nvmeof.transport.base import ControllerInfo, HostQueue, submit_each
from nvmeof.wire.sqe import IoOpcode

BLOCK = 4096
NGUID = bytes(range(1, 17))


@dataclass
class Clock:
    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@dataclass
class Late:
    """A block of a write that nobody waits for any more: when it lands, unless its queue ends before."""

    at: float
    block: int
    content: bytes
    queue: PathQueue


@dataclass
class Flash:
    """One namespace; `late` are writes that nobody waits for any more, and when they land."""

    clock: Clock
    blocks: dict[int, bytes] = field(default_factory=dict)
    late: list[Late] = field(default_factory=list)
    landed_late: int = 0

    def catch_up(self) -> None:
        due = sorted((entry for entry in self.late if entry.at <= self.clock.now), key=lambda entry: entry.at)
        self.late = [entry for entry in self.late if entry.at > self.clock.now]
        for entry in due:
            self.blocks[entry.block] = entry.content
            self.landed_late += 1

    def carry_out(self, command: Command) -> None:
        self.catch_up()
        first = command.cdw10
        if command.opcode == IoOpcode.WRITE:
            for block, content in pieces(command):
                self.blocks[block] = content
        elif command.data_in is not None:
            view = command.data_in
            for at in range(0, len(view), BLOCK):
                view[at : at + BLOCK] = self.blocks.get(first + at // BLOCK, bytes(BLOCK))
            command.received = len(view)


def pieces(command: Command) -> list[tuple[int, bytes]]:
    """The blocks of a write: number and content."""
    data = b"".join(bytes(part) for part in command.data_out)
    return [(command.cdw10 + at // BLOCK, data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]


class PathInfo:
    """As much of a controller as a channel looks at, and the state of the path to it."""

    facts = SimpleNamespace(io_queues=8)

    def __init__(self, flash: Flash, dice: random.Random) -> None:
        self.flash = flash
        self.dice = dice
        self.answers = True
        """False: it takes commands and says nothing."""
        self.refusal = 0
        """The ANA status that commands are answered with."""
        self.lands_within = 10.0
        """How much later a write that was under way may be carried out after its queue ended, in seconds."""
        self.stalls_for = 100.0
        """And how much later after it was given up, while its queue stands."""
        self.queues: list[PathQueue] = []

    def lose(self) -> None:
        """Every queue dies, with what is under way on it."""
        for queue in self.queues:
            queue.die("the path is gone")
        self.queues.clear()


class PathQueue:
    """A `HostQueue` whose commands are answered when they are waited for."""

    needs_reconnect = False
    max_transfer = 1 << 20
    depth = 64
    abandoned = 0

    def __init__(self, path: PathInfo) -> None:
        self.path = path
        self.alive = True
        self.in_flight: list[Command] = []
        self.sent = 0
        path.queues.append(self)

    def register(self, buffer: memoryview) -> None: ...

    def has_room(self, commands: int) -> bool:
        return len(self.in_flight) + commands <= self.depth

    def oldest_abandoned(self) -> None:
        return None

    def submit(self, command: Command, *, more: bool = False) -> None:
        self.sent += 1
        command.cid = self.sent
        command.submitted_at = self.path.flash.clock.now
        self.in_flight.append(command)

    def submit_all(self, commands: Sequence[Command], *, more: bool = False) -> None:
        submit_each(cast("HostQueue", self), commands, more)

    def wait(self, command: Command, deadline: float, at_least: int | None = None) -> bool:
        path, clock = self.path, self.path.flash.clock
        if command.done:
            return True
        if not path.answers:
            clock.now = max(clock.now, deadline)
            return False
        clock.now += 0.0005
        for each in list(self.in_flight):
            self.in_flight.remove(each)
            if path.refusal:
                each.end(path.refusal)
            else:
                path.flash.carry_out(each)
                each.end(0)
        return True

    def abandon(self, command: Command) -> None:
        if command in self.in_flight:
            self.in_flight.remove(command)
            self._may_land(command, self.path.stalls_for)
            command.abandoned = True

    def _may_land(self, command: Command, within: float) -> None:
        path = self.path
        if command.opcode == IoOpcode.WRITE and path.dice.random() < 0.7:
            at = path.flash.clock.now + path.dice.random() * within
            path.flash.late += [Late(at, block, content, self) for block, content in pieces(command)]

    def die(self, reason: str) -> None:
        self.alive = False
        path, now = self.path, self.path.flash.clock.now
        for entry in path.flash.late:
            if entry.queue is self:
                entry.at = min(entry.at, now + path.dice.random() * path.lands_within)
        for command in self.in_flight:
            self._may_land(command, path.lands_within)
            command.lose(reason)
        self.in_flight.clear()

    def close(self) -> None:
        if self.alive:
            self.die("closed by us")


class _AtOnce:
    """`Connecting` without a thread."""

    def __init__(self, connect: Callable[[], HostQueue], name: str) -> None:
        self.queue: HostQueue | None = connect()

    def wait(self, seconds: float) -> bool:
        return True

    def give_up(self) -> None: ...


class TwoPaths:
    """The channel of one worker on a namespace with two paths, or as many as a test asks for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int, count: int = 2) -> None:
        self.clock = Clock()
        self.flash = Flash(self.clock)
        self.dice = random.Random(seed)
        self.paths = [PathInfo(self.flash, self.dice) for _ in range(count)]
        monkeypatch.setattr(channel_module, "time", self.clock)
        monkeypatch.setattr(queue_slot, "time", self.clock)
        monkeypatch.setattr(queue_slot, "ConnectAttempt", _AtOnce)
        monkeypatch.setattr(
            queue_slot, "connect_io_queue", lambda session, *_: cast(HostQueue, PathQueue(session))
        )
        self.enclosures = [
            Enclosure(name, cast(ControllerInfo, path), epoch=1, nqn="nqn.one", namespaces=self._seen())
            for name, path in zip(("shelf", "shelf#2"), self.paths, strict=False)
        ]
        self.fabric = Fabric(self.enclosures)
        self.fabric.adopt([NGUID])
        self.channel = WorkerChannel(self.fabric, 1)

    def supervise(self) -> None:
        """What the supervisor does now and then: it ends the sessions that somebody complained of."""
        self.fabric.fence.look(self.clock.now)
        for path, enclosure in zip(self.paths, self.enclosures, strict=True):
            if enclosure.complaints:
                path.lose()
                enclosure.epoch, enclosure.complaints = enclosure.epoch + 1, 0

    @staticmethod
    def _seen() -> tuple[NamespaceInfo, ...]:
        return (NamespaceInfo(1, NGUID, 1 << 20, BLOCK, ana_group=1),)
