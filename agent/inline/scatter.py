"""A buffer that lies in several places: the target of a range where the host's pages are scattered.

A `Scatter` does for a get what a writable memoryview does (length, slices, assignment to a slice). A slice
that lies in one place *is* a memoryview. Only the cipher tells them apart: agent/inline/cipher_suites.py.
"""

from collections.abc import Iterable
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview


class Scatter:
    """Runs of memory in their order, as one range of `len` bytes. They stay where they are."""

    __slots__ = ("_length", "runs")

    def __init__(self, runs: Iterable[memoryview]) -> None:
        self.runs = list(runs)
        self._length = sum(map(len, self.runs))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> "Target":
        start, stop, step = part.indices(self._length)
        if step != 1:
            raise ValueError("a scatter is cut into ranges only")
        if start == 0 and stop == self._length:
            return self
        found: list[memoryview] = []
        at = 0
        for run in self.runs:
            end = at + len(run)
            if start < end:
                if stop <= at:
                    break
                found.append(run[max(0, start - at) : stop - at])
            at = end
        return found[0] if len(found) == 1 else Scatter(found)

    def __setitem__(self, part: slice, data: bytes | bytearray | memoryview) -> None:
        target = self[part]
        if len(target) != len(data):
            raise ValueError("a range and its bytes differ in length")
        if isinstance(target, memoryview):
            target[:] = data
            return
        source = memoryview(data)
        at = 0
        for run in target.runs:
            run[:] = source[at : at + len(run)]
            at += len(run)


Target: TypeAlias = memoryview | Scatter
"""Where a range of a value is put."""
