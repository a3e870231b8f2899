"""Which queue ids an agent has on every enclosure: 1 to `workers` are the door's, then come the others'."""

from __future__ import annotations

import logging
from typing import Final

from agent.config.configuration import Configuration
from agent.errors import G35Error
from agent.pool.prestage.prefetcher import THREADS as PRESTAGE_THREADS
from agent.remote.fabric import Fabric
from agent.service.volume_policies import storing_queues

log = logging.getLogger(__name__)

EXTRA_QUEUES: Final = PRESTAGE_THREADS + 2
"""Queues beside the workers': the prestagers', upkeep's, and the keeper's, which not every agent has."""
UPKEEP_AFTER: Final = 1 + PRESTAGE_THREADS
"""So many after the workers' comes that of upkeep."""


def own_queues(configuration: Configuration) -> int:
    """Queues of the agent's own threads beside its workers. The last is that of
    agent/membership/auto_join.py, and before it comes that of agent/remote/path_prober.py, where there are
    such."""
    proving, members = bool(configuration.discovery), configuration.pool.membership == "auto"
    return EXTRA_QUEUES + storing_queues(configuration.policies) + proving + members


def s3_queues(configuration: Configuration) -> int:
    """Queues of the S3 door's threads."""
    return configuration.s3.workers if configuration.s3.listen else 0


def guest_queues(configuration: Configuration) -> int:
    """Request queues of all guests: each has a queue of its own on every enclosure."""
    workers = configuration.agent.worker_count
    return sum(device.queue_count(workers) for device in configuration.virtiofs)


def granted_workers(fabric: Fabric, wanted: int, extra: int = EXTRA_QUEUES) -> int:
    """How many workers have a queue on every enclosure that is connected, beside `extra` others; `wanted`
    at most.

    A worker without a queue on one of N enclosures would turn each N-th of its requests into a miss, so
    the poorest enclosure decides. Raises G35Error where it grants too few for a single worker.
    """
    workers = wanted
    for enclosure in fabric.enclosures:
        if enclosure.session is None:
            continue
        granted = enclosure.session.io_queues
        if granted <= extra:
            raise G35Error(
                f"enclosure {enclosure.name} grants {granted} I/O queues to a host, "
                f"and an agent with one worker needs {1 + extra}",
                "let it grant more, or take it out of the configuration",
            )
        if granted < wanted + extra:
            log.warning(
                "enclosure %s grants %d I/O queues of the %d that are needed: %d workers serve at the most "
                "instead of %d; let it grant more, or lower agent.workers",
                enclosure.name,
                granted,
                wanted + extra,
                granted - extra,
                wanted,
            )
        workers = min(workers, granted - extra)
    return workers
