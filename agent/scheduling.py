"""How Linux schedules the agent's threads: those that are woken do not interrupt who is running.

A get wakes threads in turn: the agent's worker sends a command, and the enclosure's thread is woken, on the
same processor more often than not. Where it may interrupt, it does so amid the worker's send, while the
socket is the worker's: the kernel lays aside what the enclosure sends (the socket's backlog) and works it
off later, in the worker's time. The other way round it is the same. Threads of SCHED_BATCH interrupt nobody
when they are woken (sched(7)): each goes on until it waits, and the next one finds everything done.

The price is paid where others keep all processors busy: a woken thread waits until they have had their turn.
"""

from __future__ import annotations

import logging
import os
from typing import Literal

log = logging.getLogger(__name__)

Scheduling = Literal["batch", "normal"]


def be_scheduled(scheduling: Scheduling) -> None:
    """So for the calling thread and all that it starts from now on. `normal`: as it was started."""
    if scheduling == "normal":
        return
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:
        log.info("scheduling: threads are as any others: %s", error.strerror)
