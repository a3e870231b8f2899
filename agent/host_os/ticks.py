"""Looks that a task takes several times a second, in step with those of other tasks of its event loop.

A turn of the loop and the sleep of a task cost some tenths of a millisecond together, most of them for the
processor's wake-up. Tasks that wake together share that, so an idle agent costs less.
"""

import trio


def next_tick(seconds: float) -> float:
    """When the next look is due, by trio's clock: a multiple of `seconds` between looks."""
    return (trio.current_time() // seconds + 1) * seconds
