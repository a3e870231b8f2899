"""Ends for `link.py`: our NVMe/TCP host queue, our controller queue, and a peer that plays a script."""

from __future__ import annotations

import random
from collections.abc import Sequence

from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.subsystem import Namespace, Subsystem
from nvmeof.controller.target import Target
from nvmeof.controller.tcp_queue import TcpControllerQueue
from nvmeof.controller.tcp_rules import TcpSettings
from nvmeof.errors import RemoteProtocolError
from nvmeof.host.bring_up import SessionConfig, join
from nvmeof.host.command import Command
from nvmeof.host.controller_session import ControllerSession, Ended, SessionEvent
from nvmeof.host.procedure import each_command
from nvmeof.host.tcp_queue import TcpQueue
from nvmeof.tcp.crc32c import Buffer
from nvmeof.tcp.pdu import FROM_HOST, NO_DIGESTS, DataPdu, Digests, ICReq, ICResp, Pdu, TermReq
from nvmeof.tcp.receiver import Event, PduReceiver
from tests.support.link import Link
from tests.support.nvme.heap_storage import HeapStorage
from tests.support.nvme.pdus import encode_pdu

SUBSYSTEM = "nqn.2026-01.io.g35:pair"
HOST = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000035"
HOST_ID = bytes(range(16))
LBA = 4096


def same(left: Buffer | None, right: Buffer) -> bool:
    """Whether bytes are equal. For long ones, where pytest would spend minutes on the difference."""
    return left is not None and bytes(left) == bytes(right)


class MemoryStorage(HeapStorage):
    """A namespace of 4 KiB blocks; `held` holds every command until it is cleared."""

    def __init__(self, blocks: int, number: int = 1) -> None:
        super().__init__(blocks, lba_bytes=LBA)
        self.nguid = bytes([number]) * 16


class HostEnd:
    """Our host queue. `error` is what the peer did wrong."""

    def __init__(self, queue: TcpQueue) -> None:
        self.queue = queue
        self.ended: list[Command] = []
        self.error: RemoteProtocolError | None = None
        self._goodbye: list[Buffer] = []
        self._over = False

    @property
    def over(self) -> bool:
        return self._over and not self._goodbye

    def outgoing(self) -> Sequence[Buffer]:
        return self._goodbye or self.queue.output

    def sent(self, count: int) -> None:
        if self._goodbye:
            rest = b"".join(bytes(part) for part in self._goodbye)[count:]
            self._goodbye = [rest] if rest else []
        else:
            self.queue.sent(count)

    def next_buffer(self) -> memoryview:
        # After an error the stream means nothing any more; what still comes is thrown away.
        return memoryview(bytearray(4096)) if self._over else self.queue.next_buffer()

    def received(self, count: int) -> None:
        if self._over:
            return
        try:
            self.ended += self.queue.received(count)
        except RemoteProtocolError as error:
            self.error = error
            request = self.queue.termination(error)
            if request is not None:
                self._goodbye = [request]
            self._over = True
            self.ended += self.queue.fail(error.reason)

    def closed(self) -> None:
        self._over = True
        self.ended += self.queue.fail("the connection was cut")


class ControllerEnd:
    """Our controller queue, on a clock that a test sets."""

    def __init__(self, target: Target, settings: TcpSettings | None = None) -> None:
        self.now = 0.0
        self.queue = TcpControllerQueue(target, now=0.0, settings=settings)

    @property
    def over(self) -> bool:
        return self.queue.finished

    def outgoing(self) -> Sequence[Buffer]:
        self.queue.run(self.now)
        return self.queue.outgoing()

    def sent(self, count: int) -> None:
        self.queue.sent(count)

    def next_buffer(self) -> memoryview:
        return memoryview(bytearray(4096)) if self.queue.ending else self.queue.next_buffer()

    def received(self, count: int) -> None:
        self.queue.received(count, self.now)

    def closed(self) -> None:
        self.queue.connection_lost()


class ScriptedController:
    """A controller that says what the test makes it say, and remembers what it heard."""

    def __init__(self, digests: Digests = NO_DIGESTS) -> None:
        self.heard: list[Event] = []
        self.data: list[bytearray] = []
        self.gone = False
        self.hung_up = False
        self._output: list[Buffer] = []
        self._receiver = PduReceiver(self, FROM_HOST)
        self._digests = digests

    @property
    def over(self) -> bool:
        return self.hung_up and not self._output

    def place(self, pdu: DataPdu) -> memoryview:
        self.data.append(bytearray(pdu.data_length))
        return memoryview(self.data[-1])

    def say(self, *pdus: Pdu, data: bytes = b"") -> None:
        for pdu in pdus:
            length = getattr(pdu, "data_length", 0)
            parts = (data[:length].ljust(length, b"\0"),) if length else ()
            self._output += encode_pdu(pdu, self._receiver.digests, 4, parts)

    def initialize(self, max_h2c_data: int = 1 << 20) -> None:
        """Answer the ICReq."""
        assert isinstance(self.heard.pop(0), ICReq)
        self.say(ICResp(self._digests.header, self._digests.data, max_h2c_data))
        self._receiver.digests = self._digests

    @property
    def termination(self) -> TermReq | None:
        """The termination request that came, if one did."""
        found = [event for event in self.heard if isinstance(event, TermReq)]
        return found[0] if found else None

    def outgoing(self) -> Sequence[Buffer]:
        return self._output

    def sent(self, count: int) -> None:
        rest = b"".join(bytes(part) for part in self._output)[count:]
        self._output = [rest] if rest else []

    def next_buffer(self) -> memoryview:
        return self._receiver.next_buffer()

    def received(self, count: int) -> None:
        self.heard += self._receiver.received(count)

    def closed(self) -> None:
        self.gone = True


class Bench:
    """A target with namespaces in memory, and links to it that share one clock."""

    def __init__(
        self,
        *,
        blocks: int = 1024,
        namespaces: int = 1,
        chunk: int = 1 << 16,
        dice: random.Random | None = None,
        settings: ControllerSettings | None = None,
        tcp: TcpSettings | None = None,
        allowed: Sequence[str] | None = None,
    ) -> None:
        self.now = 0.0
        self.target = Target(settings or ControllerSettings())
        self.subsystem = Subsystem(SUBSYSTEM, serial="pair", allowed_hosts=allowed)
        self.target.add_subsystem(self.subsystem)
        self.storage = {nsid: MemoryStorage(blocks, nsid) for nsid in range(1, namespaces + 1)}
        for nsid, storage in self.storage.items():
            self.target.attach(self.subsystem, Namespace(nsid, storage))
        self._chunk = chunk
        self._dice = dice
        self._tcp = tcp
        self._wires: list[tuple[HostEnd, ControllerEnd, Link]] = []

    def connect(self, queue: TcpQueue) -> tuple[HostEnd, ControllerEnd, Link]:
        """A fresh connection; the queue has been initialized over it."""
        host, controller = HostEnd(queue), ControllerEnd(self.target, self._tcp)
        controller.now = self.now
        link = Link(host, controller, chunk=self._chunk, dice=self._dice)
        self._wires.append((host, controller, link))
        queue.start()
        link.run()
        return host, controller, link

    def settle(self, now: float | None = None) -> None:
        """Let everything that is under way on any link arrive."""
        if now is not None:
            self.now = now
        for _ in range(100):
            moved = False
            for _, controller, link in self._wires:
                controller.now = self.now
                while link.step():
                    moved = True
            if not moved:
                return
        raise AssertionError("the bench does not come to rest")


class AdminHost:
    """A `ControllerSession` on a queue of a bench: what `transport/tcp.py` is for sockets."""

    def __init__(self, bench: Bench, config: SessionConfig, digests: Digests = NO_DIGESTS) -> None:
        self.bench = bench
        self.session = ControllerSession(config, admin_timeout_s=2.0)
        self.events: list[SessionEvent] = []
        self.queue = TcpQueue(31, digests=digests, in_capsule_bytes=8192)
        self.host, self.controller, self.link = bench.connect(self.queue)

    def start(self) -> None:
        self.session.start(self.bench.now)
        self.pump()

    def pump(self) -> None:
        """Until nothing moves at this moment of the clock."""
        while True:
            commands = self.session.take_commands()
            for command in commands:
                self.queue.submit(command, self.bench.now)
            self.bench.settle()
            ended, self.host.ended = self.host.ended, []
            for command in ended:
                self.session.ended(command, self.bench.now)
            events = self.session.take_events()
            self.events += events
            if any(isinstance(event, Ended) for event in events):
                self.link.cut()
            if self.link.broken and not any(isinstance(event, Ended) for event in self.events):
                self.session.connection_lost(self.host.error or RemoteProtocolError("cut"))
                self.events += self.session.take_events()
            if not ended and not events and not commands:
                return

    def advance(self, until: float) -> None:
        """Move the clock, ticking whenever the session wants it."""
        while (deadline := self.session.deadline) is not None and deadline <= until:
            self.bench.now = max(self.bench.now, deadline)
            self.session.tick(self.bench.now)
            self.pump()
        self.bench.now = until
        self.pump()

    def run(self, command: Command) -> Command:
        """One admin command to its end."""
        self.session.submit(command, self.bench.now)
        self.pump()
        assert command.done, command
        return command


def io_queue(
    bench: Bench, admin: AdminHost, *, qid: int = 1, depth: int = 16, digests: Digests = NO_DIGESTS
) -> tuple[TcpQueue, HostEnd, Link]:
    """A connected I/O queue."""
    facts = admin.session.facts
    assert facts is not None
    queue = TcpQueue(depth, digests=digests, in_capsule_bytes=facts.in_capsule_bytes)
    host, _, link = bench.connect(queue)
    for command in each_command(join(admin.session.config, qid, depth + 1, facts.cntlid)):
        queue.submit(command, bench.now)
        bench.settle()
        assert command.done, command
    host.ended.clear()
    return queue, host, link
