"""Lends slots to the readers of an agent: each link has a thread, which serves one call at a time.

What a call is, agent/pool/write/slot_messages.py has; what it does, agent/pool/write/lent_slots.py. A reader
that does not tell in time what became of a slot, or says what makes no sense, is ended by readers.py. Its
slots stay reserved until it has ended. By then its connections were closed hard: the kernel does that before
the end of a process can be waited for.
"""

import functools
import logging
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from agent.config.configuration import Configuration
from agent.host_os.one_processor import chosen_processor, run_on
from agent.host_os.worker_thread import OwnThread
from agent.pool.access import ServedVolume
from agent.pool.errors import BadPut, PutRefused, TooLong
from agent.pool.write.batch import Became, Untried
from agent.pool.write.lent_slots import LentFence, LentSlots
from agent.pool.write.slot_messages import (
    MESSAGE_BYTES_MAX,
    Ask,
    BadMessage,
    End,
    Ended,
    LentSlot,
    decode_ask,
    decode_written,
    encode_ended,
    encode_places,
    end_of,
)
from agent.remote.channel import WorkerChannel
from agent.remote.fabric import Fabric
from agent.remote.fence import GIVEN_UP_SECONDS
from agent.service.slot_links import limit_waits

log = logging.getLogger(__name__)

LINKS_MAX: Final = 4
"""Of each reader: calls that it has under way, and threads here."""
THREADS_MAX: Final = 24
"""Of all readers where each has more than one: each has a queue at every enclosure."""
TELL_SECONDS: Final = 10.0
"""Beyond the time of a call, for a reader to tell what became of its slots; then it is ended."""
_ALL_ELSEWHERE: Final = (End.ELSEWHERE, None)


class Borrower:
    """One process of a reader. Safe from any thread."""

    def __init__(self) -> None:
        self.is_to_end: Final = threading.Event()
        self._gone: Final = threading.Event()

    def end(self) -> None:
        """Have it ended, and wait until it is."""
        self.is_to_end.set()
        self._gone.wait()

    def has_ended(self) -> None:
        """It was waited for: nothing that it sends can reach a slot from now on."""
        self._gone.set()


def links_of(configuration: Configuration) -> int:
    """How many a reader has: one for each worker, up to LINKS_MAX; none where there is no mount to put by. Of
    its calls no more than half wait long (slot_links.py)."""
    agent = configuration.agent
    if agent.mount is None:
        return 0
    of_readers = THREADS_MAX // max(1, agent.process_count - 1)
    return max(1, min(LINKS_MAX, agent.worker_count, of_readers))


def link_pairs(count: int) -> tuple[list[socket.socket], list[socket.socket]]:
    """The links to a new process: the ends of this one, and its own. Raises OSError."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
    return [ours for ours, _ in pairs], [theirs for _, theirs in pairs]


class FabricFence:
    """That of this process (agent/remote/fence.py), for the slots that it lends."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def stands(self, namespace: int, offset: int, size: int, now: float) -> bool:
        """See `LentFence`."""
        fabric = self._fabric
        return fabric.fence.stands(fabric.nguids[namespace], offset, size, now)

    def put_up(self, namespace: int, offset: int, size: int, now: float) -> None:
        """See `LentFence`."""
        fabric = self._fabric
        fabric.fence.put_up(fabric.nguids[namespace], offset, size, now + GIVEN_UP_SECONDS, now)


class SlotLender:
    """All threads that lend, some for each reader."""

    def __init__(
        self,
        served: Sequence[ServedVolume],
        take: Callable[[int], WorkerChannel],
        queue_ids: range,
        links: int,
        fence: LentFence,
        *,
        on_one_processor: bool = False,
    ) -> None:
        """`take`: the channel of a queue id, of which each thread has one. `links` of them are a reader's.
        `on_one_processor`: all threads run on the same one (agent/host_os/one_processor.py)."""
        self._links = links
        volumes = {each.settings.volume_id: each for each in served}
        processor = chosen_processor() if on_one_processor else None
        self._threads = [
            _Thread(number, volumes, take, at, fence, processor) for number, at in enumerate(queue_ids)
        ]

    def start(self) -> None:
        for each in self._threads:
            each.start()

    def stop(self) -> None:
        """After the readers have ended."""
        for each in self._threads:
            each.stop()

    def begin(self, number: int, links: Sequence[socket.socket], borrower: Borrower) -> None:
        """Lend to a new process of a reader, `number` from 1 on; the one before has ended."""
        threads = self._threads[(number - 1) * self._links :]
        for thread, link in zip(threads, links, strict=False):
            thread.waiting.put((link, borrower))
        for link in links[len(threads) :]:  # enclosures do not grant queues for more
            link.close()


class _Thread(OwnThread):
    def __init__(
        self,
        number: int,
        volumes: Mapping[bytes, ServedVolume],
        take: Callable[[int], WorkerChannel],
        queue_id: int,
        fence: LentFence,
        processor: int | None,
    ) -> None:
        super().__init__(f"slots-{number}", 5.0, "a thread that lends slots")
        self._processor = processor
        self._volumes, self._take, self._queue_id, self._fence = volumes, take, queue_id, fence
        self._limit = 0.0
        """Of the waits at the link."""
        self.waiting: queue.SimpleQueue[tuple[socket.socket, Borrower] | None] = queue.SimpleQueue()

    @functools.cached_property
    def _channel(self) -> WorkerChannel:
        """Taken only with the first call: it connects, and many a link is never used."""
        return self._take(self._queue_id)

    def stop(self) -> None:
        self.waiting.put(None)
        super().stop()

    def _work(self) -> None:
        if self._processor is not None:
            run_on(self._processor)
        while (taken := self.waiting.get()) is not None:
            link, borrower = taken
            self._limit = 0.0
            with link:
                self._serve(link, borrower)

    def _serve(self, link: socket.socket, borrower: Borrower) -> None:
        """Until its end is closed."""
        while True:
            try:
                message = link.recv(MESSAGE_BYTES_MAX + 1)
            except BlockingIOError:
                continue  # nothing was asked for so long
            except OSError:
                return
            if not message:
                return
            try:
                ask = decode_ask(message)
                self._call(self._channel, link, borrower, ask)
            except BadMessage as wrong:
                log.error("a process of this agent is ended, for it asks for slots by no message: %s", wrong)
                borrower.end()
                return
            except OSError:  # `_call` has ended it
                return
            except Exception:
                log.exception("a call for slots ends amid it, and so does the process that has asked")
                return

    def _call(self, channel: WorkerChannel, link: socket.socket, borrower: Borrower, ask: Ask) -> None:
        """One call. Raises OSError once the borrower has ended amid it."""
        served = self._volumes.get(ask.volume_id)
        if served is None or served.in_sets is None or not served.lends_slots:
            link.sendall(encode_places([_ALL_ELSEWHERE] * len(ask.values)))
            return

        try:
            seconds = min(ask.seconds, served.timing.write_deadline)
            slots = LentSlots(
                served.in_sets, channel, ask.values, seconds, ask.ttl_seconds, self._fence, ask.is_patient
            )
        except TooLong as wrong:
            link.sendall(encode_places([end_of(wrong)] * len(ask.values)))
            return
        try:
            self._lend(channel, link, slots, seconds)
        except BaseException as error:
            if isinstance(error, BlockingIOError):
                log.error("a process of this agent is ended, for it does not tell what became of slots")
            # Else it could write into slots that are let go of.
            borrower.end()
            raise
        finally:
            slots.close()

    def _lend(self, channel: WorkerChannel, link: socket.socket, slots: LentSlots, seconds: float) -> None:
        places = channel.run(slots.lend())
        if self._limit != (limit := seconds + TELL_SECONDS):
            limit_waits(link, limit)
            self._limit = limit
        link.sendall(encode_places([each if isinstance(each, LentSlot) else _ended(each) for each in places]))
        while slots.out:
            message = link.recv(MESSAGE_BYTES_MAX + 1)
            if not message:
                raise ConnectionResetError("it is gone")
            fates = decode_written(message)
            if not slots.out.issuperset(number for number, _ in fates):
                raise BadMessage("a slot that is not lent")
            link.sendall(encode_ended([_ended(each) for each in channel.run(slots.name(fates))]))


def _ended(became: Became) -> Ended:
    if isinstance(became, Untried):
        return End.UNTRIED, None
    if isinstance(became, PutRefused | BadPut):
        return end_of(became)
    return (End.STORED if became else End.THERE_BEFORE), None
