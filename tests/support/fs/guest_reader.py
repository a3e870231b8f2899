"""A reader of a guest's queues, which carries every request: a thread of the test, or a program to be killed.

python -m tests.support.fs.guest_reader DESCRIPTOR
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

from agent.fs.guest_sessions import GuestWords, shared_words
from agent.fs.virtiofs.device_queue import Chain
from agent.fs.virtiofs.door import VirtioFsDoor
from agent.fs.virtiofs.processes.carrier import Carrier
from agent.fs.virtiofs.processes.queue_places import GuestProcesses
from agent.fs.virtiofs.processes.reader_queues import GuestQueues
from agent.host_os.parent_death import die_with_parent

NUMBER = 1


class CarriesAll:
    """A service that has everything answered by the first process."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def serve(self, chain: Chain) -> int:
        return self._carrier.carry(chain)[0]


def queues_behind(link: socket.socket) -> GuestQueues:
    return GuestQueues("guest-0", link, lambda queue, words, carrier: CarriesAll(carrier))


def guest_processes(queues: int) -> GuestProcesses:
    """All request queues are the reader's."""
    descriptor = shared_words()
    return GuestProcesses([NUMBER] * queues, GuestWords(descriptor), descriptor, lambda handle: [], 0)


def reader_in_this_process(door: VirtioFsDoor) -> socket.socket:
    """Its end of the link, to be closed when the door has stopped."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    queues_behind(theirs).start()
    door.serve_reader(NUMBER, ours)
    return theirs


def is_ready(door: VirtioFsDoor) -> bool:
    links = door.device.places.links
    return links is not None and links.ready(NUMBER) is not None


def reader_program(door: VirtioFsDoor) -> subprocess.Popen[bytes]:
    """A process that serves the door's queues until it is killed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fs.guest_reader", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
    door.serve_reader(NUMBER, ours)
    return process


def main() -> None:
    die_with_parent()
    link = socket.socket(fileno=int(sys.argv[1]))
    queues_behind(link).start()
    signal.pause()


if __name__ == "__main__":
    main()
