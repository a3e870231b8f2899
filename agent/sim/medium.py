"""The memory of a simulated namespace, a worker's buffer, and the fixed names of a simulation.

Only blocks that were written take memory. Names and secrets are the same in every run, so that a run that
failed fails again in the same place.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from agent.inline.scatter import Buffer
from agent.inline.secrets import VOLUME_SECRET_BYTES, SecretKey

EXTENT_AT = 1 << 20
"""Where the volumes of a simulated namespace begin, in bytes."""


def fixed_secret(seed: int = 35) -> SecretKey:
    """The secret of a volume, by its number."""
    return SecretKey(random.Random(f"volume secret {seed}").randbytes(VOLUME_SECRET_BYTES))


def nguid_of(number: int) -> bytes:
    return random.Random(f"nguid {number}").randbytes(16)


def key_of(number: int) -> bytes:
    """The key of a value, by its number."""
    return random.Random(f"key {number}").randbytes(16)


@dataclass
class Medium:
    """A namespace's blocks of 4 KiB, and the faults that are set from outside: `down` (no way there),
    `hung` (never answers), `broken` (a status), `suspect` (no new values)."""

    size: int
    blocks: dict[int, bytes] = field(default_factory=dict)
    down: bool = False
    hung: bool = False
    broken: bool = False
    suspect: bool = False
    reads: int = 0
    writes: int = 0
    bytes_written: int = 0

    def load(self, offset: int, into: memoryview) -> None:
        """Copy whole blocks to `into`."""
        for at in range(0, len(into), 4096):
            into[at : at + 4096] = self.blocks.get(offset + at, bytes(4096))

    def store(self, offset: int, parts: Sequence[Buffer]) -> None:
        """Write whole blocks."""
        data = b"".join(bytes(part) for part in parts)
        assert offset % 4096 == 0
        assert len(data) % 4096 == 0
        for at in range(0, len(data), 4096):
            self.blocks[offset + at] = data[at : at + 4096]
        self.bytes_written += len(data)

    def flip(self, byte: int, bit: int = 0) -> None:
        """Turn one bit over."""
        at = byte // 4096 * 4096
        block = bytearray(self.blocks.get(at, bytes(4096)))
        block[byte % 4096] ^= 1 << bit
        self.blocks[at] = bytes(block)


class WorkerBuffer:
    """One worker's buffer: the same memory every time, as in a worker, and never clean."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def take(self, size: int) -> memoryview:
        if len(self._bytes) < size:
            self._bytes = bytearray(size)
        view = memoryview(self._bytes)[:size]
        view[:] = b"\xa5" * size
        return view
