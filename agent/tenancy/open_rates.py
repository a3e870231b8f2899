"""Bandwidth of tenants in a process that begins no get of a tenant with a rate (agent/service/reader.py).

What was opened there before the tenant had a rate is read on: a file, a value amid its ranges. Each such
process has a bucket of its own for that, as another agent would have.
"""

import threading
from collections.abc import Sequence

from agent.pool.map.document import PoolMap
from agent.pool.volume.bandwidth import Bandwidth
from agent.pool.volume.volume import TenantShare, Volume


class OpenRates:
    """For one thread."""

    def __init__(self, pool_map: PoolMap, volumes: Sequence[Volume], workers: int) -> None:
        """No more than half of the `workers` wait at once."""
        seats = threading.BoundedSemaphore(workers // 2)
        self._of_tenant: dict[bytes, Bandwidth] = {}
        for volume in volumes:
            if volume.settings.may_lose:
                bandwidth = self._of_tenant.setdefault(volume.settings.tenant, Bandwidth(seats))
                volume.change(tenant=TenantShare(None, bandwidth))
        self.follow(pool_map)

    def follow(self, pool_map: PoolMap) -> None:
        """Keep to the rates of another map."""
        for tenant in pool_map.tenants:
            bandwidth = self._of_tenant.get(bytes.fromhex(tenant.tenant_id))
            if bandwidth is not None:
                bandwidth.limit(tenant.bandwidth)
