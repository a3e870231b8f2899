"""The processors on which `g35 up` lets its agent run."""

from __future__ import annotations

import os


def agent_cpus(transport: str) -> tuple[int, ...]:
    """One of two where the agent's NIC is emulated; empty, which is all, everywhere else.

    The work of an emulated NIC is done under one interpreter lock, so the agent's threads gain little from a
    second processor, and hand that lock to each other sooner on one. And on two processors that are busy
    Linux looks for an idle one no more when it wakes a thread: it waited half a millisecond behind
    the enclosure while the other processor had nothing to do (docs/decisions/0036-processors-of-an-agent.md).
    """
    allowed = sorted(os.sched_getaffinity(0))
    return tuple(allowed[:1]) if transport == "rdma" and len(allowed) == 2 else ()
