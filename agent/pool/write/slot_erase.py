"""Freeing slots, header and entry, such that a write which nobody answers for does no harm when it lands.

The header is zeroed with the entry, so that an agent with an old directory finds nothing either. From before
the zeros are sent until they are on flash nobody may store anything in the slot: what would be acknowledged
there is gone when they land. So the slot is shunned meanwhile, and for SHUN_SECONDS after a write of it that
was not answered. An entry that flash shows there in that time is no value to a put (agent/pool/write/put.py),
for it may be cleared yet.
"""

from __future__ import annotations

from collections.abc import Collection

from agent.pool.counters import MissCause
from agent.pool.format.slot import HEADER_BYTES
from agent.pool.steps import Lanes, Pending, Steps, wait_for
from agent.pool.volume.directory_cache import SHUN_SECONDS, CachedSet
from agent.pool.volume.volume import Volume


class Freeing:
    """Slots of one set on their way out. The set's writer is held from here until `end` has returned."""

    def __init__(self, volume: Volume, lanes: Lanes, cached: CachedSet, slots: Collection[int]) -> None:
        """Forget the slots' entries, and send the writes that free them on flash."""
        self._lanes = lanes
        self._cached = cached
        self._slots = slots
        self._shunned_before: dict[int, float] = {}
        with cached.guard:
            directory = cached.directory
            assert directory is not None
            for slot in slots:
                if (until := cached.shunned.get(slot)) is not None:
                    self._shunned_before[slot] = until
                cached.shunned[slot] = lanes.now() + SHUN_SECONDS
                directory.clear(slot)
            image = directory.image()
        self._writes: list[Pending] = [
            lanes.write(cached.namespace, volume.slot_offset(cached, slot), [bytes(HEADER_BYTES)])
            for slot in slots
        ]
        self._writes.append(lanes.write(cached.namespace, cached.offset, [image]))

    def end(self, deadline: float) -> Steps[MissCause | None]:
        """None once all of it is on flash; otherwise why that is not known."""
        failure: MissCause | None = None
        for pending in self._writes:
            cause = yield from wait_for(self._lanes, pending, deadline)
            failure = failure or cause
        with self._cached.guard:
            for slot in self._slots:
                if failure is not None:
                    self._cached.shunned[slot] = self._lanes.now() + SHUN_SECONDS
                elif slot in self._shunned_before:
                    self._cached.shunned[slot] = self._shunned_before[slot]
                else:
                    self._cached.shunned.pop(slot, None)
        return failure
