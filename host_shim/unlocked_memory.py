"""Memory that is made and copied without the interpreter's lock, which an engine's event loop wants."""

import ctypes
import mmap

MAPPED_BYTES = 128 << 10
"""Memory of this size and more comes from the kernel."""


def new_memory(size: int) -> memoryview:
    """Writable memory for `size` bytes, at least one, all zero.

    To zero a new bytearray of 1 MiB holds the interpreter's lock for half a millisecond; the kernel zeroes
    pages as they are first used.
    """
    return memoryview(mmap.mmap(-1, size) if size >= MAPPED_BYTES else bytearray(size))


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy `source` to the beginning of `target` without the interpreter's lock (a slice holds it, 2 ms for
    16 MiB).

    Both are contiguous and writable, of which ctypes takes an address; `target` has room.
    """
    length = source.nbytes
    if length > target.nbytes:
        raise ValueError(f"{length} bytes do not fit into {target.nbytes}")
    if not length:
        return
    into = (ctypes.c_char * length).from_buffer(target)
    out_of = (ctypes.c_char * length).from_buffer(source)
    ctypes.memmove(into, out_of, length)
