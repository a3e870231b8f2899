"""A program of its own that takes in descriptors of strangers, and passes on memory and events only.

Why a process: a descriptor that was received has to be closed, and close(2) asks the file's file system
(flush). A FUSE file system that never answers holds that thread for ever, past SIGKILL, and a process with
such a thread never ends. So the agent never has such a descriptor; this program may, and is left behind.

It serves one end of a pair of SOCK_SEQPACKET sockets, the *channel*, in one of two ways:

    messages CONNECTION CHANNEL HEADER PAYLOAD_MAX DESCRIPTORS_MAX
        Reads messages from a Unix stream socket: HEADER bytes, whose last four are the length of what
        follows (u32, little-endian). Each is one datagram: `WHOLE`, the message, and its descriptors.
    fetch CHANNEL
        Answers each `REQUEST` (process, number of a descriptor there) by `WHOLE` and the descriptor, of a
        memfd; else by an errno and words.

A datagram that begins with another byte than `WHOLE` is the last that says anything; what it was said about
is closed after it was sent, because that may take for ever. The program ends with its channel.

Only functions that the kernel answers by itself are called for a descriptor before its kind is known:
F_GET_SEALS (fcntl(2)), which is an error for everything but files of tmpfs and hugetlbfs, and readlink(2) of
/proc/self/fd. Standard library only: it is started without site-packages.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import socket
import struct
import sys
from typing import Final, NoReturn

WHOLE: Final = b"\0"
REFUSED: Final = b"\x01"
"""Of `messages`: words follow. Of `fetch`: any byte that is not 0 is an errno."""
ENDED: Final = b"\x02"
"""Of `messages`: the connection has ended."""
REQUEST: Final = struct.Struct("=qq")
WORDS_BYTES_MAX: Final = 200
EVENTFD_LINK: Final = "anon_inode:[eventfd]"

_KERNEL_DESCRIPTORS_MAX: Final = 253
"""SCM_MAX_FD. With room for all none is dropped by the kernel, which would be a close of ours as well."""
DESCRIPTOR: Final = struct.Struct("=i")
_LENGTH: Final = struct.Struct("<I")
_MEMFD_NAME: Final = "/memfd:"
_SYS_PIDFD_GETFD: Final = 438  # the same on every architecture since Linux 5.6


class Refused(Exception):
    """The stranger's fault: what it has handed over is not taken."""


def is_memory(descriptor: int) -> bool:
    """Whether it is of a file of tmpfs or hugetlbfs, memfds included. The kernel answers by itself."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def is_event(descriptor: int) -> bool:
    """Whether it is an eventfd. The kernel answers by itself."""
    return name_of(descriptor) == EVENTFD_LINK


def name_of(descriptor: int) -> str:
    """What a descriptor of this process is of, in words of the kernel's own; empty where it is none."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a message (cmsg(3), SCM_RIGHTS)."""
    found: list[int] = []
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(content) // DESCRIPTOR.size * DESCRIPTOR.size
            found += [each for (each,) in DESCRIPTOR.iter_unpack(content[:whole])]
    return found


# Messages of a connection.


class _Connection:
    """The stream of a stranger; `descriptors` are those of the message that is being read."""

    def __init__(self, connection: socket.socket, channel: socket.socket) -> None:
        self._connection = connection
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)
        self._poller.register(channel, 0)
        self._channel = channel.fileno()
        self.descriptors: list[int] = []

    def read(self, count: int) -> bytes:
        """Exactly so many bytes. Raises Refused, EOFError."""
        found = bytearray()
        while len(found) < count:
            if any(ready == self._channel for ready, _ in self._poller.poll()):
                _end()
            # Never more than this message has: descriptors come with the first byte that they were sent with.
            try:
                piece, ancillary, flags, _ = self._connection.recvmsg(
                    count - len(found),
                    socket.CMSG_SPACE(_KERNEL_DESCRIPTORS_MAX * DESCRIPTOR.size),
                    socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT,
                )
            except BlockingIOError:
                continue
            except OSError as error:
                raise EOFError(error.strerror) from None
            self.descriptors += descriptors_in(ancillary)
            if flags & socket.MSG_CTRUNC:
                raise Refused("more descriptors than this process may have")
            if not piece:
                raise EOFError("it has closed the connection")
            found += piece
        return bytes(found)


def _pass_messages_on(
    connection: socket.socket,
    channel: socket.socket,
    header_bytes: int,
    payload_bytes_max: int,
    descriptors_max: int,
) -> NoReturn:
    stream = _Connection(connection, channel)
    try:
        while True:
            header = stream.read(header_bytes)
            (size,) = _LENGTH.unpack(header[-_LENGTH.size :])
            # A header that says too much goes on alone: the agent knows what to say of it.
            message = header + (stream.read(size) if size <= payload_bytes_max else b"")
            if len(stream.descriptors) > descriptors_max:
                raise Refused(f"more than {descriptors_max} descriptors with one message")
            for each in stream.descriptors:
                if not is_memory(each) and not is_event(each):
                    raise Refused(f"a descriptor of neither shared memory nor an eventfd: {name_of(each)!r}")
            socket.send_fds(channel, [WHOLE + message], stream.descriptors)
            for each in stream.descriptors:
                os.close(each)
            stream.descriptors = []
            if size > payload_bytes_max:
                break
    except Refused as refused:
        channel.send(REFUSED + _words(refused))
    except EOFError as ended:
        channel.send(ENDED + _words(ended))
    # After the agent has let go of the connection: its last holder closes the unread rest of it.
    _close_all(stream.descriptors)
    _wait_for_the_end_of(channel)
    _end()


def _words(reason: Exception) -> bytes:
    return str(reason).encode(errors="replace")[:WORDS_BYTES_MAX]


def _close_all(descriptors: list[int]) -> None:
    """Those that are known to be harmless first."""
    for each in sorted(descriptors, key=lambda each: not is_memory(each) and not is_event(each)):
        with contextlib.suppress(OSError):
            os.close(each)


def _wait_for_the_end_of(channel: socket.socket) -> None:
    poller = select.poll()
    poller.register(channel, 0)
    poller.poll()


# Descriptors of another process.


def fetched(process: int, descriptor: int) -> int:
    """A descriptor of ours for a memfd that thread or process `process` knows by `descriptor`. Raises
    OSError; Swapped where it is none, in spite of its name."""
    try:
        leader = _leader(process)
        pidfd = os.pidfd_open(leader)
    except (OSError, AttributeError, ValueError) as failure:
        raise OSError(errno.EOPNOTSUPP, f"process {process} cannot be opened: {failure}") from None
    try:
        if not _named(leader, descriptor).startswith(_MEMFD_NAME):
            raise OSError(errno.EINVAL, "the descriptor is none of a memfd")
        return _duplicate(pidfd, process, descriptor)
    finally:
        os.close(pidfd)


class Swapped(Exception):
    """It was a memfd when we looked at its name, and is something else: `descriptor`, still open."""

    def __init__(self, descriptor: int) -> None:
        super().__init__("the descriptor is none of a memfd")
        self.descriptor = descriptor


def _leader(thread: int) -> int:
    """The process of a thread: FUSE names the asking thread, and a pidfd is a process's. The numbers of a
    thread with descriptors of its own (CLONE_FILES unshared) are looked up among the process's."""
    with open(f"/proc/{thread}/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("Tgid:"):
                return int(line[5:])
    raise ValueError("no process")


def _named(process: int, descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/{process}/fd/{descriptor}")
    except FileNotFoundError:
        raise OSError(errno.EINVAL, "the caller has no such descriptor") from None
    except OSError as failure:
        raise OSError(errno.EOPNOTSUPP, f"not from process {process}: {failure}") from None


def _duplicate(pidfd: int, process: int, descriptor: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    taken: int = libc.syscall(_SYS_PIDFD_GETFD, pidfd, descriptor, 0)
    code = ctypes.get_errno()
    if taken < 0:
        if code == errno.EBADF:
            raise OSError(errno.EINVAL, "the caller has no such descriptor")
        raise OSError(errno.EOPNOTSUPP, f"not from process {process}: {os.strerror(code)}")
    if not is_memory(taken):
        raise Swapped(taken)
    return taken


def _fetch(channel: socket.socket) -> NoReturn:
    while request := channel.recv(REQUEST.size):
        try:
            taken = fetched(*REQUEST.unpack(request))
        except OSError as failure:
            words = (failure.strerror or "").encode(errors="replace")[:WORDS_BYTES_MAX]
            channel.send(bytes([failure.errno or errno.EINVAL]) + words)
        except Swapped as swapped:
            channel.send(bytes([errno.EBADF]) + _words(swapped))
            _close_all([swapped.descriptor])
            break
        else:
            socket.send_fds(channel, [WHOLE], [taken])
            os.close(taken)
    _end()


def _end() -> NoReturn:
    os._exit(0)


def _main(words: list[str]) -> NoReturn:
    # Ctrl-C and a service's end are for the agent to act on; this ends with its channel.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    mode, *numbers = words
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        if mode == "fetch":
            _fetch(socket.socket(fileno=int(numbers[0])))
        connection, channel = (socket.socket(fileno=int(each)) for each in numbers[:2])
        header, payload, descriptors = map(int, numbers[2:])
        _pass_messages_on(connection, channel, header, payload, descriptors)
    _end()


if __name__ == "__main__":
    _main(sys.argv[1:])
