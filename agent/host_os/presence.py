"""The mark by which `g35 pool format` sees that an agent serves a pool; it lives as long as the process.

The mark is a Unix socket in the abstract name space (unix(7)), bound and never connected:

    g35/pool/<pool id, 32 hexadecimal digits>/<process id>

The kernel removes it with the process, so a mark is never stale, and every user may list it (/proc/net/unix).
Its reach is this machine, and one network name space in it: an agent in a container of its own is not seen.
"""

import os
import re
import socket
from collections.abc import Set
from pathlib import Path

_TABLE = Path("/proc/net/unix")
_NAME = re.compile(r"@g35/pool/([0-9a-f]{32})/([0-9]+)")


def set_mark(pool_id: str) -> socket.socket:
    """Mark this process as one that serves the pool, until the socket is closed. OSError where it cannot."""
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(f"\0g35/pool/{pool_id}/{os.getpid()}")
    except OSError:
        mark.close()
        raise
    return mark


def serving_processes(pool_ids: Set[str]) -> list[int]:
    """Processes on this machine that serve one of these pools, by id; empty where none can be seen."""
    try:
        table = _TABLE.read_text(errors="replace")
    except OSError:
        return []
    # The path is the eighth column; a process could only fake a mark, and so only forbid a format.
    names = (line.split(maxsplit=7)[7:] for line in table.splitlines()[1:])
    found = (_NAME.fullmatch(name[0].strip()) for name in names if name)
    return sorted({int(mark[2]) for mark in found if mark is not None and mark[1] in pool_ids})
