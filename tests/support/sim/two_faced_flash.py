"""Namespaces in memory of which some lie about the pool map: each who looks may be shown another one.

`TwoFacedNamespace` is what one viewer is shown of a namespace of blocks or of keys. What lies there is shared
by all viewers; over the superblock a viewer may be shown other bytes, which his own writes take away or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agent.pool.kv.eviction import RESERVED_KEY
from agent.pool.map.document import DATA_START
from agent.pool.steps import Buffer
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace, MemoryPending


@dataclass
class TwoFacedNamespace(MemoryNamespace):
    """`blocks` and `values` are the same dictionaries for all viewers."""

    values: dict[bytes, bytes] = field(default_factory=dict)
    shown: dict[int, bytes] = field(default_factory=dict)
    """In the place of blocks, by byte offset, or of the superblock among keys (offset 0)."""
    obeys: bool = True
    """Whether a write of the superblock ends the lie that this viewer is shown."""
    deaf: bool = False
    """Superblocks that are written are acknowledged and dropped."""

    def load(self, offset: int, into: memoryview) -> None:
        super().load(offset, into)
        for at in range(0, len(into), 4096):
            if offset + at in self.shown:
                into[at : at + 4096] = self.shown[offset + at]

    def store(self, offset: int, parts: Sequence[Buffer]) -> None:
        if offset < DATA_START:
            if self.deaf:
                return
            if self.obeys:
                size = sum(map(len, parts))
                self.shown = {at: data for at, data in self.shown.items() if not 0 <= at - offset < size}
        super().store(offset, parts)

    def show(self, offset: int, data: bytes) -> None:
        """Lie with these bytes from an offset on."""
        for at in range(0, len(data), 4096):
            self.shown[offset + at] = data[at : at + 4096].ljust(4096, b"\0")


@dataclass
class KeyPending(MemoryPending):
    missing: bool = False
    full: bool = False
    present: bool = False
    value_bytes: int = 0


class TwoFacedChannel(MemoryChannel):
    """One viewer's. Commands on keys are done at once."""

    namespaces: Sequence[TwoFacedNamespace]

    def kv_store(
        self, namespace: int, key: bytes, parts: Sequence[Buffer], *, only_new: bool = False
    ) -> KeyPending:
        target = self.namespaces[namespace]
        if only_new and key in target.values:
            return KeyPending(done=True, fault="there", present=True)
        if key == RESERVED_KEY:
            if target.deaf:
                return KeyPending(done=True)
            if target.obeys:
                target.shown = {}
        target.values[key] = b"".join(bytes(part) for part in parts)
        return KeyPending(done=True)

    def kv_retrieve(self, namespace: int, key: bytes, into: memoryview) -> KeyPending:
        target = self.namespaces[namespace]
        value = target.values.get(key)
        if key == RESERVED_KEY and target.shown:
            value = target.shown[0]
        if value is None:
            return KeyPending(done=True, fault="no such key", missing=True)
        count = min(len(value), len(into))
        into[:count] = value[:count]
        return KeyPending(done=True, received=count, value_bytes=len(value))

    def kv_delete(self, namespace: int, key: bytes) -> KeyPending:
        return KeyPending(done=True, missing=self.namespaces[namespace].values.pop(key, None) is None)

    def kv_exists(self, namespace: int, key: bytes) -> KeyPending:
        missing = key not in self.namespaces[namespace].values
        return KeyPending(done=True, missing=missing, fault="no such key" if missing else None)

    def kv_list(self, namespace: int, first: bytes, into: memoryview) -> KeyPending:
        return KeyPending(done=True, fault="keys are not listed here")

    def kv_used_bytes(self, namespace: int) -> int:
        return sum(map(len, self.namespaces[namespace].values.values()))
