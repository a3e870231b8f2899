"""A reader of a guest's queues, which carries every request: a thread of the test."""

from __future__ import annotations

import socket
import threading

from agent.fs.guest_sessions import GuestWords, shared_words
from agent.fs.virtiofs.device_queue import Chain
from agent.fs.virtiofs.door import VirtioFsDoor
from agent.fs.virtiofs.processes.carrier import Carrier
from agent.fs.virtiofs.processes.queue_places import GuestProcesses
from agent.fs.virtiofs.processes.reader_queues import GuestQueues

NUMBER = 1


class CarriesAll:
    """A service that has everything answered by the first process."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def serve(self, chain: Chain) -> int:
        return self._carrier.carry(chain)[0]


def guest_processes(queues: int) -> GuestProcesses:
    """All request queues are the reader's."""
    descriptor = shared_words()
    return GuestProcesses([NUMBER] * queues, GuestWords(descriptor), descriptor, lambda handle: [], 0)


def reader_in_this_process(door: VirtioFsDoor) -> threading.Thread:
    """It ends after the door has stopped."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    queues = GuestQueues("guest-0", theirs, lambda queue, words, carrier: CarriesAll(carrier))
    thread = threading.Thread(target=queues.serve, name=queues.name, daemon=True)
    thread.start()
    door.serve_reader(NUMBER, ours)
    return thread


def is_ready(door: VirtioFsDoor) -> bool:
    links = door.device.places.links
    return links is not None and links.ready(NUMBER) is not None
