"""What prestaging is worth: gets from the agent's memory, and a trace replayed with and without it."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from agent.bench.pool_probes import GetProbe, values_got
from agent.bench.rounds import Sample
from agent.bench.single_probes import BUNDLED_TRACE, TRACE_VALUE_BYTES, Counted, replay_record, unique_blocks
from agent.bench.sites import PoolShape, Sites
from agent.errors import G35Error
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.map.document import DATA_START, set_size
from host_shim.block_key import key_of

STAGED_SECONDS = 20.0
"""How long bringing all values into memory may take."""
REPLAY_REQUESTS = 300
"""Of the trace at the most: each is played three times, with all of its blocks in memory."""
ROOM = 1.5
"""Slots for each block of the trace: nothing is evicted, so the ways differ in nothing but prestaging."""


class PrestagedProbe(GetProbe):
    """Gets in flight, one key a call, of values that wait in the agent's memory."""

    def __init__(self, sites: Sites, shape: PoolShape, in_flight: int) -> None:
        super().__init__(sites, dataclasses.replace(shape, prestaged=True), 1, in_flight, registered=True)
        self._keys = [key_of(f"get {number}") for number in range(values_got(shape.value_bytes))]

    def round(self, seconds: float) -> Sample:
        self._stage()
        before = self.site.counters()["prestage_hits"]
        sample = super().round(seconds)
        from_memory = self.site.counters()["prestage_hits"] - before
        if from_memory != sample.operations:
            raise G35Error(f"{from_memory} of {sample.operations} gets were served from memory")
        return sample

    def _stage(self) -> None:
        """Bring all values into memory, and wait until they are there."""
        self.site.volume.prestage(self._keys)
        end = time.monotonic() + STAGED_SECONDS
        while self.site.status()["memory"]["prestaged_bytes"] < len(self._keys) * self.shape.value_bytes:
            if time.monotonic() > end:
                raise G35Error(f"the values were not in memory after {STAGED_SECONDS:.0f} s")
            time.sleep(0.01)


def replayed(sites: Sites, trace: Path | None, requests: int) -> dict[str, Counted]:
    """`prestage_served_share` and `prestage_wasted_share`: the agent reads ahead what it has learned.

    In the details also the other two ways: nobody announces or reads ahead, and the client announces.
    """
    path, count = trace or BUNDLED_TRACE, min(requests, REPLAY_REQUESTS)
    sets = max(1, round(unique_blocks(path, count) * ROOM / SLOTS_PER_SET))
    shape = PoolShape(TRACE_VALUE_BYTES, DATA_START + sets * set_size(TRACE_VALUE_BYTES), prestaged=True)
    ways: dict[str, dict[str, Any]] = {}
    for way in ("none", "announced", "learned"):
        site = sites.pool(dataclasses.replace(shape, learn=way == "learned", drive_bytes=shape.drive_bytes))
        record = replay_record(site, path, count, prestage=way == "announced", seed=len(ways))
        ways[way] = {key: record[key] for key in _KEYS}
    learned = ways["learned"]
    details = {"trace": path.name, "requests": count, "ways": ways}
    return {
        "prestage_served_share": Counted(learned["memory_share"] or 0.0, details),
        "prestage_wasted_share": Counted(learned["prestage_wasted_share"] or 0.0, details),
    }


_KEYS = (
    "hits", "hit_ratio", "get_p50_ms", "get_p99_ms", "seconds", "memory_share", "prestage_late",
    "prestage_wasted_share", "prestage_wasted_bytes",
)  # fmt: skip
