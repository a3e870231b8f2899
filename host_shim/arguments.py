"""What calls of pool.py may be given, and what they raise for what they may not be given."""

import difflib
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from host_shim.block_key import checked_key
from host_shim.control_wire import VALUE_BYTES_MAX

Buffer: TypeAlias = bytearray | memoryview
"""Anything writable with the buffer protocol; named for the two that everybody has."""


class UnknownVolume(LookupError):
    """The pool behind the mount has no volume of this name."""


class ValueTooLong(ValueError):
    """No slot of the volume can hold a value of this length."""


class BufferTooSmall(ValueError):
    """The value is longer than the buffer that was to take it; the buffer has only its beginning."""


def no_length(length: int) -> ValueTooLong:
    return ValueTooLong(f"a value has 1 to {VALUE_BYTES_MAX} bytes, this one {length}")


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
    known = {each.casefold(): each for each, kind in kinds.items() if kind == "kv"}
    near = difflib.get_close_matches(name.casefold(), known, 1)
    meant = f" (did you mean {known[near[0]]}?)" if near else ""
    return UnknownVolume(f"the pool has no volume {name!r}{meant}")


def same_count(keys: Sequence[bytes], buffers: Sequence[object]) -> None:
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
    for key in keys:
        checked_key(key)


def bytes_of(value: bytes | Buffer) -> memoryview:
    view = memoryview(value)
    return view.cast("B") if view.nbytes else _NO_BYTES


def writable(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    if view.format != "B" or view.ndim != 1 or not view.c_contiguous:
        view = view.cast("B")
    if view.readonly:
        raise TypeError("the buffer of a get must be writable")
    if not len(view):
        raise ValueError("the buffer of a get has no room")
    # No value is longer, and the agent refuses parts that are.
    return view if len(view) <= VALUE_BYTES_MAX else view[:VALUE_BYTES_MAX]


_NO_BYTES = memoryview(b"")
