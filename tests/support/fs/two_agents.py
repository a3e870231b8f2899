"""Two agents on one pool in processes of their own, with a mount each of the same shared volume."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.support.pool_up import PoolUp
from tests.support.waiting import wait_until


class TwoAgents:
    """One pool, two agents, two mounts of the same shared volume."""

    def __init__(self, pool: PoolUp, other: Path) -> None:
        self.pool = pool
        self.one = pool.mount / "shared/shared"
        self.two = other / "shared/shared"
        self._mounts = (pool.mount, other)

    def settle(self) -> None:
        """Until neither agent deletes what files have given up.

        Such a delete may write a directory that the other agent writes just then, and take a chunk or a name
        of it away: a miss that docs/limits.md tells of. What one agent alone does afterwards has no miss."""

        def waiting(mount: Path) -> int:
            status = json.loads((mount / ".g35/status.json").read_text())
            return sum(row["held"] for row in status["bounds"] if row["name"] == "shared-discards")

        wait_until(lambda: not any(map(waiting, self._mounts)), 30, "what files have given up to go")


def data_of(seed: int, size: int) -> bytes:
    return random.Random(f"shared {seed} {size}").randbytes(size)
