"""The faults a drive can be given while it runs, and what each must do to its host.

They are the ways in which flash and enclosures are known to fail; each exists because the agent promises to
survive it:

* `slow`: every command takes longer; the deadline of a read must cut it off.
* `hang`: commands are taken and never answered, until `heal`; other drives and queues go on.
* `error`: commands fail with a status, with a probability, for some kinds of command.
* `flip_on_read`: what is stored is right, what is returned has bits wrong: a bad path, not a bad medium.
* `full`: writes are refused as a full thin-provisioned medium refuses them.
* `lose_writes`: a write is acknowledged and not stored, as a volatile cache does that lied about a flush.

Damage at rest (flipped bits, zeroed and misplaced ranges) is done once to the medium and is no state: see
`emulator.jbof.drive.Drive.flip_at_rest` and its neighbours.

This file decides, from its own seeded source of chance; `emulator.jbof.drive` acts. No I/O here.
"""

from __future__ import annotations

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
    """Flip `bits` bits in what a read returns, where it overlaps `offset .. offset + length`."""

    offset: int
    length: int
    probability: float = 1.0
    bits: int = 1

    def __post_init__(self) -> None:
        _check_probability(self.probability)
        if self.offset < 0 or self.length <= 0 or not 0 < self.bits <= 4096:
            raise ValueError("a flip needs a range of at least one byte, and 1 to 4096 bits")


class DriveFaults:
    """What is wrong with one drive at present. Not thread-safe: the drive holds its lock."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.extra_latency_s = 0.0
        self.hung = False
        self.full = False
        self.error: ErrorFault | None = None
        self.flip_on_read: FlipFault | None = None
        self.lose_writes = 0.0

    def heal(self) -> None:
        """Back to a drive without faults. Damage at rest stays: it is in the medium."""
        self.extra_latency_s = 0.0
        self.hung = self.full = False
        self.error = self.flip_on_read = None
        self.lose_writes = 0.0

    @property
    def any_active(self) -> bool:
        """Whether a command must look at the faults at all; asked once per command."""
        return bool(
            self.hung
            or self.full
            or self.extra_latency_s
            or self.lose_writes
            or self.error is not None
            or self.flip_on_read is not None
        )

    def failing(self, operation: Operation) -> ErrorFault | None:
        """The error that this command is to end with, if chance and its kind have it so."""
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
        """What `stats` reports of the drive's state."""
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
