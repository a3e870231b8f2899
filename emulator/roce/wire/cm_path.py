"""The path of a connection as REQ describes it, primary and alternate alike (IBTA volume 1, 12.6.5).

    0..1   local LID       2..3 remote LID               0xFFFF: RoCE has none
    4..19  local GID       20..35 remote GID
    36..39 31..12 flow label, 11..6 reserved, 5..0 packet rate
    40     traffic class   41 hop limit
    42     7..4 service level, 3 subnet local, 2..0 reserved
    43     7..3 local ACK time-out, 2..0 reserved

Big-endian, 44 bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from emulator.roce.wire.flow import Buffer

PATH: Final = struct.Struct(">HH16s16sIBBBB")
assert PATH.size == 44

GID_BYTES: Final = 16
NO_LID: Final = 0xFFFF
MAX_FLOW_LABEL: Final = 0xFFFFF


@dataclass(frozen=True, slots=True)
class CmPath:
    """One path. "Local" is the sender of the REQ; GIDs have 16 bytes."""

    local_gid: bytes
    remote_gid: bytes
    local_lid: int = NO_LID
    remote_lid: int = NO_LID
    flow_label: int = 0
    packet_rate: int = 0
    traffic_class: int = 0
    hop_limit: int = 64
    service_level: int = 0
    subnet_local: bool = False
    local_ack_timeout: int = 0
    """The sender's, coded (`ack_timeout_seconds`): the receiver's queue pair waits for ACKs so long."""

    def encode(self) -> bytes:
        """44 bytes. ValueError for fields that do not fit."""
        if len(self.local_gid) != GID_BYTES or len(self.remote_gid) != GID_BYTES:
            raise ValueError("a GID has 16 bytes")
        if not (
            0 <= self.flow_label <= MAX_FLOW_LABEL
            and 0 <= self.packet_rate < 64
            and 0 <= self.service_level < 16
            and 0 <= self.local_ack_timeout < 32
        ):
            raise ValueError(f"a field of the path is too large: {self}")
        return PATH.pack(
            self.local_lid,
            self.remote_lid,
            self.local_gid,
            self.remote_gid,
            self.flow_label << 12 | self.packet_rate,
            self.traffic_class,
            self.hop_limit,
            self.service_level << 4 | self.subnet_local << 3,
            self.local_ack_timeout << 3,
        )


NO_PATH: Final = CmPath(bytes(GID_BYTES), bytes(GID_BYTES), 0, 0, hop_limit=0)
"""All zero: there is no alternate path."""


def decode_path(raw: Buffer, offset: int) -> CmPath:
    """The path at `offset`; the caller has made sure that 44 bytes are there. Any bytes are a path."""
    fields = PATH.unpack_from(raw, offset)
    local_lid, remote_lid, local_gid, remote_gid, word, traffic_class, hop_limit, level, timeout = fields
    return CmPath(
        local_gid=local_gid,
        remote_gid=remote_gid,
        local_lid=local_lid,
        remote_lid=remote_lid,
        flow_label=word >> 12,
        packet_rate=word & 0x3F,
        traffic_class=traffic_class,
        hop_limit=hop_limit,
        service_level=level >> 4,
        subnet_local=level & 8 != 0,
        local_ack_timeout=timeout >> 3,
    )
