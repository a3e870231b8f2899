"""The tenants of a serving agent: their quotas and keys, as the pool map says.

Upkeep counts the room that tenants with a quota have in use. Where that is more than the quota (it was
lowered, or several agents stored at once), it evicts the least wanted values, some at a time.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.inline.key_use import KeyUseBook
from agent.inline.secrets import RootKey
from agent.pool.maintenance.orphans import Unnamed
from agent.pool.maintenance.usage_survey import Census
from agent.pool.map.document import MapTenant, PoolMap
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.bandwidth import Bandwidth
from agent.pool.volume.quota import Limits, Measured, Quota
from agent.pool.volume.volume import PoolVolume, TenantShare, Volume, in_sets
from agent.pool.write.quota_eviction import evict_one, fullest_first
from agent.tenancy.key_rotation import KeyRotation

EVICTIONS_PER_LOOK = 64
"""Values that go in one round of upkeep because a tenant has more than it may have."""
EVICTION_SECONDS = 1.0


@dataclass(slots=True)
class _Tenant:
    name: str
    volumes: list[PoolVolume]
    quota: Quota
    bandwidth: Bandwidth

    @property
    def in_sets(self) -> list[Volume]:
        return [each for each in in_sets(self.volumes) if not each.erased]


def limits_of(tenant: MapTenant) -> Limits:
    return Limits(tenant.quota_slots, tenant.quota_bytes)


class TenantLimits:
    """Quotas by tenant. `follow` and `look` are for one thread, `snapshot` for any."""

    def __init__(
        self,
        pool_map: PoolMap,
        volumes: Sequence[PoolVolume],
        workers: int,
        root: RootKey,
        state: Path,
        unnamed: Unnamed | None = None,
    ) -> None:
        """No more than half of the `workers` wait for bandwidth at once. `state`: the agent's folder."""
        self.rotation = KeyRotation(pool_map, volumes, root, KeyUseBook(state), time.monotonic, unnamed)
        seats = threading.BoundedSemaphore(workers // 2)
        self._census = Census()
        self._tenants: list[_Tenant] = []
        for tenant in pool_map.tenants:
            identity = bytes.fromhex(tenant.tenant_id)
            own = [volume for volume in volumes if volume.settings.tenant == identity]
            measured = [Measured(each.occupancy, each.settings.slot_bytes) for each in in_sets(own)]
            found = _Tenant(tenant.name, own, Quota(measured), Bandwidth(seats))
            caches = [each for each in found.in_sets if each.settings.may_lose]
            for volume in own:
                bandwidth = found.bandwidth if volume.settings.may_lose else None
                volume.change(tenant=TenantShare(found.quota, bandwidth, caches))
            self._tenants.append(found)
        self.follow(pool_map)

    def follow(self, pool_map: PoolMap) -> None:
        """Keep to the limits of another map. Tenants that are new in it wait for the agent's next start."""
        self.rotation.follow(pool_map)
        named = {tenant.name: tenant for tenant in pool_map.tenants}
        for tenant in self._tenants:
            entry = named.get(tenant.name)
            if entry is not None:
                tenant.quota.limit(limits_of(entry))
                tenant.bandwidth.limit(entry.bandwidth)

    def look(self, channel: IoChannel) -> Steps[None]:
        """Go on with rotations, count the next sets, and take what is too much. A bounded piece of work."""
        yield from self.rotation.look(channel)
        limited = [tenant for tenant in self._tenants if tenant.quota.limits.of_room]
        if not limited:
            return
        yield from self._census.look(channel, [volume for tenant in limited for volume in tenant.in_sets])
        for tenant in limited:
            for _ in range(EVICTIONS_PER_LOOK):
                if not tenant.quota.is_over() or not (yield from _shed(tenant, channel)):
                    break

    def snapshot(self) -> list[dict[str, Any]]:
        """For each tenant: its volumes by name, what it has, what it may have, what its limits did."""
        rows = []
        for tenant in self._tenants:
            # What is remembered of an erased tenant's directories is nothing that it has.
            slots, size = tenant.quota.in_use() if tenant.in_sets else (0, 0)
            limits, counts = tenant.quota.limits, tenant.quota.counts
            rows.append(
                {
                    "name": tenant.name,
                    "volumes": [each.settings.name for each in tenant.volumes if not each.erased],
                    "room_is_counted": len(in_sets(tenant.volumes)) == len(tenant.volumes),
                    "slots_known_taken": slots,
                    "slots_max": limits.slots,
                    "bytes_known_taken": size,
                    "bytes_max": limits.bytes,
                    "bandwidth_max": tenant.bandwidth.rate,
                    "quota_puts_refused": counts.puts_refused,
                    "quota_evictions": counts.evictions,
                    "bandwidth_waits": tenant.bandwidth.waits,
                    "bandwidth_late": tenant.bandwidth.late,
                }
            )
        return rows


def _shed(tenant: _Tenant, channel: IoChannel) -> Steps[bool]:
    """Evict a value of the tenant's fullest volume that may lose some: /fs keeps what it has."""
    for volume in fullest_first(tenant.in_sets):
        if (yield from evict_one(volume, channel, channel.now() + EVICTION_SECONDS)):
            tenant.quota.count(evicted=1)
            return True
    return False
