"""The faults of a drive, each a known failure of flash or enclosures that the agent has to survive. No I/O.

* `slow`: every command takes longer; the deadline of a read must cut it off.
* `hang`: commands are taken and never answered, until `heal`; other drives and queues go on.
* `error`: commands fail with a status, with a probability, for some kinds of command.
* `flip_on_read`: stored bytes are right, returned bytes have bits wrong: a bad path, not a bad medium.
* `full`: writes are refused as a full thin-provisioned medium refuses them.
* `lose_writes`: a write is acknowledged and not stored, as by a volatile cache that lied about a flush.

Damage at rest (flipped bits, zeroed and misplaced ranges) happens once to the medium and is no state: see
`emulator.jbof.drive.Drive.flip_at_rest`. This file decides by a seeded source of chance; `drive.py` acts.
"""

import random
from dataclasses import asdict, dataclass
from typing import Any

from nvmeof.controller.storage import Operation


def _check_probability(probability: float) -> None:
    if not 0 <= probability <= 1:
        raise ValueError(f"a probability is between 0 and 1, not {probability}")


@dataclass(frozen=True, slots=True)
class ErrorFault:
    """Fail with `status` (15 bits, SCT << 8 | SC); `operations` empty means every kind of command."""

    status: int
    probability: float = 1.0
    operations: frozenset[Operation] = frozenset()
    do_not_retry: bool = False

    def __post_init__(self) -> None:
        _check_probability(self.probability)
        if not 0 < self.status <= 0x7FF:
            raise ValueError(f"a status is SCT << 8 | SC, 0x001 to 0x7ff, not {self.status:#x}")


@dataclass(frozen=True, slots=True)
class FlipFault:
    """Flip `bits` bits of a read, where it overlaps `offset .. offset + length`."""

    offset: int
    length: int
    probability: float = 1.0
    bits: int = 1

    def __post_init__(self) -> None:
        _check_probability(self.probability)
        if self.offset < 0 or self.length <= 0 or not 0 < self.bits <= 4096:
            raise ValueError("a flip needs a range of at least one byte, and 1 to 4096 bits")


@dataclass(slots=True)
class DriveFaults:
    """The present faults of one drive. Not thread-safe: the drive holds its lock."""

    chance: random.Random
    extra_latency_s: float = 0.0
    hung: bool = False
    full: bool = False
    error: ErrorFault | None = None
    flip_on_read: FlipFault | None = None
    lose_writes: float = 0.0

    @property
    def any_active(self) -> bool:
        """Whether a command must look at the faults at all."""
        return self != DriveFaults(self.chance)

    def failing(self, operation: Operation) -> ErrorFault | None:
        """The error that this command ends with, by its kind and by chance."""
        fault = self.error
        if fault is None or (fault.operations and operation not in fault.operations):
            return None
        return fault if self.chance.random() < fault.probability else None

    def loses_this_write(self) -> bool:
        return self.chance.random() < self.lose_writes

    def bits_to_flip(self, offset: int, length: int) -> list[tuple[int, int]]:
        """(byte within the read, mask) for each bit to flip in a read of `offset .. offset + length`."""
        fault = self.flip_on_read
        if fault is None:
            return []
        start = max(offset, fault.offset)
        end = min(offset + length, fault.offset + fault.length)
        if start >= end or self.chance.random() >= fault.probability:
            return []
        return [
            (position - offset, mask)
            for position, mask in choose_bits(self.chance, start, end - start, fault.bits)
        ]

    def as_json(self) -> dict[str, Any]:
        """The faults as `stats` reports them."""
        error = None
        if self.error is not None:
            error = asdict(self.error) | {"operations": sorted(kind.value for kind in self.error.operations)}
        return {
            "hung": self.hung,
            "full": self.full,
            "slow_ms": self.extra_latency_s * 1000,
            "lose_writes": self.lose_writes,
            "error": error,
            "flip_on_read": asdict(self.flip_on_read) if self.flip_on_read is not None else None,
        }


def choose_bits(source: random.Random, offset: int, length: int, bits: int) -> list[tuple[int, int]]:
    """`bits` different bits of the range as (offset of the byte, mask); all of them if it has fewer."""
    chosen = source.sample(range(length * 8), min(bits, length * 8))
    return [(offset + bit // 8, 1 << (bit % 8)) for bit in chosen]
