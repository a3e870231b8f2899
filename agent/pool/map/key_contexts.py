"""What the wrapped keys of a pool map are bound to: all of a row that decides who reads what, and how.

The map lies on flash, and nothing in it is signed; whoever writes to the flash may write another. A key is
wrapped for a context, made here from the fields of its row, and opens in that context alone. So a map that
was edited without the root key opens nothing under another name or setting: not the volume of one name under
another's, not a volume for another tenant or face, with another cipher or other sizes, not a key of one epoch
in the place of another. Which epochs are over, an agent remembers (agent/attach/map_history.py).

What verbs change without the root key is bound to nothing: namespaces, extents, copies, quotas, bandwidth,
and that a key is gone. By writing those an attacker takes away, and gives nothing: values then are not found.
"""

from __future__ import annotations

import struct
from typing import Protocol

_TENANT = struct.Struct("<16s16sI")
_VOLUME = struct.Struct("<16s16s16sIIII")


class TenantRow(Protocol):
    """What a tenant's key is bound to. `key_epoch`: how often the tenant got another, after an erasure."""

    @property
    def name(self) -> str: ...
    @property
    def tenant_id(self) -> str: ...
    @property
    def key_epoch(self) -> int: ...


class VolumeRow(Protocol):
    """What a volume's secret is bound to."""

    @property
    def name(self) -> str: ...
    @property
    def volume_id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def suite(self) -> str: ...
    @property
    def value_bytes(self) -> int: ...
    @property
    def unit_bytes(self) -> int: ...
    @property
    def ttl_seconds(self) -> int: ...


def tenant_context(pool_id: str, tenant: TenantRow) -> bytes:
    """Pool, tenant and epoch (little-endian), then the name in UTF-8."""
    ids = bytes.fromhex(pool_id), bytes.fromhex(tenant.tenant_id)
    return _TENANT.pack(*ids, tenant.key_epoch) + tenant.name.encode()


def volume_context(pool_id: str, volume: VolumeRow, epoch: int) -> bytes:
    """Pool, tenant, volume, the sizes, the time to live and the epoch (little-endian); then kind, suite and
    name, a zero byte between them: none of them has one."""
    ids = bytes.fromhex(pool_id), bytes.fromhex(volume.tenant), bytes.fromhex(volume.volume_id)
    fixed = _VOLUME.pack(*ids, volume.value_bytes, volume.unit_bytes, volume.ttl_seconds, epoch)
    return fixed + b"\0".join(text.encode() for text in (volume.kind, volume.suite, volume.name))
