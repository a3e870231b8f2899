"""What the calls of a pool come to: lengths, causes, and the exceptions of wrong use."""

from __future__ import annotations

import difflib
import errno
import math
from dataclasses import dataclass
from typing import Any

from host_shim.control_wire import Outcome
from host_shim.session import ONE_REQUEST_BYTES


class UnknownVolume(LookupError):
    """The pool behind the mount has no volume of this name."""


class ValueTooLong(ValueError):
    """No slot of the volume can hold a value of this length."""


class BufferTooSmall(ValueError):
    """The value is longer than the buffer that was to take it; what came is not the whole of it."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What became of one get: `length` is None for a miss, and `outcome` its cause.

    `outcome` is None where no agent was there to say.
    """

    length: int | None
    outcome: Outcome | None


def judged(length: int, room: int, outcome: Outcome | None) -> Fetched:
    if length == 0:
        return Fetched(None, None if outcome is Outcome.HIT else outcome)
    if ONE_REQUEST_BYTES < length < room and outcome is not Outcome.HIT:
        return Fetched(None, outcome)
    return Fetched(length, Outcome.HIT)


def whole_seconds(ttl: float | None) -> int:
    """A time to live as a request has it: 0 stands for the volume's own. ValueError for what is no time."""
    if ttl is None:
        return 0
    if not 0 < ttl <= (1 << 32) - 1:
        raise ValueError(
            f"a time to live of {ttl} s is none: above 0, up to {(1 << 32) - 1}, None for the volume's own"
        )
    return math.ceil(ttl)


def unknown_volume(name: str, stats: dict[str, Any]) -> UnknownVolume:
    """The exception, which names the volume that is nearest to what was asked for."""
    kinds = {str(each["name"]): str(each.get("kind", "kv")) for each in stats.get("volumes", ())}
    if name in kinds:
        return UnknownVolume(f"volume {name!r} is of kind {kinds[name]}; blocks go into one of kind kv")
    near = difflib.get_close_matches(name, [each for each in kinds if kinds[each] == "kv"], 1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return UnknownVolume(f"the pool has no volume {name!r}{meant}")


def wrong_use(refused: OSError, volume: str) -> Exception:
    """What an errno of the agent means to the caller; it has not to do with the state of the pool."""
    if refused.errno in (errno.EFBIG, errno.EMSGSIZE):
        return ValueTooLong(f"a value is longer than the slots of volume {volume!r}")
    return refused
