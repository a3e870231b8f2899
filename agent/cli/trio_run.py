"""Running trio from a verb, so that an error of ours arrives as itself."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

T = TypeVar("T")


def run_unwrapped(main: Callable[[], Awaitable[T]]) -> T:
    """trio.run, with a single error of ours taken out of the groups that nurseries wrap it in."""
    try:
        return trio.run(main)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None
