"""Queues of guests that a reader serves: what each guest may see of its gets (docs/processes.md)."""

import threading
from collections.abc import Callable, Sequence
from typing import Final

from agent.config.configuration import Configuration
from agent.fs.control.face import CONTROL_ROOT, SESSION_INO, ControlFace
from agent.fs.control.guest_reads import GuestReads
from agent.fs.control.start_prestage import prestage_nothing
from agent.fs.fuse.abi import MINOR, InitFlag
from agent.fs.fuse.session import TRANSFER_BYTES, FuseSession, Negotiated
from agent.fs.guest_sessions import Bound, GuestWords
from agent.fs.interface import RootFileSystem
from agent.fs.virtiofs.device import takes_scattered
from agent.fs.virtiofs.processes.carrier import Carrier
from agent.fs.virtiofs.processes.reader_queues import GuestQueues
from agent.fs.virtiofs.processes.reader_service import ReaderService
from agent.fs.virtiofs.request_buffers import RequestBuffers
from agent.pool.access import ServedVolume
from agent.pool.steps import Runner
from agent.remote.channel import current_channel
from agent.service.queue_plan import queues_at
from agent.service.reader_link import Links
from agent.tenancy.visibility import Audience

_AGREED: Final = Negotiated(MINOR, InitFlag(0), TRANSFER_BYTES)
"""What INIT agreed on is the first process' affair; gets are the same whatever it was."""


class ReaderGuests:
    """All guests of a reader."""

    def __init__(
        self,
        configuration: Configuration,
        number: int,
        links: Links,
        served: Sequence[ServedVolume],
        may_read: Callable[[ServedVolume], bool],
        take_channel: Callable[[int], Runner],
    ) -> None:
        """`take_channel`: that of each queue, by its place in `queues_at`."""
        threads = {both: place for place, both in enumerate(queues_at(configuration, number))}
        self._guests = []
        self._queues = []
        for number_of_guest, (wish, link) in enumerate(
            zip(configuration.virtiofs, links.guests, strict=True)
        ):
            own = Audience("virtiofs", wish.tenants, wish.volumes).key_value(served)

            def take(queue: int, number_of_guest: int = number_of_guest) -> Runner:
                return take_channel(threads[number_of_guest, queue])

            guest = _Guest(own, may_read, take)
            self._guests.append(guest)
            self._queues.append(GuestQueues(f"virtiofs-{number_of_guest}", link, guest.service))

    def start(self) -> None:
        for each in self._queues:
            threading.Thread(target=each.serve, name=each.name, daemon=True).start()

    def moved(self) -> dict[str, dict[str, int]]:
        """By the number of the guest, as of a door."""
        return {str(number): guest.moved() for number, guest in enumerate(self._guests)}


class _Guest:
    def __init__(
        self,
        own: Sequence[ServedVolume],
        may_read: Callable[[ServedVolume], bool],
        take_channel: Callable[[int], Runner],
    ) -> None:
        self._own, self._may_read, self._take_channel = own, may_read, take_channel
        self._carriers = threading.local()
        self._buffers: dict[int, RequestBuffers] = {}
        self._session: FuseSession | None = None
        self._reads: GuestReads | None = None
        self._making = threading.Lock()

    def service(self, queue: int, words: GuestWords, carrier: Carrier) -> ReaderService:
        """Of one request queue, in its thread."""
        self._carriers.own = carrier
        with self._making:
            if self._session is None or self._reads is None:
                self._reads = self._reads_by(words)
                self._session = FuseSession(RootFileSystem({b".g35": (CONTROL_ROOT, self._reads)}))
                self._session.resume(_AGREED)
            buffers = self._buffers.get(queue)
            if buffers is None:
                buffers = self._buffers[queue] = RequestBuffers(TRANSFER_BYTES, takes_scattered)
        channel = self._take_channel(queue)
        return ReaderService(self._session, SESSION_INO, self._reads.learn, buffers, channel, words, carrier)

    def _reads_by(self, words: GuestWords) -> GuestReads:
        face = ControlFace(self._own, current_channel, dict, prestage_nothing, None, may_read=self._may_read)
        return GuestReads(face, self._own, current_channel, self._may_read, words, self._look)

    def _look(self, handle: int) -> Bound:
        carrier: Carrier = self._carriers.own
        return carrier.bound(handle)

    def moved(self) -> dict[str, int]:
        session = self._session
        return {
            "bytes_read": 0 if session is None else session.traffic().bytes_read,
            "bytes_copied": sum(each.bytes_copied for each in list(self._buffers.values())),
        }
