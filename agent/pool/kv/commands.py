"""What volumes on KV namespaces ask of the channel: commands on keys instead of reads and writes at offsets.

Read steps.py first. A channel that can do this is `KvChannel`; a worker's channel always can, and a
namespace that does not know the commands fails them.
"""

from collections.abc import Sequence
from typing import Final, Protocol, cast

from agent.inline.scatter import Buffer
from agent.pool.steps import IoChannel, Pending

RESERVED_KEY: Final = b"g35 pool's super"
"""Where a KV namespace keeps its superblock. A pseudonym is this with a chance of 2^-128."""
PROOF_KEY: Final = b"g35 path's proof"
"""The key under which paths show that they lead to one medium (agent/remote/path_prober.py)."""


class KvPending(Pending, Protocol):
    """A command on a key under way. `received` counts the bytes of a value that have come."""

    @property
    def missing(self) -> bool:
        """It failed because there is no such key."""

    @property
    def full(self) -> bool:
        """It failed because the namespace has no room."""

    @property
    def present(self) -> bool:
        """It failed because the key has a value, and was to be stored only if it had none."""

    @property
    def value_bytes(self) -> int:
        """After a retrieve: the length of the whole value, also where the buffer took less."""


class KvChannel(IoChannel, Protocol):
    """A channel with commands on keys of up to 16 bytes. `namespace` is an index into the pool map."""

    def kv_store(
        self, namespace: int, key: bytes, parts: Sequence[Buffer], *, only_new: bool = False
    ) -> KvPending:
        """Store a value, all of it or nothing; `only_new`: only where the key has none."""

    def kv_retrieve(self, namespace: int, key: bytes, into: memoryview) -> KvPending:
        """The beginning of a value, as much of it as `into` takes."""

    def kv_delete(self, namespace: int, key: bytes) -> KvPending: ...

    def kv_exists(self, namespace: int, key: bytes) -> KvPending:
        """Done without a fault where the key has a value, `missing` where it has none."""

    def kv_list(self, namespace: int, first: bytes, into: memoryview) -> KvPending:
        """Keys from `first` on, as List of the KV command set lays them out."""

    def kv_used_bytes(self, namespace: int) -> int:
        """What the namespace said to take up when its session last looked; 0 where nothing is known."""


def kv_channel(channel: IoChannel) -> KvChannel:
    """The same channel, for somebody who has a KV namespace to ask."""
    return cast(KvChannel, channel)
