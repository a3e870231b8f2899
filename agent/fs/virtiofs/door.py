"""The virtio-fs door: a Unix socket where QEMU finds the device that its guest mounts.

Read docs/virtiofs.md for the whole. The door listens, takes one front-end at a time (it turns others away),
and lets a `BackEnd` decide what its messages mean, in a thread of its own. Each queue of the guest has a
thread, which serves requests to completion.
"""

import contextlib
import errno
import logging
import os
import select
import socket
import stat
import threading
import time
from pathlib import Path

from agent.errors import G35Error
from agent.fs.doors.door import GRACE_SECONDS, MakeRunner
from agent.fs.interface import Tree
from agent.fs.virtiofs.back_end import BackEnd, PeerError
from agent.fs.virtiofs.device import Device
from agent.fs.virtiofs.front_end_descriptors import signal
from agent.fs.virtiofs.front_end_link import FrontEndGone, FrontEndLink
from agent.fs.virtiofs.guest_books import GuestBooks
from agent.fs.virtiofs.processes.queue_places import GuestProcesses
from agent.host_os.foreign_descriptors import close_unread, turn_away, why_nothing_is_taken

log = logging.getLogger(__name__)

REQUEST_QUEUES_MAX = 64
BACKLOG = 4
STOP_SECONDS = 300.0
"""How long an orderly end waits for operations that are under way; each has deadlines of its own."""
MESSAGES_A_TURN = 64
"""A front-end that never stops sending must not keep the door from stopping."""
LAST_WORDS_SECONDS = 5.0
"""How long what a front-end said before it hung up may take to get here; else its receiver hangs."""
TURNED_AWAY_SECONDS = 1.0
"""How long newcomers wait where as many as may are being turned away, and no front-end is there."""


class VirtioFsDoor:
    """A `Door` (agent/fs/doors/door.py) for one guest at a time."""

    def __init__(
        self,
        tree: Tree,
        path: Path,
        request_queues: int,
        make_runner: MakeRunner,
        *,
        sealed_memory: bool = True,
        books: GuestBooks | None = None,
        name: str = "virtiofs",
        processes: GuestProcesses | None = None,
    ) -> None:
        """`make_runner(i)` is called in the thread of request queue i, counted from 0; once that thread
        has ended, in the thread that takes its place."""
        if not 1 <= request_queues <= REQUEST_QUEUES_MAX:
            raise ValueError(f"request_queues must be 1 to {REQUEST_QUEUES_MAX}")
        self.path = path
        self.device = Device(
            name,
            tree,
            request_queues,
            make_runner,
            sealed_memory=sealed_memory,
            books=books,
            processes=processes,
        )
        self._name = name
        self._listener: socket.socket | None = None
        self._inode = 0
        self._stop_event = -1
        self._thread: threading.Thread | None = None

    def serve_reader(self, number: int, link: socket.socket) -> None:
        """A new process of the agent, the reader of this number, has the other end; from any thread."""
        assert self.device.places.links is not None
        self.device.places.links.come(number, link)

    def start(self) -> None:
        self._listener = listen(self.path)
        self._inode = os.stat(self.path).st_ino
        self._stop_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(
            target=self._serve, args=(self._listener,), name=self._name, daemon=True
        )
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def stop(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """End the connection and the threads. The guest's requests wait until a device is there again."""
        if self._thread is None:
            return
        signal(self._stop_event)
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            raise G35Error(
                f"the virtio-fs device at {self.path} did not end", "an operation hangs; see the log"
            )
        self._thread = None
        os.close(self._stop_event)
        self.device.close()

    def _serve(self, listener: socket.socket) -> None:
        try:
            while (connection := self._next_front_end(listener)) is not None:
                self._serve_one(listener, connection)
            self.device.settle_everything()
        except BaseException:
            log.exception("the virtio-fs device at %s ended", self.path)
        finally:
            close_unread(listener)
            with contextlib.suppress(OSError):
                if os.stat(self.path).st_ino == self._inode:
                    self.path.unlink()

    def _next_front_end(self, listener: socket.socket) -> socket.socket | None:
        """The next connection; None when the door is to stop."""
        poller = _poll_of(listener.fileno(), self._stop_event, *self._of_readers())
        deaf_until: float | None = None
        while True:
            ready = [descriptor for descriptor, _ in poller.poll(_milliseconds_until(deaf_until))]
            if self._stop_event in ready:
                return None
            self.device.places.settle()
            if deaf_until is not None and time.monotonic() >= deaf_until:
                poller.register(listener, select.POLLIN)
                deaf_until = None
            if listener.fileno() not in ready:
                continue
            if not (why := why_nothing_is_taken()):
                with contextlib.suppress(OSError):
                    return listener.accept()[0]
            elif turn_away(listener):
                self.device.complaints.peer(
                    f"the front-end of {self.path}", f"nothing is taken from it: {why}"
                )
            else:
                poller.unregister(listener)
                deaf_until = time.monotonic() + TURNED_AWAY_SECONDS

    def _serve_one(self, listener: socket.socket, connection: socket.socket) -> None:
        device = self.device
        try:
            link = FrontEndLink(connection)
        except PeerError as wrong:
            device.complaints.peer(f"the front-end of {self.path}", str(wrong))
            return
        back_end = BackEnd(device.queue_count, device)
        # Who may connect may do so at any rate.
        device.complaints.world(f"a front-end has connected to {self.path}", "it is served", logging.INFO)
        try:
            self._converse(listener, link, back_end)
        except FrontEndGone as gone:
            device.complaints.world(f"the front-end of {self.path} is gone", str(gone), logging.INFO)
        except PeerError as wrong:
            device.complaints.peer(f"the front-end of {self.path}", str(wrong))
        finally:
            comes_back = back_end.can_reconnect
            link.close()
            back_end.end()
            if not comes_back:
                device.end_session()

    def _converse(self, listener: socket.socket, link: FrontEndLink, back_end: BackEnd) -> None:
        """Serve messages until the door is to stop. Raises what ends the connection otherwise."""
        poller = _poll_of(link.fileno(), listener.fileno(), self._stop_event, *self._of_readers())
        poller.register(link.connection.fileno(), 0)  # for its end, of which the kernel tells a reader
        last_words_until: float | None = None
        while True:
            ready = [descriptor for descriptor, _ in poller.poll(_milliseconds_until(last_words_until))]
            if self._stop_event in ready:
                signal(self._stop_event)  # for `_next_front_end`, too
                return
            if link.connection.fileno() in ready:
                # It has hung up. What it said before is served; and who connects now is no second.
                poller.unregister(link.connection.fileno())
                with contextlib.suppress(KeyError):  # it was already, if too many were turned away
                    poller.unregister(listener)
                last_words_until = time.monotonic() + LAST_WORDS_SECONDS
            self.device.places.settle()
            for _ in range(MESSAGES_A_TURN):
                message = link.next_message()
                if message is None:
                    break
                reply = back_end.handle(*message)
                if reply is not None:
                    link.send(reply)
            if last_words_until is not None:
                if time.monotonic() > last_words_until:
                    raise FrontEndGone("it has closed the connection, and what reads it hangs")
            elif listener.fileno() in ready:
                if turn_away(listener):
                    self.device.complaints.peer(f"{self.path}", "a second front-end was turned away")
                else:
                    poller.unregister(listener)  # a newcomer waits for the end of this one

    def _of_readers(self) -> list[int]:
        links = self.device.places.links
        return [] if links is None else [links.fileno()]


def _milliseconds_until(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic()) * 1000


def _poll_of(*descriptors: int) -> select.poll:
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return poller


def listen(path: Path) -> socket.socket:
    """A listening Unix socket at `path`, for its owner alone. One that a dead process left is replaced;
    anything else that is there is not touched. Raises G35Error."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _clear(path)
        listener.bind(str(path))
        # Nobody can connect before `listen`, so the mode is in force from the first connection on.
        path.chmod(0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException as failure:
        listener.close()
        if isinstance(failure, OSError):
            raise G35Error(
                f"cannot listen at {path}: {failure.strerror or failure}",
                "check virtiofs.socket and its folder; a socket's path has 107 bytes at the most",
            ) from None
        raise
    return listener


def _clear(path: Path) -> None:
    """Remove a socket at which nobody listens. Raises G35Error where something else is in the way."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise G35Error(f"{path} is there and is no socket", "name another path, or remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        refused = asking.connect_ex(str(path))
    if refused == errno.ECONNREFUSED:
        path.unlink()
    elif refused == 0 or refused == errno.EAGAIN:
        raise G35Error(f"somebody listens at {path} already", "is another agent running?")
    else:
        raise G35Error(f"{path} cannot be asked: {os.strerror(refused)}", "remove it, or name another path")
