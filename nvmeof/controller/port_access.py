"""Through which ports the namespaces of a subsystem can be reached just now (ANA; NVMe Base 2.0, 8.1).

All namespaces of a subsystem are one ANA group, for they fail together: what differs is the port. So a state
belongs to a port, and every controller reports that of the port by which its host connected.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from nvmeof.wire.ana import ANA_STATUS, AnaState

ANA_GROUP: Final = 1
"""The group of all namespaces."""
ANA_TRANSITION_S: Final = 10
"""ANATT: how long a host is to wait for the end of the state `CHANGE`."""


class PortAccess:
    """The states of one subsystem's ports; `Target.set_access` changes them, under its lock."""

    def __init__(self) -> None:
        self.change_count = 0
        self._states = MappingProxyType[int, AnaState]({})

    def state(self, port_id: int) -> AnaState:
        """Optimized, unless somebody said otherwise. Safe without a lock."""
        return self._states.get(port_id, AnaState.OPTIMIZED)

    def set(self, port_id: int, state: AnaState) -> bool:
        """Whether that changes anything."""
        if self.state(port_id) is state:
            return False
        self._states = MappingProxyType({**self._states, port_id: state})
        self.change_count += 1
        return True

    def refusal(self, port_id: int) -> int:
        """The status of commands that come by a port; 0 where they are served."""
        return ANA_STATUS.get(self.state(port_id), 0)
