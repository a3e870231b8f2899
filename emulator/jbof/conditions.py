"""The parts of a drive that do not depend on its command set: a name, a speed, faults and counters.

`Drive` (logical blocks) and `KvDrive` (keys and values) add a medium. One lock guards the model, the faults'
source of chance and the counters; it is held for a few assignments, never while bytes move.
"""

import errno
import random
import threading
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from emulator.jbof.drive_model import DriveModel, DriveModelSettings, LinkModel
from emulator.jbof.faults import DriveFaults
from nvmeof.controller.storage import HELD, Operation, StorageError
from nvmeof.wire.status import Status

_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_WRITING: Final = frozenset({Operation.WRITE, Operation.WRITE_ZEROES, Operation.STORE})
_READING: Final = frozenset(
    {Operation.READ, Operation.COMPARE, Operation.RETRIEVE, Operation.LIST, Operation.EXIST}
)


@dataclass(slots=True)
class CommonCounters:
    """The counters of every drive. A subclass has `<operation>_commands` for each of its operations."""

    failed_commands: int = 0
    faults_injected: dict[str, int] = field(default_factory=dict)


_CARRIED_OUT: Final = frozenset({Operation.READ, Operation.RETRIEVE})
_CARRIED_IN: Final = frozenset({Operation.WRITE, Operation.STORE, Operation.COMPARE})
"""Commands whose data cross the enclosure's link, by its two ways."""

_COMMAND_COUNTER: Final = {operation: f"{operation.value}_commands" for operation in Operation}


class DriveConditions:
    """See the module's docstring. `number` is its place in the enclosure, from 0; its NSID is one more."""

    size_bytes: int
    """Its capacity."""
    reach: int
    """The offsets of faults are below it."""

    def __init__(
        self,
        number: int,
        counters: CommonCounters,
        *,
        nguid: bytes,
        model: DriveModelSettings | None = None,
        seed: int = 0,
    ) -> None:
        if len(nguid) != 16 or not any(nguid):
            raise ValueError("an NGUID has 16 bytes, not all of them zero")
        self.number = number
        self.nguid = nguid
        self.faults = DriveFaults(random.Random(seed))
        self._common_counters = counters
        self._lock = threading.Lock()
        self._faulty = False  # faults.any_active, kept here so that a healthy drive pays one test
        self._model: DriveModel | None = None
        self.link = LinkModel()
        """The enclosure's: a drive that is in none has one to itself."""
        self.set_model(model or DriveModelSettings())

    def admit(self, operation: Operation, offset: int, length: int, now: float) -> float:
        """Count a command and say when it may end; raises StorageError where a fault says so."""
        with self._lock:
            self._count_command(operation)
            due = now
            if self._model is not None:
                due = self._model.due(is_read=operation in _READING, length=length, now=now)
            if operation in _CARRIED_OUT or operation in _CARRIED_IN:
                carried = self.link.due(is_read=operation in _CARRIED_OUT, length=length, now=now)
                due = max(due, carried)
            if self._faulty:
                due = self._admit_faulty(operation, due)
            return due

    def _count_command(self, operation: Operation) -> None:
        """By name, which is slow: a drive counts its commonest commands itself."""
        counters, name = self._common_counters, _COMMAND_COUNTER[operation]
        setattr(counters, name, getattr(counters, name) + 1)

    def _admit_faulty(self, operation: Operation, due: float) -> float:
        faults = self.faults
        if faults.hung:
            self._count_fault("hang")
            return HELD
        error = faults.failing(operation)
        if error is not None:
            self._count_fault("error")
            self._common_counters.failed_commands += 1
            raise StorageError(error.status, "a fault set for this drive", do_not_retry=error.do_not_retry)
        if faults.full and operation in _WRITING:
            self._count_fault("full")
            self._common_counters.failed_commands += 1
            raise StorageError(Status.CAPACITY_EXCEEDED, "the drive is full (a fault)")
        if faults.extra_latency_s:
            self._count_fault("slow")
            due += faults.extra_latency_s
        return due

    def held_until(self, now: float) -> float:
        """Asked again for commands that were held."""
        with self._lock:
            return HELD if self.faults.hung else now

    def _failed(self, error: OSError, otherwise: Status) -> StorageError:
        """The error for a host: Capacity Exceeded for a full disk, `otherwise` for anything else."""
        with self._lock:
            self._common_counters.failed_commands += 1
        full = error.errno in _FULL_ERRNOS
        return StorageError(Status.CAPACITY_EXCEEDED if full else otherwise, f"drive {self.number}: {error}")

    def set_model(self, settings: DriveModelSettings) -> None:
        """Imitate this drive from the next command on."""
        with self._lock:
            self._model = None if settings.is_off else DriveModel(settings)

    def set_faults(self, **changes: Any) -> None:
        """Change attributes of `faults`."""
        with self._lock:
            for name, value in changes.items():
                setattr(self.faults, name, value)
            self._faulty = self.faults.any_active

    def heal(self) -> None:
        """Remove all faults. Damage at rest stays: it is in the medium."""
        with self._lock:
            self.faults = DriveFaults(self.faults.chance)
            self._faulty = False

    def _flipped(self, view: memoryview, offset: int) -> memoryview:
        """`view`, read at `offset`, or by a fault of the path a copy with bits wrong."""
        with self._lock:
            flips = self.faults.bits_to_flip(offset, len(view))
            if flips:
                self._count_fault("flip_on_read")
        if not flips:
            return view
        copy = bytearray(view)
        for position, mask in flips:
            copy[position] ^= mask
        return memoryview(copy)

    def _count_fault(self, kind: str) -> None:
        injected = self._common_counters.faults_injected
        injected[kind] = injected.get(kind, 0) + 1

    def stats(self) -> dict[str, Any]:
        """Counters and state as JSON (`docs/reference`)."""
        with self._lock:
            described, counters, faults = (
                self._described(),
                asdict(self._common_counters),
                self.faults.as_json(),
            )
        identity = {"drive": self.number, "nsid": self.number + 1, "nguid": self.nguid.hex()}
        return {**identity, **described, "faults": faults, **counters}

    def _described(self) -> dict[str, Any]:
        """The medium as a part of `stats`: each kind of drive has its own."""
        return {}
