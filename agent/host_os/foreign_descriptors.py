"""Descriptors from outside: how this process gets them without ever holding a dangerous one.

A stranger may hand us a descriptor of a file system of his own, and then fstat(2), mmap(2) and even close(2)
take for ever. `descriptor_receiver.py`, a process for each stranger, passes on memory and events alone; the
kernel handles those by itself. Any other descriptor stays with that process, which is left behind where it
hangs.

    receiver = MessageReceiver(connection, header_bytes=12, payload_bytes_max=4096, descriptors_max=8)
    receiver.receive()      # a message and its descriptors, once `receiver` can be read
    receiver.close()        # and with it the connection

Nobody else receives descriptors or takes them from other processes (tests/rules/test_foreign_descriptors.py).
"""

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
from typing import Final

from agent.host_os import descriptor_receiver
from agent.host_os.descriptor_receiver import (
    DESCRIPTOR,
    ENDED,
    REFUSED,
    REQUEST,
    WHOLE,
    WORDS_BYTES_MAX,
    descriptors_in,
    is_event,
    is_memory,
)

END_SECONDS: Final = 1.0
"""A receiver that has not ended by then hangs in a stranger's file system, and is left behind."""
LEFT_BEHIND_MAX: Final = 8
"""Receivers of one agent that hang; with more of them nothing is taken from strangers."""
CLOSERS_MAX: Final = 8
"""Threads of one agent that `turn_away` has close sockets, whose unread descriptors take their time."""
FETCH_SECONDS: Final = 10.0

_lock: Final = threading.Lock()
_left_behind: Final[list[subprocess.Popen[bytes]]] = []
_closers: Final = threading.BoundedSemaphore(CLOSERS_MAX)


class ForeignRefused(Exception):
    """The stranger's fault: what it hands over is not taken. `code` is an errno for it."""

    def __init__(self, words: str, code: int = errno.EINVAL) -> None:
        super().__init__(words)
        self.code = code


class StrangerGone(Exception):
    """The connection has ended."""


def left_behind() -> int:
    """How many receivers hang in files of strangers."""
    with _lock:
        _left_behind[:] = [each for each in _left_behind if each.poll() is None]
        return len(_left_behind)


def why_nothing_is_taken() -> str:
    """Why nothing is taken from strangers now; empty where it is."""
    if left_behind() < LEFT_BEHIND_MAX:
        return ""
    return f"{LEFT_BEHIND_MAX} processes hang in files that strangers have handed over"


def close_descriptor(descriptor: int) -> None:
    """Close a received one; a failure is its file's. Anything but memory and events is never had here, and
    would be closed aside."""
    if is_memory(descriptor) or is_event(descriptor):
        _close(descriptor)
    else:
        threading.Thread(target=_close, args=(descriptor,), name="close-aside", daemon=True).start()


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


class _Receiver:
    """One process of `descriptor_receiver.py` and our end of its channel."""

    def __init__(self, mode: str, connection: socket.socket | None, *numbers: int) -> None:
        """Raises ForeignRefused where too many hang, OSError where no process can be started."""
        if why := why_nothing_is_taken():
            raise ForeignRefused(why, errno.EAGAIN)
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        passed = [theirs.fileno()] if connection is None else [connection.fileno(), theirs.fileno()]
        try:
            # -S and -I: nothing of an environment is loaded, which makes it start in 30 ms.
            words = [sys.executable, "-I", "-S", descriptor_receiver.__file__, mode]
            self._process = subprocess.Popen(
                [*words, *map(str, (*passed, *numbers))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                pass_fds=passed,
                start_new_session=True,
            )
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()

    def receive(self, bytes_max: int, descriptors_max: int) -> tuple[bytes, list[int]]:
        """A datagram and its descriptors; empty where the process has ended. Raises BlockingIOError."""
        # Not socket.recv_fds(): in Python 3.11 it passes no flags on.
        room = socket.CMSG_SPACE(descriptors_max * DESCRIPTOR.size)
        try:
            data, ancillary, flags, _ = self.channel.recvmsg(bytes_max, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            raise
        except OSError:
            return b"", []
        descriptors = descriptors_in(ancillary)
        if flags & socket.MSG_CTRUNC:
            for each in descriptors:
                close_descriptor(each)
            raise ForeignRefused("this process has as many descriptors open as it may", errno.EMFILE)
        return data, descriptors

    def close(self) -> None:
        self.channel.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with _lock:
                _left_behind.append(self._process)


class MessageReceiver:
    """The messages of one connection, with descriptors of memory and events alone.

    A message is a header, whose last four bytes are the length (u32, little-endian) of its payload. A header
    that says more than `payload_bytes_max` comes without a payload, and is the last.
    """

    def __init__(
        self, connection: socket.socket, *, header_bytes: int, payload_bytes_max: int, descriptors_max: int
    ) -> None:
        """Owns the connection from now on. Raises ForeignRefused, OSError; the connection is closed then."""
        self.connection = connection
        self._message_bytes_max = header_bytes + payload_bytes_max
        self._descriptors_max = descriptors_max
        try:
            self._receiver = _Receiver(
                "messages", connection, header_bytes, payload_bytes_max, descriptors_max
            )
        except BaseException:
            close_unread(connection)
            raise
        self._receiver.channel.setblocking(False)

    def fileno(self) -> int:
        return self._receiver.channel.fileno()

    def receive(self) -> tuple[bytes, list[int]] | None:
        """The next message; None while there is none. Raises ForeignRefused, StrangerGone."""
        room = 1 + max(self._message_bytes_max, WORDS_BYTES_MAX)
        try:
            data, descriptors = self._receiver.receive(room, self._descriptors_max)
        except BlockingIOError:
            return None
        kind, rest = data[:1], data[1:]
        if kind == WHOLE:
            return rest, descriptors
        if kind == REFUSED:
            raise ForeignRefused(rest.decode(errors="replace"))
        words = rest.decode(errors="replace") if kind == ENDED else "what receives its messages has ended"
        raise StrangerGone(words)

    def close(self) -> None:
        """Hang up. The receiver lets go last, so it closes what was not read, descriptors included."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        self._receiver.close()


class MemoryFetcher:
    """Takes descriptors of memfds from other processes (pidfd_getfd(2)). Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._receiver: _Receiver | None = None
        self._closed = False

    def fetch(self, process: int, descriptor: int) -> int:
        """A descriptor of ours for the memfd that thread or process `process` knows by `descriptor`.

        Raises ForeignRefused: EINVAL where it is no memfd, EOPNOTSUPP where it cannot be had, EAGAIN later.
        """
        with self._lock:
            if self._closed:
                raise ForeignRefused("the agent ends", errno.EOPNOTSUPP)
            try:
                if self._receiver is None:
                    self._receiver = _Receiver("fetch", None)
                    self._receiver.channel.settimeout(FETCH_SECONDS)
                self._receiver.channel.send(REQUEST.pack(process, descriptor))
                data, descriptors = self._receiver.receive(1 + WORDS_BYTES_MAX, 1)
            except OSError as failure:
                self._let_go()
                raise ForeignRefused(f"no descriptor can be taken: {failure}", errno.EAGAIN) from None
            if data[:1] == WHOLE and descriptors:
                return descriptors[0]
            code = data[0] if data else errno.EAGAIN
            if code in (errno.EAGAIN, errno.EBADF):  # it has ended, or hangs with what it was given instead
                self._let_go()
        words = data[1:].decode(errors="replace") or "what takes descriptors has ended"
        raise ForeignRefused(words, errno.EINVAL if code == errno.EBADF else code)

    def _let_go(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._let_go()


def close_unread(connection: socket.socket) -> None:
    """Close a socket of which nothing was read, on a thread of its own: the descriptors that wait in it go
    with it, and may take as long as their sender likes (a TCP socket that lingers).

    Nothing bounds these threads: this is for what no stranger can repeat. `turn_away` is for the rest."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    closer = threading.Thread(target=_close, args=(connection.detach(),), name="close-aside", daemon=True)
    closer.start()
    closer.join(END_SECONDS / 10)


def turn_away(listener: socket.socket) -> bool:
    """Hang up on the next front-end, on a thread. False, and nothing done, where CLOSERS_MAX of them are
    busy already."""
    if not _closers.acquire(blocking=False):
        return False
    try:
        connection = listener.accept()[0]
    except OSError:
        _closers.release()
        return True
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

    def close() -> None:
        connection.close()
        _closers.release()

    threading.Thread(target=close, name="close-aside", daemon=True).start()
    return True
