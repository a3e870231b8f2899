"""The label at the beginning of a local namespace's device: which namespace it is, and how large.

4,096 bytes, little-endian, at offset 0 of the device:
     0  8  magic "g35local"
     8  4  version of this layout
    12  4  zero
    16 16  NGUID: "g35l", and twelve bytes made at random with the label
    32  8  bytes of the namespace, a multiple of 4,096
    40  8  CRC-64/NVME of the 40 bytes before
    48  …  zero
The namespace begins at 1 MiB, at a boundary that SSDs like. So a device keeps its name in another server, and
under another path. Nothing here proves who wrote the label: as with an enclosure, that is the pool's matter.
"""

import struct
from dataclasses import dataclass
from typing import Final

from agent.inline.crc64 import crc64
from agent.pool.volume.settings import LOCAL_NGUID

MAGIC: Final = b"g35local"
VERSION: Final = 1
LABEL_BYTES: Final = 4096
NAMESPACE_START: Final = 1 << 20
"""Where the namespace begins on the device."""
BLOCK_BYTES: Final = 4096
"""Of the namespace's logical blocks."""
NAMESPACE_BYTES_MAX: Final = 1 << 60

_FIELDS: Final = struct.Struct("<8sI4x16sQ")
_CRC: Final = struct.Struct("<Q")


class NoLabel(Exception):
    """There is none; the text says what is there instead."""


@dataclass(frozen=True, slots=True)
class Label:
    """`nguid` has 16 bytes; `size` is that of the namespace."""

    nguid: bytes
    size: int

    def encode(self) -> bytes:
        fields = _FIELDS.pack(MAGIC, VERSION, self.nguid, self.size)
        return (fields + _CRC.pack(crc64(fields))).ljust(LABEL_BYTES, b"\0")


def decode_label_untrusted(raw: bytes) -> Label:
    """The label in the first `LABEL_BYTES` of a device. Raises NoLabel."""
    if len(raw) < LABEL_BYTES or raw[: len(MAGIC)] != MAGIC:
        raise NoLabel("other data")
    _, version, nguid, size = _FIELDS.unpack_from(raw)
    if _CRC.unpack_from(raw, _FIELDS.size) != (crc64(raw[: _FIELDS.size]),):
        raise NoLabel("a damaged label of g35")
    if version != VERSION:
        raise NoLabel(f"a label of another version of g35 ({version})")
    is_ours = nguid.startswith(LOCAL_NGUID) and any(nguid[len(LOCAL_NGUID) :])
    if not is_ours or not 0 < size <= NAMESPACE_BYTES_MAX or size % BLOCK_BYTES:
        raise NoLabel("a damaged label of g35")
    return Label(nguid, size)
