"""The same drives with KV namespaces: commands on keys, over the links of drive_times.py.

A key's value keeps its first block (the slot's header) and its length. A command takes effect when its last
byte has been carried. One that asks, deletes or lists is small: it takes latency and its time at the drive.
"""

from collections.abc import Sequence
from typing import Final

from agent.inline.scatter import Buffer
from agent.pool.kv.volume import room_of
from agent.sim.drive_times import BLOCK, FlashPending, RatedChannel, RatedDrive, packed, unpack_into
from nvmeof.wire.kv import encode_key_list

COMMAND_BYTES: Final = 64
"""What stands for a command without a value."""


class KvPending(FlashPending):
    """One command on a key under way: agent.pool.kv.commands.KvPending."""

    __slots__ = ("full", "missing", "present", "value_bytes")

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.missing = False
        self.full = False
        self.present = False
        self.value_bytes = 0

    def is_missing(self) -> None:
        self.missing, self.fault = True, "no such key"


class RatedKvChannel(RatedChannel):
    """One worker's channel to KV namespaces: agent.pool.kv.commands.KvChannel."""

    def kv_store(
        self, namespace: int, key: bytes, parts: Sequence[Buffer], *, only_new: bool = False
    ) -> KvPending:
        size = sum(map(len, parts))
        head = packed(bytes(memoryview(parts[0])[:BLOCK]))

        def store(drive: RatedDrive, pending: KvPending) -> None:
            earlier = drive.keys.get(key)
            more = room_of(size) - (0 if earlier is None else room_of(earlier[1]))
            if earlier is not None and only_new:
                pending.present, pending.fault = True, "the key has a value"
            elif drive.key_bytes + more > drive.key_room:
                pending.full, pending.fault = True, "no room"
            else:
                drive.keys[key] = head, size
                drive.key_bytes += more

        return self.begin(namespace, KvPending(size), store, write=True)

    def kv_retrieve(self, namespace: int, key: bytes, into: memoryview) -> KvPending:
        kept = self._flash.drives[namespace].keys.get(key)
        size = COMMAND_BYTES if kept is None else min(len(into), kept[1])

        def retrieve(drive: RatedDrive, pending: KvPending) -> None:
            found = drive.keys.get(key)
            if found is None or found is not kept:
                # Deleted or stored anew, amid the command: what a drive says then is its own affair.
                pending.is_missing()
                return
            head, pending.value_bytes = found
            if not pending.abandoned:
                unpack_into(head, into[: min(len(into), BLOCK)])

        return self.begin(namespace, KvPending(size), retrieve)

    def kv_delete(self, namespace: int, key: bytes) -> KvPending:
        def remove(drive: RatedDrive, pending: KvPending) -> None:
            found = drive.keys.pop(key, None)
            if found is None:
                pending.is_missing()
            else:
                drive.key_bytes -= room_of(found[1])

        return self.begin(namespace, KvPending(COMMAND_BYTES), remove, write=True)

    def kv_exists(self, namespace: int, key: bytes) -> KvPending:
        def look(drive: RatedDrive, pending: KvPending) -> None:
            if key not in drive.keys:
                pending.is_missing()

        return self.begin(namespace, KvPending(COMMAND_BYTES), look)

    def kv_list(self, namespace: int, first: bytes, into: memoryview) -> KvPending:
        def name(drive: RatedDrive, pending: KvPending) -> None:
            if not pending.abandoned:
                into[:] = encode_key_list(sorted(key for key in drive.keys if key >= first), len(into))

        return self.begin(namespace, KvPending(len(into)), name)

    def kv_used_bytes(self, namespace: int) -> int:
        return 0
