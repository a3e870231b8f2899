"""How the control face has values brought into memory before they are asked for."""

from typing import Protocol

from agent.pool.access import ServedVolume
from host_shim.control_wire import Outcome


class StartPrestage(Protocol):
    """Sets out to bring a key into memory. `milliseconds`: of no use any more after that; 0: no such end."""

    def __call__(self, volume: ServedVolume, key: bytes, milliseconds: int = 0) -> Outcome: ...


def prestage_nothing(volume: ServedVolume, key: bytes, milliseconds: int = 0) -> Outcome:
    """A `StartPrestage` of a process that brings nothing into memory."""
    return Outcome.REFUSED
