"""GIDs and addresses as text: an IPv6 address is its own GID, IPv4 is mapped, ::ffff:a.b.c.d (annex A17)."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from emulator.roce.wire.flow import packed_address, text_address

GID_BYTES: Final = 16
_MAPPED: Final = bytes(10) + b"\xff\xff"


@lru_cache(maxsize=256)
def gid_of(ip: str) -> bytes:
    """The 16 bytes of the GID of an address as text. ValueError where it is none."""
    address = packed_address(ip)
    return _MAPPED + address if len(address) == 4 else address


@lru_cache(maxsize=256)
def ip_of(gid: bytes) -> str:
    """The address of a GID, as text. ValueError where `gid` is not 16 bytes."""
    if len(gid) != GID_BYTES:
        raise ValueError(f"a GID has 16 bytes, not {len(gid)}")
    return text_address(gid[12:] if gid.startswith(_MAPPED) else gid)
