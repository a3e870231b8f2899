"""A read from two copies: the second is asked where the first is slow."""

from __future__ import annotations

from collections.abc import Callable

from agent.pool.steps import Lanes, Pending, Steps, Wait, has_come
from agent.pool.volume.hedging import SLICE, Hedge


def race(
    lanes: Lanes,
    hedge: Hedge,
    first: Pending,
    ask_other: Callable[[], tuple[Pending, int]],
    enough: int,
    deadline: float,
) -> Steps[bool]:
    """Wait until one of two reads has come. True: the other one, which `ask_other` started; it says how many
    bytes of it are enough. False: the first; or neither in time; or the other was not asked, and the caller
    waits on. The caller abandons what it does not use.
    """
    began = lanes.now()
    if has_come(first, enough) or (yield Wait(first, min(deadline, began + hedge.delay()), enough)):
        hedge.took(lanes.now() - began)
        return False
    if lanes.now() >= deadline or not hedge.may_ask():
        return False
    second, enough_of_second = ask_other()
    running = [(second, enough_of_second), (first, enough)]
    while running and lanes.now() < deadline:
        for pending, wanted in tuple(running):
            if not has_come(pending, wanted):
                yield Wait(pending, min(deadline, lanes.now() + SLICE), wanted)
            if not has_come(pending, wanted):
                continue
            if pending.fault is None:
                hedge.took(lanes.now() - began)
                return pending is second
            running.remove((pending, wanted))
    return False
