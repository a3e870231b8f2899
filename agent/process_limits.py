"""What Linux lets this process have (setrlimit(2)), and what is to be done where that is too little.

Much of an agent's memory is taken when it is first used: caches, values that come in pieces, staged files.
Where the address space is limited (RLIMIT_AS, `ulimit -v`) they would be refused amid a request. A library in
Rust (the bindings of `cryptography`) ends the whole process when it gets no memory. So an agent does not
serve where it could not have all that its configuration promises.
"""

from __future__ import annotations

import errno
import os
import resource
from typing import Final

from agent.errors import G35Error, UserError

RESERVE_BYTES: Final = 256 << 20
"""Address space beside the configured bounds: stacks, buffers of a request, what malloc keeps for threads."""
RESERVE_DESCRIPTORS: Final = 32
"""Files beside those of the start: new connections to enclosures, readers of metrics."""
_THREAD_REFUSED: Final = "can't start new thread"
_NOT_MAPPED: Final = "failed to map segment"


def address_room() -> int | None:
    """Bytes of address space that this process may still take; None where that is not limited."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    with open("/proc/self/statm") as counts:
        return max(0, limit - int(counts.read().split()[0]) * resource.getpagesize())


def has_room_for(size: int) -> bool:
    """Whether a mapping of `size` bytes leaves enough address space for all else."""
    room = address_room()
    return room is None or room - size >= RESERVE_BYTES


def check_limits(promised: int) -> None:
    """Raises UserError where the limits have no room for `promised` bytes of memory, and what else may come.

    Call it when all threads and buffers of the start are there.
    """
    room, wanted = address_room(), promised + RESERVE_BYTES
    if room is not None and room < wanted:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        least = -(-(limit - room + wanted) // 1024)
        raise UserError(
            f"the address space of this process is limited to {limit >> 20} MiB (RLIMIT_AS), and its "
            f"configuration needs {-(-least // 1024)} MiB",
            f"raise the limit (ulimit -v {least}, LimitAS= of a unit), or lower agent.directory_cache, "
            "prestage.memory, files.staging and write_back_memory",
        )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and len(os.listdir("/proc/self/fd")) + RESERVE_DESCRIPTORS > files:
        raise UserError(
            f"this process may open {files} files (RLIMIT_NOFILE), and has nearly as many open",
            "raise the limit: ulimit -n 4096, or LimitNOFILE= of a unit",
        )


def explained(error: BaseException) -> G35Error | None:
    """What a person can do about an exception that says that Linux refused something; None for any other."""
    number = error.errno if isinstance(error, OSError) else None
    unmapped = isinstance(error, ImportError) and _NOT_MAPPED in str(error)
    if unmapped or isinstance(error, MemoryError) or number == errno.ENOMEM:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return G35Error(
                "there is not enough memory", "free some, or raise the memory limit of the control group"
            )
        return UserError(
            f"there is not enough memory: the address space of this process is limited to {limit >> 20} MiB",
            "raise the limit (ulimit -v, LimitAS= of a unit)",
        )
    if number in (errno.EMFILE, errno.ENFILE):
        return UserError(
            "no more files can be opened", "raise the limit: ulimit -n 4096, or LimitNOFILE= of a unit"
        )
    if isinstance(error, RuntimeError) and _THREAD_REFUSED in str(error):
        return UserError(
            "Linux refuses another thread",
            "raise what limits it: processes (ulimit -u, TasksMax= of a unit) or address space (ulimit -v)",
        )
    return None
