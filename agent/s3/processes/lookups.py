"""In the first process: finds objects for the readers, and keeps their bytes while readers send them.

The index and the files' metadata are this process' alone, so a reader sees an object as of this moment: what
was put is found, what was removed is not. What is out of the ordinary is answered with `ELSEWHERE`, and the
request comes here.
"""

import contextlib
import itertools
import logging
import socket
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from agent.host_os.rate_limited_log import Complaints
from agent.s3.errors import S3Error
from agent.s3.index import Piece
from agent.s3.processes.messages import (
    BLOCKS_MAX,
    ELSEWHERE,
    MESSAGE_BYTES_MAX,
    BadMessage,
    Done,
    Find,
    Found,
    Refused,
    Reply,
    decode_ask,
    encode_reply,
)
from agent.s3.store import LostObject, ObjectStore

log = logging.getLogger(__name__)

OTHER_LINKS: Final = 2
"""Of a reader, beside those of its door's workers: of the thread that looks objects up, and of its loop."""
NOT_THERE_MAX: Final = 1000
"""Objects that readers could not read, or that are too long for an answer: those that were noted last."""


class _Asker:
    """One process of a reader, with what it holds. Its links' threads share it."""

    def __init__(self, links: int) -> None:
        self.lock: Final = threading.Lock()
        self.links = links
        self.held: Final[dict[int, tuple[ObjectStore, list[Piece]]]] = {}


class Lookups:
    """For all readers. Safe from any thread."""

    def __init__(self, stores: Mapping[str, ObjectStore], using: threading.Lock) -> None:
        """`stores` by tenant; they are there while `using` is held, and none of them after the door's end."""
        self._stores, self._using = stores, using
        self._numbers = itertools.count(1)
        self._complaints = Complaints(log)
        self._not_there: OrderedDict[tuple[str, int], None] = OrderedDict()
        """Objects that this process alone is to read."""

    def begin(self, links: Sequence[socket.socket]) -> None:
        """Answer a new process of a reader, until it has closed the links."""
        asker = _Asker(len(links))
        for link in links:
            threading.Thread(target=self._serve, args=(link, asker), name="s3-lookups", daemon=True).start()

    def _serve(self, link: socket.socket, asker: _Asker) -> None:
        try:
            with link:
                while message := link.recv(MESSAGE_BYTES_MAX + 1):
                    reply = self._answer(message, asker)
                    if reply is not None:
                        link.sendall(reply)
        except OSError:
            pass  # it has ended
        except BadMessage as wrong:
            log.error("a process of this agent asks for objects by no message: %s", wrong)
        except Exception:
            log.exception("a process of this agent gets no more answers about objects by one of its links")
        finally:
            self._ended(asker)

    def _ended(self, asker: _Asker) -> None:
        with asker.lock:
            asker.links -= 1
            left = {} if asker.links else dict(asker.held)
        self._release(asker, list(left))

    def _answer(self, message: bytes, asker: _Asker) -> bytes | None:
        ask = decode_ask(message)
        if isinstance(ask, Find):
            try:
                return self._reply(self._find(ask, asker), asker)
            except Exception as bug:
                # The link stays: without links a reader reads nothing any more.
                self._complaints.bug("finding an object for a process of this agent", bug, "answered here")
                return encode_reply(ELSEWHERE)
        if isinstance(ask, Done):
            self._release(asker, ask.holds)
        else:
            with self._using:
                self._note(ask.tenant, ask.object_id)
        return None

    def _reply(self, reply: Reply, asker: _Asker) -> bytes:
        message = encode_reply(reply)
        if len(message) <= MESSAGE_BYTES_MAX:
            return message
        if isinstance(reply, Found):
            self._release(asker, [reply.hold])
        return encode_reply(ELSEWHERE)

    def _find(self, ask: Find, asker: _Asker) -> Reply:
        with self._using:
            store = self._stores.get(ask.tenant)
            if store is None or store.is_erased():
                return ELSEWHERE  # which knows the refusal
            try:
                if not ask.holds:
                    return Found(store.find(ask.bucket, ask.key))
                found, pieces = store.find_and_hold(ask.bucket, ask.key)
                if (ask.tenant, found.id) in self._not_there:
                    store.release(pieces)
                    return ELSEWHERE
                pieces = pieces or store.hold(found)
            except S3Error as refused:
                return Refused(refused.code, refused.message)
            except LostObject:
                return ELSEWHERE
            with contextlib.ExitStack() as unless_found:
                unless_found.callback(store.release, pieces)
                blocks = store.blocks(pieces) if len(pieces) <= BLOCKS_MAX else None
                if len(blocks or pieces) > BLOCKS_MAX:
                    # Not to look at each of them again for nothing.
                    self._note(ask.tenant, found.id)
                    return ELSEWHERE
                if blocks is None:
                    return ELSEWHERE
                unless_found.pop_all()
            hold = next(self._numbers)
            with asker.lock:
                asker.held[hold] = store, pieces
            return Found(found, hold, store.home_volumes, blocks)

    def _release(self, asker: _Asker, holds: Sequence[int]) -> None:
        for hold in holds:
            with asker.lock:
                held = asker.held.pop(hold, None)
            if held is not None:
                store, pieces = held
                store.release(pieces)

    def _note(self, tenant: str, object_id: int) -> None:
        self._not_there[tenant, object_id] = None
        while len(self._not_there) > NOT_THERE_MAX:
            self._not_there.popitem(last=False)
