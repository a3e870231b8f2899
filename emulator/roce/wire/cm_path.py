"""The path of a connection as REQ describes it, primary and alternate alike (IBTA volume 1, 12.6.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from emulator.roce.wire.bit_fields import Bits, Bytes, Flag, Layout

GID_BYTES: Final = 16
NO_LID: Final = 0xFFFF
"""RoCE has none."""
PATH_BYTES: Final = 44


@dataclass(frozen=True, slots=True)
class CmPath:
    """One path. "Local" is the sender of the REQ; GIDs have 16 bytes."""

    local_gid: Annotated[bytes, Bytes(4, GID_BYTES)]
    remote_gid: Annotated[bytes, Bytes(20, GID_BYTES)]
    local_lid: Annotated[int, Bits(0, 16)] = NO_LID
    remote_lid: Annotated[int, Bits(2, 16)] = NO_LID
    flow_label: Annotated[int, Bits(36, 20)] = 0
    packet_rate: Annotated[int, Bits(39, 6, 5)] = 0
    traffic_class: Annotated[int, Bits(40, 8)] = 0
    hop_limit: Annotated[int, Bits(41, 8)] = 64
    service_level: Annotated[int, Bits(42, 4)] = 0
    subnet_local: Annotated[bool, Flag(42, 3)] = False
    local_ack_timeout: Annotated[int, Bits(43, 5)] = 0
    """The sender's, coded (`ack_timeout_seconds`): the receiver's queue pair waits for ACKs so long."""

    def encode(self) -> bytes:
        """44 bytes. ValueError for fields that do not fit."""
        if len(self.local_gid) != GID_BYTES or len(self.remote_gid) != GID_BYTES:
            raise ValueError("a GID has 16 bytes")
        return PATH.encode(self)


PATH: Final = Layout(CmPath)
assert PATH.size == PATH_BYTES

NO_PATH: Final = CmPath(bytes(GID_BYTES), bytes(GID_BYTES), 0, 0, hop_limit=0)
"""All zero: there is no alternate path."""
