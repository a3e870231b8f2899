"""One agent at a time has a state folder.

Two would share names of files, books of guests and the host's identity. The start of the second one removes
what programs of the first hold open and have unlinked.

The lock is a record lock (fcntl(2)). The kernel drops it with the process, so it is never stale.
A forked reader does not hold it, as it would a lock of flock(2), and cannot keep a new agent from starting.
"""

import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio

from agent.errors import G35Error

LOCK_FILE = "agent.lock"
ENDING_SECONDS = 2.0
"""How long an agent that was killed may take to give its memory back, and then the lock."""
_LOOK_SECONDS = 0.05


@asynccontextmanager
async def state_of_one_agent(state: Path) -> AsyncIterator[None]:
    """The folder, which exists, is this process's alone until the end of the block. Raises G35Error where
    another agent has it; OSError."""
    descriptor = os.open(state / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        end = trio.current_time() + ENDING_SECONDS
        while not _locked(descriptor):
            if trio.current_time() >= end:
                raise G35Error(
                    f"another agent{_process(descriptor)} uses the state folder {state}",
                    "end it first, or give this agent a state folder of its own (agent.state)",
                )
            await trio.sleep(_LOOK_SECONDS)
        with suppress(OSError):  # a full disk: the lock holds without a name in it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # lockf(3) knows both words for a lock that another has
        return False
    return True


def _process(descriptor: int) -> str:
    said = os.pread(descriptor, 32, 0).strip()
    return f", process {int(said)}," if said.isdigit() else ""
