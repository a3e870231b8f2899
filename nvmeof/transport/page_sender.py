"""A long payload in a drive's memory goes to the socket by reference, not by a copy.

The kernel's own NVMe/TCP target hands pages to the socket (MSG_SPLICE_PAGES). In user space vmsplice(2) names
pages in a pipe, and splice(2) moves them on. On loopback the host's receive is then the only copy
(docs/decisions/0040-payload-by-reference.md).

The socket holds the pages themselves, so a read may show a write that overlaps it, also in the middle of a
block. A copy may show that too, because writes are received in their place. A later write cannot be seen once
the host has the read's completion, which comes behind the data. Scratch memory, which the next command uses,
is copied.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nvmeof.tcp.crc32c import Buffer
from nvmeof.transport.drive_memory import is_drive_memory

log = logging.getLogger(__name__)

LEAST_BYTES: Final = 512 << 10
"""Shorter payloads cost as much by reference as copied; 1 MiB costs a fifth less (sender and receiver)."""

PIPE_BYTES: Final = 1 << 20
"""Of a payload named at a time: the largest pipe without privileges."""

OVER_BYTES: Final = 64 << 10
"""A remainder beyond whole pipes up to here is copied, with the parts before it."""

SPARE_PIPES: Final = 8
"""Empty pipes kept. A user without privileges has room for 64 (fs.pipe-user-pages-soft)."""

_LARGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SPLICE_F_NONBLOCK: Final = 2
_SPLICE_F_MORE: Final = 4
_DONT_WAIT: Final[int] = socket.MSG_DONTWAIT
_MORE_COMES: Final[int] = socket.MSG_DONTWAIT | socket.MSG_MORE
_REFUSED: Final = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL)

# CDLL would release the interpreter's lock: naming 1 MiB takes 5 us (18 by pages of 4 KiB).
_libc: Final = ctypes.PyDLL(None, use_errno=True)
_vmsplice: Final = _libc.vmsplice
_vmsplice.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
_vmsplice.restype = ctypes.c_ssize_t


def pays_here(large_pages: Path = _LARGE_PAGES) -> bool:
    """Whether drives can have large pages: with pages of 4 KiB a reference costs more than a copy."""
    try:
        return "[never]" not in large_pages.read_text()
    except OSError:
        return False


class PageSender:
    """Sends for one connection, from its thread alone."""

    def __init__(self, sock: socket.socket, *, by_reference: bool) -> None:
        """`by_reference` False: everything is copied. The socket is a blocking one."""
        self._sock = sock
        self._by_reference = by_reference
        self._pipe: tuple[int, int] | None = None
        self._named = 0
        self._vector = (ctypes.c_size_t * 2)()  # struct iovec: address, bytes
        self._vector_at = ctypes.addressof(self._vector)

    def send(self, parts: Sequence[Buffer]) -> int:
        """Send the first bytes of `parts`, as many as the socket takes now; their number.

        The next call has to begin with the rest. Raises BlockingIOError where the socket takes nothing,
        OSError where it is dead.
        """
        if self._named:
            return self._move(parts, 0)
        if not self._by_reference:
            return self._sock.sendmsg(parts, (), _DONT_WAIT)
        index = before = 0
        for part in parts:
            if len(part) >= LEAST_BYTES and is_drive_memory(part):
                break
            index += 1
            before += len(part)
        else:
            return self._sock.sendmsg(parts, (), _DONT_WAIT)
        over = len(part) % PIPE_BYTES
        if len(part) > PIPE_BYTES and 0 < over <= OVER_BYTES:
            # As with a slot, a header of some KiB and its value: the remainder would be a call of its own.
            parts = [*parts[:index], part[:over], part[over:], *parts[index + 1 :]]
            part = parts[index + 1]
            index += 1
            before += over
        sent = self._sock.sendmsg(parts[:index], (), _MORE_COMES) if index else 0
        if sent < before:
            return sent
        if not self._name(part):
            return sent or self._sock.sendmsg(parts, (), _DONT_WAIT)
        try:
            return sent + self._move(parts, index)
        except BlockingIOError:
            if not sent:
                raise
            return sent

    def close(self) -> None:
        """Forget named pages that were not sent."""
        self._named = 0
        if self._pipe is not None:
            _close_pipe(self._pipe)  # with what is in it
            self._pipe = None

    def _name(self, part: Buffer) -> bool:
        """Name the beginning of `part` in a pipe; False if that fails, and copy from now on."""
        try:
            self._pipe = _take_pipe()
            self._vector[0] = ctypes.addressof(ctypes.c_char.from_buffer(part))
            self._vector[1] = len(part)
            named = _vmsplice(self._pipe[1], self._vector_at, 1, _SPLICE_F_NONBLOCK)
            if named <= 0:
                raise OSError(ctypes.get_errno(), "vmsplice")
        except OSError as error:
            self._copy_from_now_on(error)
            return False
        self._named = named
        return True

    def _move(self, parts: Sequence[Buffer], index: int) -> int:
        """Move the pipe's contents, which begin `parts[index]`, to the socket."""
        assert self._pipe is not None
        more = self._named < len(parts[index]) or index + 1 < len(parts)
        # splice(2) has no MSG_DONTWAIT and uses the socket's mode, which is this thread's alone.
        descriptor = self._sock.fileno()
        os.set_blocking(descriptor, False)
        try:
            count = os.splice(self._pipe[0], descriptor, self._named, flags=_SPLICE_F_MORE if more else 0)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            # The pipe's contents were not sent: they go with the pipe, and are sent again from their place.
            self._copy_from_now_on(error)
            return self._sock.sendmsg(parts[index:], (), _DONT_WAIT)
        finally:
            os.set_blocking(descriptor, True)
        self._named -= count
        if not self._named:
            _give_pipe(self._pipe)
            self._pipe = None
        return count

    def _copy_from_now_on(self, error: OSError) -> None:
        """Unknown to this kernel, not allowed, or too many pipes: slower, else the same."""
        log.debug("payload is copied: %s", error)
        self._by_reference = False
        self.close()


_spare_pipes: Final[list[tuple[int, int]]] = []
"""Empty pipes of all connections: a payload needs one from its naming until it is sent."""


def _take_pipe() -> tuple[int, int]:
    with contextlib.suppress(IndexError):
        return _spare_pipes.pop()
    pipe = os.pipe()
    try:
        fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:
        _close_pipe(pipe)
        raise
    return pipe


def _give_pipe(pipe: tuple[int, int]) -> None:
    if len(_spare_pipes) < SPARE_PIPES:
        _spare_pipes.append(pipe)
    else:
        _close_pipe(pipe)


def _close_pipe(pipe: tuple[int, int]) -> None:
    for end in pipe:
        os.close(end)
