"""Our NVMe/RDMA host queue and our controller queue over `memory_verbs`, with a live controller behind."""

from __future__ import annotations

from nvmeof.controller.rdma_queue import RdmaControllerQueue, RdmaSettings
from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.subsystem import Namespace, Subsystem
from nvmeof.controller.target import Target
from nvmeof.errors import RemoteProtocolError
from nvmeof.host.bring_up import ControllerFacts, SessionConfig, bring_up, connect_command
from nvmeof.host.command import Command
from nvmeof.host.procedure import Pause
from nvmeof.host.rdma_queue import RdmaQueue
from nvmeof.rdma.buffers import RegisteredBuffers
from nvmeof.rdma.work import Access
from nvmeof.wire.rdma import ConnectRequest
from tests.support.nvme.memory_verbs import Station, Wire
from tests.support.nvme.nvme_ends import HOST, HOST_ID, SUBSYSTEM, MemoryStorage

CONFIG = SessionConfig(SUBSYSTEM, HOST, HOST_ID, keep_alive_s=0, io_queues=4)
HOST_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
WINDOW_ACCESS = Access.LOCAL_WRITE | Access.WINDOW_BIND


class RdmaPair:
    """One queue: the host's end, the controller's end and the wire between them."""

    def __init__(
        self,
        bench: RdmaBench,
        qid: int,
        depth: int,
        *,
        windows: bool = True,
        in_capsule_bytes: int = 0,
        windows_serve_once: bool = False,
    ) -> None:
        self.bench = bench
        self.near, self.far = Station("host"), Station("controller")
        self.wire = Wire(self.near, self.far)
        self.buffers = RegisteredBuffers(self.near, WINDOW_ACCESS if windows else HOST_ACCESS)
        keys = self.near.make_windows(depth) if windows else ()
        self.queue = RdmaQueue(
            depth,
            self.buffers,
            in_capsule_bytes=in_capsule_bytes,
            windows=keys,
            renew_window=self.near.renew_window if windows_serve_once else None,
        )
        self.media = RegisteredBuffers(self.far, Access.LOCAL_WRITE)
        for storage in bench.storage.values():
            if storage.direct:
                self.media.register(memoryview(storage.memory))
        self.controller = RdmaControllerQueue(
            bench.target,
            self.media,
            ConnectRequest(qid, depth + 2, depth + 1),
            now=bench.now,
            host_reads=16,
            settings=bench.rdma,
        )
        self.ended: list[Command] = []
        self.error: RemoteProtocolError | None = None
        self.controller.start()
        self.queue.start()
        self.post()

    def post(self) -> None:
        self.near.post(self.queue.take_receives(), self.queue.sends.take())
        self.far.post(self.controller.take_receives(), self.controller.sends.take())

    def settle(self) -> None:
        """Until nothing moves."""
        for _ in range(100_000):
            self.controller.run(self.bench.now)
            self.post()
            moved = self.wire.step()
            for done in self.far.take_done():
                self.controller.completed(done, self.bench.now)
                moved = True
            for done in self.near.take_done():
                moved = True
                if self.error is not None or self.queue.failed is not None:
                    continue
                try:
                    self.ended += self.queue.completed(done)
                except RemoteProtocolError as error:
                    self.error = error
                    self.break_pair(str(error))
            if not moved:
                return
        raise AssertionError("the pair does not come to rest")

    def break_pair(self, why: str) -> None:
        """What the host's transport does: the queue pair to error, then the queue fails."""
        self.wire.cut()
        self.ended += self.queue.fail(why)

    def submit(self, command: Command) -> Command:
        self.queue.submit(command, self.bench.now)
        return command

    def run(self, command: Command) -> Command:
        self.submit(command)
        self.settle()
        assert command.done, command
        return command


class RdmaBench:
    """A target with one subsystem and a namespace in memory, and what is needed to connect to it."""

    def __init__(
        self,
        *,
        windows: bool = True,
        settings: RdmaSettings | None = None,
        blocks: int = 1024,
        controller: ControllerSettings | None = None,
    ) -> None:
        self.now = 0.0
        self.windows = windows
        self.rdma = settings or RdmaSettings()
        self.target = Target(controller or ControllerSettings(max_transfer_bytes=1 << 20))
        subsystem = Subsystem(SUBSYSTEM, serial="1")
        self.storage = {1: MemoryStorage(blocks)}
        self.target.add_subsystem(subsystem)
        for nsid, storage in self.storage.items():
            self.target.attach(subsystem, Namespace(nsid, storage))
        self.admin = RdmaPair(self, 0, 31, windows=windows)
        self.facts = self._bring_up()

    def _bring_up(self) -> ControllerFacts:
        procedure = bring_up(CONFIG)
        step = next(procedure)
        while True:
            try:
                assert not isinstance(step, Pause)
                self.admin.run(step)
                step = next(procedure)
            except StopIteration as end:
                facts: ControllerFacts = end.value[0]
                return facts

    def io(self, depth: int = 16, qid: int = 1, *, windows_serve_once: bool = False) -> RdmaPair:
        """A connected I/O queue."""
        inside = self.facts.in_capsule_bytes
        pair = RdmaPair(
            self,
            qid,
            depth,
            windows=self.windows,
            in_capsule_bytes=inside,
            windows_serve_once=windows_serve_once,
        )
        command = pair.run(connect_command(CONFIG, qid, depth + 1, self.facts.cntlid))
        assert command.status == 0, command
        pair.ended.clear()
        return pair
