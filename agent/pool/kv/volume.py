"""A volume on namespaces of the KV command set: the placement chooses the namespace, the enclosure keeps the
slots.

Read volume.py first, of which this is the short form. There are no sets and no directories: the key on flash
is the pseudonym, its value the sealed slot (header and units, sealed_slot.py), and whatever the enclosure
gives back for a pseudonym has to prove itself as that very key. kv/get.py and kv/put.py move values,
kv/eviction.py makes room. The differences that follow:

* A key has one candidate, the namespace that ranks best, so that a miss is one Retrieve and nothing else.
* The volume has its namespaces to itself (document.py sees to that), so "the namespace is full" means that
  the volume has all of the bytes there that it may have.
* Nothing on flash tells of the use of a value. What this agent knows of it, it has in memory.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from agent.inline.cipher_suites import Place
from agent.inline.secrets import SecretKey
from agent.pool.counters import MissCause
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.kv.commands import KvChannel, KvPending, kv_channel
from agent.pool.late_answers import wait_for
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.placement import Placement
from agent.pool.volume.puts_in_pieces import PutsInPieces
from agent.pool.volume.settings import Timing, VolumeExtent, VolumeSettings
from agent.pool.volume.volume import LOADS_IN_FLIGHT, PoolVolume

REMEMBERED_KEYS: Final = 1 << 16
"""Keys of a volume of which this agent remembers the last use, or that it evicted them. 100 bytes each."""

ROOM_UNIT: Final = 4096
"""What values are reckoned to take up, each in whole units: our enclosure's, and close to any drive's."""

LIVE_FULL: Final = 0.9
"""Live values go only from a volume that is at least so full."""


def room_of(slot_bytes: int) -> int:
    """What a slot of so many bytes takes up in its namespace."""
    return -(-slot_bytes // ROOM_UNIT) * ROOM_UNIT


class _Memory:
    """A number for each of the keys used last. Safe from any thread."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, int] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, key: bytes, number: int) -> None:
        with self._lock:
            self._entries[key] = number
            self._entries.move_to_end(key)
            if len(self._entries) > REMEMBERED_KEYS:
                self._entries.popitem(last=False)

    def forget(self, key: bytes) -> None:
        with self._lock:
            self._entries.pop(key, None)

    def get(self, key: bytes) -> int | None:
        return self._entries.get(key)


class Account:
    """How full one namespace is, as far as is known here: what it said of itself, and what was done since.

    Values that other agents store are not seen until it says that it is full. Written without a lock: a
    lost update is a value's size of error, and the next "full" corrects it.
    """

    __slots__ = ("capacity", "used")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: int | None = None

    def add(self, channel: KvChannel, namespace: int, more: int) -> None:
        known = channel.kv_used_bytes(namespace) if self.used is None else self.used
        self.used = min(self.capacity, max(0, known + more))

    def is_full(self) -> None:
        """It refused a value for want of room."""
        self.used = self.capacity

    def look(self, channel: KvChannel, namespace: int) -> int:
        return channel.kv_used_bytes(namespace) if self.used is None else self.used


class KvVolume(PoolVolume):
    def __init__(
        self,
        settings: VolumeSettings,
        secret: SecretKey,
        timing: Timing,
        puts_in_pieces: PutsInPieces | None = None,
    ) -> None:
        super().__init__(settings, secret, timing, puts_in_pieces)
        self._nguids = {each.namespace: each.nguid for each in settings.shares}
        self.accounts = {each.namespace: Account(each.bytes) for each in settings.shares}
        self.uses = _Memory()
        """When this agent last stored or served a key (by pseudonym): microseconds since the epoch."""
        self.evicted = _Memory()
        self.disproven = _Memory()
        """Keys whose value was no proof of itself: for a put they are not there."""

    def _place_keys(self, placement_key: SecretKey) -> Placement:
        shares = self.settings.shares
        mebibytes = [VolumeExtent(each.namespace, each.nguid, 0, max(1, each.bytes >> 20)) for each in shares]
        return Placement(placement_key, mebibytes)

    def namespace_of(self, pseudonym: bytes) -> int:
        """Where a key belongs (an index into the pool map)."""
        return self.placement.candidates(pseudonym)[0].namespace

    def place(self, namespace: int, pseudonym: bytes) -> Place:
        """A slot as the cipher sees it: what would be its number is the beginning of its key."""
        return Place(self._nguids[namespace], int.from_bytes(pseudonym[:8], "little"))

    def absence(self, pseudonym: bytes) -> MissCause:
        """Why a key that the enclosure does not know is not there."""
        return MissCause.NEVER_STORED if self.evicted.get(pseudonym) is None else MissCause.EVICTED

    def fullness(self, channel: KvChannel) -> float:
        """The part of its bytes that the volume takes up, as far as is known here."""
        used = sum(account.look(channel, namespace) for namespace, account in self.accounts.items())
        return used / sum(account.capacity for account in self.accounts.values())

    def lookup(
        self, channel: IoChannel, keys: Sequence[bytes], deadline: float, least: float = 0.0
    ) -> Steps[list[MissCause | None]]:
        """See `PoolVolume`. One Exist for each key."""
        asking = kv_channel(channel)
        found: list[MissCause | None] = []
        for start in range(0, len(keys), LOADS_IN_FLIGHT):
            batch: list[tuple[bytes, KvPending]] = []
            for key in keys[start : start + LOADS_IN_FLIGHT]:
                pseudonym = self.placement.pseudonym(key)
                batch.append((pseudonym, asking.kv_exists(self.namespace_of(pseudonym), pseudonym)))
            for pseudonym, pending in batch:
                cause = yield from wait_for(channel, pending, deadline)
                found.append(self.absence(pseudonym) if pending.missing else cause)
        tally = channel.tally(self.settings.name)
        tally.lookups += len(found)
        tally.lookups_absent += len(found) - found.count(None)
        return found

    def table_sizes(self) -> dict[str, int]:
        kv_keys = len(self.uses) + len(self.evicted) + len(self.disproven)
        return super().table_sizes() | {"kv-keys": kv_keys}

    def usage(self) -> tuple[int, int]:
        """See `PoolVolume`. Both as if each value were the largest that fits."""
        slot = room_of(HEADER_BYTES + self.settings.value_bytes)
        total = sum(account.capacity // slot for account in self.accounts.values())
        taken = sum((account.used or 0) // slot for account in self.accounts.values())
        return total, min(total, taken)
