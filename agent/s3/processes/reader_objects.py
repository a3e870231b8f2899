"""In a reader: the objects of a tenant, found by the first process, whose bytes are read here."""

import logging
import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from agent.fs.files.block_store import StoreUnavailable
from agent.fs.files.sealed_reads import BlockRange, Blocks, read_ranges
from agent.http.connection import AnsweredElsewhere
from agent.pool.steps import Runner
from agent.s3.errors import S3Error
from agent.s3.index import StoredObject
from agent.s3.processes.messages import (
    ELSEWHERE,
    MESSAGE_BYTES_MAX,
    Ask,
    BadMessage,
    Done,
    Find,
    Found,
    Lost,
    Refused,
    Reply,
    decode_reply,
    encode_ask,
)
from agent.s3.store import LostObject

log = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 30.0
"""For the first process, which asks its disk; beyond it the link is left until it has answered."""


BlocksOf: TypeAlias = Callable[[Mapping[int, str]], Blocks | None]
"""The blocks of volumes, whose identifiers are given by capacity; None where they are not served here now."""


class FirstProcess:
    """The links to it. Safe from any thread."""

    def __init__(self, links: Sequence[socket.socket]) -> None:
        """As many as there are threads that ask; each link is blocking, and ends its waits by itself."""
        self._lock = threading.Lock()
        self._free = list(links)
        self._late: list[socket.socket] = []
        """Links with an answer to come that nobody waits for any more."""
        self._done: list[int] = []
        """Holds that nobody needs any more, and that it was not told of yet."""

    def ask(self, find: Find) -> Reply:
        """Raises AnsweredElsewhere where it cannot be asked."""
        self.tell_done()
        return self._exchange(find)

    def lost(self, tenant: str, found: StoredObject) -> None:
        self._tell(Lost(tenant, found.id))

    def done(self, hold: int) -> None:
        """It is told with the next question, or by `tell_done`."""
        with self._lock:
            self._done.append(hold)

    @property
    def is_owing(self) -> bool:
        """Whether `tell_done` has something to do."""
        return bool(self._done or self._late)

    def tell_done(self) -> None:
        """It may wait for `ANSWER_SECONDS`."""
        self._hear_late()
        with self._lock:
            done, self._done = self._done, []
        if done and not self._tell(Done(done)):
            with self._lock:
                self._done += done

    def _hear_late(self) -> None:
        """Use the links again that have been answered by now."""
        with self._lock:
            late, self._late = self._late, []
        for link in late:
            coming = select.poll()
            coming.register(link, select.POLLIN)
            if not coming.poll(0):
                with self._lock:
                    self._late.append(link)
                continue
            try:
                reply = _received(link)
            except (OSError, BadMessage):
                link.close()
                continue
            if isinstance(reply, Found) and reply.hold:
                self.done(reply.hold)
            self._put_back(link)

    def _exchange(self, ask: Ask, *, is_answered: bool = True) -> Reply:
        link, is_sent = self._take(), False
        try:
            link.sendall(encode_ask(ask))
            is_sent = True
            reply = _received(link) if is_answered else ELSEWHERE
        except TimeoutError:
            with self._lock:
                (self._late if is_sent else self._free).append(link)
            raise AnsweredElsewhere("the first process does not answer for now") from None
        except (OSError, BadMessage) as broken:
            link.close()
            log.debug("a link to the first process is given up: %s", broken)
            raise AnsweredElsewhere("the first process does not answer") from None
        self._put_back(link)
        return reply

    def _take(self) -> socket.socket:
        with self._lock:
            if not self._free:
                raise AnsweredElsewhere("the first process answers over no link for now")
            return self._free.pop()

    def _put_back(self, link: socket.socket) -> None:
        with self._lock:
            self._free.append(link)

    def _tell(self, ask: Ask) -> bool:
        try:
            self._exchange(ask, is_answered=False)
        except AnsweredElsewhere as trouble:
            log.debug("the first process is not told: %s", trouble)
            return False
        return True


def _received(link: socket.socket) -> Reply:
    """Raises OSError, and BadMessage."""
    message = link.recv(MESSAGE_BYTES_MAX + 1)
    if not message:
        raise ConnectionResetError("the first process has closed it")
    return decode_reply(message)


class ReaderObjects:
    """Of one tenant: `Objects` of agent/s3/get_object.py."""

    def __init__(self, tenant: str, first: FirstProcess, blocks_of: BlocksOf) -> None:
        self._tenant, self._first, self._blocks_of = tenant, first, blocks_of

    def find(self, bucket: str, key: str) -> StoredObject:
        """Raises S3Error, and AnsweredElsewhere."""
        return self._found(Find(self._tenant, bucket, key, holds=False)).found

    def open(self, bucket: str, key: str) -> "tuple[StoredObject, BlocksReading]":
        """Raises S3Error, and AnsweredElsewhere."""
        reply = self._found(Find(self._tenant, bucket, key, holds=True))
        blocks = self._blocks_of(reply.volumes or {})
        if blocks is None:
            self._first.done(reply.hold)
            raise AnsweredElsewhere("the volumes of the object are not served here now")
        return reply.found, BlocksReading(blocks, reply, self._first)

    def give_up(self, runner: Runner, bucket: str, found: StoredObject) -> None:
        """It may be that it cannot be read here alone: the first process looks."""
        self._first.lost(self._tenant, found)

    def _found(self, find: Find) -> Found:
        reply = self._first.ask(find)
        if isinstance(reply, Refused):
            raise S3Error(reply.code, reply.message)
        if not isinstance(reply, Found):
            raise AnsweredElsewhere("the first process answers for this object")
        return reply


class BlocksReading:
    """`Reading` of agent/s3/get_object.py, of an object that the first process holds meanwhile."""

    def __init__(self, blocks: Blocks, found: Found, first: FirstProcess) -> None:
        self._blocks, self._ranges, self._hold, self._first = blocks, found.blocks, found.hold, first
        self._has_begun = self._is_closed = False

    def read(self, runner: Runner, offset: int, into: memoryview) -> None:
        """Raises AnsweredElsewhere where the first bytes cannot be had, and LostObject for later ones."""
        ranges = ranges_within(self._ranges, offset, len(into))
        try:
            is_read = runner.run(read_ranges(self._blocks, ranges, into))
        except StoreUnavailable:
            is_read = False
        if not is_read:
            if self._has_begun:
                raise LostObject("its bytes cannot be had here")
            raise AnsweredElsewhere("its bytes cannot be had here")
        self._has_begun = True

    def close(self, runner: Runner) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._first.done(self._hold)


def ranges_within(blocks: Sequence[BlockRange], offset: int, length: int) -> list[BlockRange]:
    """The part of these that has `length` bytes from `offset` on; less where they end before."""
    found: list[BlockRange] = []
    at, end = 0, offset + length
    for block in blocks:
        first, last = max(at, offset), min(at + block.size, end)
        if first < last:
            found.append(block._replace(start=block.start + first - at, size=last - first))
        at += block.size
        if at >= end:
            break
    return found
