"""The system calls of control sessions, and what is told of the pool by them: a `Refusal`.

A handler of a signal may raise an OSError, too, such as the TimeoutError of an alarm. It runs amid any call,
and Python raises it out of the system call that the signal has interrupted. It is the program's own and
concerns no pool, so the rest of the client catches `Refusal` and no other OSError.
"""

import ctypes
import errno
import fcntl
import io
import os
import stat
from collections.abc import Sequence
from typing import ClassVar, Final

from host_shim.control_wire import PROCESS_FOLDER, SESSION_FILE_BYTES

FCNTL_BYTES: Final = 1024
"""`fcntl.ioctl` lets go of the interpreter's lock for so many bytes at the most: for more it holds the lock
through the whole call, in which the agent moves up to 16 MiB and may wait for an enclosure."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fgetxattr.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.fgetxattr.restype = ctypes.c_ssize_t
_libc.ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)
_libc.ioctl.restype = ctypes.c_int


class Refusal(OSError):
    """What a system call of the client has returned: the agent's errno, or the kernel's in its place."""


def is_own(error: OSError) -> bool:
    """Whether a system call of this package said so, and nobody else.

    The traceback of what a handler raises ends in the handler's frame, below the one that made the call. (Not
    so where the handler is written in C, or another thread raises it here; these have no errno as a rule.)
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or error.errno is None:
        return False
    return trace.tb_frame.f_globals.get("__package__") == __package__


def raise_refusal(error: OSError) -> None:
    """Raise a Refusal of what a system call said; return where anybody else raised it."""
    if is_own(error):
        raise Refusal(error.errno, error.strerror, error.filename) from None


class OpenFile(int):
    """A descriptor that is closed with its last use: an interrupt may come before anybody has noted it."""

    file: io.FileIO


class Files:
    """The system calls of a session. A subclass has them elsewhere: a scripted agent, a virtio-fs device.

    Each raises Refusal for what it says itself, and nothing else that is an OSError.
    """

    ENDS_BEFORE_IT_RAISES: ClassVar[bool] = True
    """Nobody works on an ioctl any more when an exception comes out of it. Python runs handlers of signals
    once a system call has returned. FUSE returns when the agent has answered, or never had the request, or
    is gone (`NO_ANSWER`)."""

    def open(self, path: str) -> int:
        """A session. ENOTSUP for an ordinary file of this name: what it gives back would be no values."""
        try:
            file = io.FileIO(path, "r+")
            try:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode) or found.st_size != SESSION_FILE_BYTES:
                    raise OSError(errno.ENOTSUP, "an ordinary file, and not the session of a g35 agent", path)
            except OSError:
                file.close()
                raise
            descriptor = OpenFile(file.fileno())
            descriptor.file = file
            return descriptor
        except OSError as error:
            raise_refusal(error)
            raise

    def processes(self, folder: str) -> list[str]:
        """The names of the folders of other processes of the agent, in the folder of the session's file."""
        try:
            return sorted(name for name in os.listdir(folder) if name.startswith(PROCESS_FOLDER))
        except OSError as error:
            if is_own(error):
                return []
            raise

    def close(self, descriptor: int) -> None:
        try:
            if isinstance(descriptor, OpenFile):
                descriptor.file.close()
            else:
                os.close(descriptor)
        except OSError as error:
            raise_refusal(error)
            raise

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        try:
            return os.pwrite(descriptor, data, offset)
        except OSError as error:
            raise_refusal(error)
            raise

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        try:
            return os.preadv(descriptor, [into], offset)
        except OSError as error:
            raise_refusal(error)
            raise

    def pwritev(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        try:
            return os.pwritev(descriptor, parts, offset)
        except OSError as error:
            raise_refusal(error)
            raise

    def preadv_parts(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        try:
            return os.preadv(descriptor, parts, offset)
        except OSError as error:
            raise_refusal(error)
            raise

    def ioctl(self, descriptor: int, command: int, data: bytearray) -> None:
        call = fcntl_ioctl if len(data) <= FCNTL_BYTES else unlocked_ioctl
        while True:
            try:
                call(descriptor, command, data)
            except OSError as error:
                if error.errno == errno.EINTR and is_own(error):
                    continue  # before the agent had it
                raise_refusal(error)
                raise
            return

    def fgetxattr(self, descriptor: int, name: bytes, into: memoryview) -> int:
        """`os.getxattr` into the caller's memory, which that one cannot: it asks twice, and copies."""
        start = ctypes.byref(ctypes.c_char.from_buffer(into))
        while True:
            length: int = _libc.fgetxattr(descriptor, name, start, len(into))
            if length >= 0:
                return length
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise Refusal(code, os.strerror(code))


def fcntl_ioctl(descriptor: int, command: int, data: bytearray) -> None:
    fcntl.ioctl(descriptor, command, data, True)


def unlocked_ioctl(descriptor: int, command: int, data: bytearray) -> None:
    """The same without the interpreter's lock, whatever the length. For few bytes it takes longer."""
    if _libc.ioctl(descriptor, command, ctypes.byref(ctypes.c_char.from_buffer(data))) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
