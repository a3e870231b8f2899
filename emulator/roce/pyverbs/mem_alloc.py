"""`pyverbs.mem_alloc`: memory by its address: the C library's allocators, reading and writing at a number.

Addresses are the caller's word, as in C: a wrong one ends the process.
"""

import ctypes
import sys
from typing import Final

PROT_NONE_: Final = 0
PROT_READ_: Final = 1
PROT_WRITE_: Final = 2
PROT_EXEC_: Final = 4

MAP_SHARED_: Final = 0x1
MAP_PRIVATE_: Final = 0x2
MAP_FIXED_: Final = 0x10
MAP_ANONYMOUS_: Final = 0x20
MAP_GROWSDOWN_: Final = 0x100
MAP_LOCKED_: Final = 0x2000
MAP_NORESERVE_: Final = 0x4000
MAP_POPULATE_: Final = 0x8000
MAP_STACK_: Final = 0x20000
MAP_HUGETLB_: Final = 0x40000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
_libc.free.restype = None
_libc.free.argtypes = [ctypes.c_void_p]

_MAP_FAILED = ctypes.c_void_p(-1).value


def mmap(
    addr: int = 0,
    length: int = 100,
    prot: int = PROT_READ_ | PROT_WRITE_,
    flags: int = MAP_PRIVATE_ | MAP_ANONYMOUS_,
    fd: int = 0,
    offset: int = 0,
) -> int:
    """mmap(2): the address of the mapping. MemoryError where the kernel refuses."""
    address = _libc.mmap(addr, length, prot, flags, fd, offset)
    if address is None or address == _MAP_FAILED:
        raise MemoryError("Failed to mmap memory")
    return int(address)


def munmap(addr: int, length: int) -> None:
    """munmap(2). MemoryError where the kernel refuses."""
    if _libc.munmap(addr, length):
        raise MemoryError("Failed to munmap requested memory")


def malloc(size: int) -> int:
    """malloc(3): the address of `size` bytes."""
    address = _libc.malloc(size)
    if not address:
        raise MemoryError("Failed to allocate memory")
    return int(address)


def posix_memalign(size: int, alignment: int = 8) -> int:
    """posix_memalign(3), zeroed: the address of `size` bytes, a multiple of `alignment`."""
    address = ctypes.c_void_p()
    failure = _libc.posix_memalign(ctypes.byref(address), alignment, size)
    if failure:
        raise MemoryError(f"Failed to allocate memory ({failure})")
    if address.value is None:
        return 0
    ctypes.memset(address, 0, size)
    return address.value


def free(ptr: int) -> None:
    """free(3)."""
    _libc.free(ptr)


def view(addr: int, length: int) -> memoryview:
    """`length` writable bytes at `addr`; the caller keeps the memory alive. Not in pyverbs."""
    return memoryview((ctypes.c_char * length).from_address(addr)).cast("B")


def write(addr: int, data: str | bytes, length: int, offset: int = 0) -> None:
    """Copy `length` bytes of `data` to `addr + offset`; text is encoded first."""
    source = data.encode() if isinstance(data, str) else data
    view(addr + offset, length)[:] = memoryview(source)[:length]


def read(addr: int, length: int, offset: int = 0) -> bytes:
    return ctypes.string_at(addr + offset, length)


def writebe32(addr: int, val: int, offset: int = 0) -> None:
    """A 32-bit number, big-endian; `offset` counts in fours."""
    view(addr + 4 * offset, 4)[:] = (val & 0xFFFFFFFF).to_bytes(4, "big")


def writebe64(addr: int, val: int, offset: int = 0) -> None:
    """A 64-bit number, big-endian; `offset` counts in eights."""
    view(addr + 8 * offset, 8)[:] = (val & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "big")


def read32(addr: int, offset: int = 0) -> int:
    """A 32-bit number in this machine's order; `offset` counts in fours."""
    return int.from_bytes(read(addr + 4 * offset, 4), sys.byteorder)


def read64(addr: int, offset: int = 0) -> int:
    """A 64-bit number in this machine's order; `offset` counts in eights."""
    return int.from_bytes(read(addr + 8 * offset, 8), sys.byteorder)
