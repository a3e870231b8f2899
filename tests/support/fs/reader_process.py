"""A process, or a thread, that serves queues of a guest as a reader of an agent does, without a pool.

READ of one node at an even offset has bytes that both ends know. All else is carried. A process may be told
to die at the worst moment.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.fs.fuse.abi import MINOR, InitFlag
from agent.fs.fuse.session import TRANSFER_BYTES, FuseSession, Negotiated
from agent.fs.guest_sessions import Bound, GuestWords
from agent.fs.interface import FileSystem, FsError
from agent.fs.virtiofs.device import takes_scattered
from agent.fs.virtiofs.device_queue import Chain, DeviceQueue
from agent.fs.virtiofs.front_end_descriptors import Call
from agent.fs.virtiofs.processes.carrier import Carrier
from agent.fs.virtiofs.processes.messages import Answer
from agent.fs.virtiofs.processes.reader_queues import GuestQueues
from agent.fs.virtiofs.processes.reader_service import ReaderService
from agent.fs.virtiofs.request_buffers import RequestBuffers
from tests.support.pool.inline_runner import inline_runner

DIED = 9
"""The exit status of one that died as it was told."""


def pattern(offset: int, size: int) -> bytes:
    """What a READ there has."""
    return (offset.to_bytes(8, "little") * (size // 8 + 1))[:size]


class Reads(FileSystem):
    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> int:
        if offset % 2:
            raise FsError(errno.EREMOTE)
        into[:] = pattern(offset, len(into))
        return len(into)


def start(node: int, link: socket.socket, death: str = "", passes: int = 0) -> subprocess.Popen[bytes]:
    """Start one with its end of a link, which is the process's alone then. `death`: before the used idx moves
    ("push"), between that and the call ("call"), when a carried chain is answered ("carried"), or before it
    has said that it serves ("done"). `passes`: how often it does not die there."""
    with link:
        words = [str(link.fileno()), str(node), death, str(passes)]
        # Not compiled: it puts other methods into our classes.
        environment = {**os.environ, "G35_COMPILED": "no"}
        return subprocess.Popen(
            [sys.executable, "-m", __name__, *words],
            pass_fds=[link.fileno()],
            cwd=Path(__file__).parents[3],
            env=environment,
        )


def _die(death: str, passes: int) -> None:
    turns = itertools.count()

    def here() -> None:
        if next(turns) >= passes:
            os._exit(DIED)

    push, signal, carry, answer = DeviceQueue.push, Call.signal, Carrier.carry, GuestQueues._answer

    def dies_before_push(self: DeviceQueue, head: int, written: int) -> bool:
        here()
        return push(self, head, written)

    def dies_before_call(self: Call) -> None:
        here()
        signal(self)

    def dies_when_carried(self: Carrier, chain: Chain, handle: int = 0) -> tuple[int, Bound | None]:
        done = carry(self, chain, handle)
        here()
        return done

    carried = threading.Event()

    def hangs_when_carried(self: Carrier, chain: Chain, handle: int = 0) -> tuple[int, Bound | None]:
        carry(self, chain, handle)
        carried.set()
        threading.Event().wait()
        raise AssertionError

    def dies_before_done(self: GuestQueues, line: bytes, descriptors: Sequence[int]) -> Answer:
        done = answer(self, line, descriptors)
        if self._running:
            carried.wait()
            os._exit(DIED)
        return done

    puts: dict[str, Callable[[], None]] = {
        "push": lambda: setattr(DeviceQueue, "push", dies_before_push),
        "call": lambda: setattr(Call, "signal", dies_before_call),
        "carried": lambda: setattr(Carrier, "carry", dies_when_carried),
    }
    if death == "done":
        setattr(Carrier, "carry", hangs_when_carried)  # noqa: B010  # mypy takes no assignment to a method
        setattr(GuestQueues, "_answer", dies_before_done)  # noqa: B010
    elif death:
        puts[death]()


def queues(link: socket.socket, node: int) -> GuestQueues:
    """A reader's end of a link, to be served."""
    session = FuseSession(Reads())
    session.resume(Negotiated(MINOR, InitFlag(0), TRANSFER_BYTES))

    def service(queue: int, words: GuestWords, carrier: Carrier) -> ReaderService:
        learned: dict[int, Bound] = {}
        buffers = RequestBuffers(TRANSFER_BYTES, takes_scattered)
        return ReaderService(
            session, node, learned.__setitem__, buffers, inline_runner(queue), words, carrier
        )

    return GuestQueues("guest-0", link, service)


def main() -> None:
    descriptor, node, death, passes = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    _die(death, passes)
    queues(socket.socket(fileno=descriptor), node).serve()


if __name__ == "__main__":
    main()
