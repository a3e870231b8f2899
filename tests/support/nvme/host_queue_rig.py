"""A host's TCP queue that is ready to take commands, a scripted controller, and the link between them."""

from __future__ import annotations

from nvmeof.errors import FatalErrorStatus
from nvmeof.host.command import Command
from nvmeof.host.tcp_queue import QueueState, TcpQueue
from nvmeof.tcp.pdu import CapsuleCmd, Digests, Pdu
from tests.support.link import Link
from tests.support.nvme.nvme_ends import HostEnd, ScriptedController

NONE = Digests()


class Rig:
    """A ready queue, a scripted controller and the link between them."""

    def __init__(
        self,
        *,
        digests: Digests = NONE,
        depth: int = 4,
        in_capsule: int = 0,
        chunk: int = 1 << 16,
        max_h2c_data: int = 8192,
    ) -> None:
        self.queue = TcpQueue(depth, digests=digests, in_capsule_bytes=in_capsule)
        self.host = HostEnd(self.queue)
        self.peer = ScriptedController(digests)
        self.link = Link(self.host, self.peer, chunk=chunk)
        self.queue.start()
        self.link.run()
        self.peer.initialize(max_h2c_data)
        self.link.run()
        assert self.queue.ready

    def submit(self, command: Command) -> int:
        self.queue.submit(command, 1.0)
        self.link.run()
        assert isinstance(self.peer.heard[-1], CapsuleCmd)
        return command.cid

    def say(self, *pdus: Pdu, data: bytes = b"") -> None:
        self.peer.say(*pdus, data=data)
        self.link.run()

    def broke(self) -> FatalErrorStatus:
        """The queue has complained and ended; with which status?"""
        self.link.run()
        assert self.queue.state is QueueState.FAILED
        assert self.link.broken
        assert self.peer.termination is not None
        assert self.peer.termination.from_host
        return FatalErrorStatus(self.peer.termination.fatal_error_status)
