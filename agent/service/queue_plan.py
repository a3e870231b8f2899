"""The I/O queue ids of every thread of an agent, on every enclosure."""

import logging
from dataclasses import dataclass
from typing import Final

from agent.config.configuration import Configuration
from agent.errors import G35Error
from agent.pool.prestage.prefetcher import THREADS as PRESTAGE_THREADS
from agent.remote.fabric import Fabric
from agent.service.slot_lender import links_of
from agent.service.why_alone import why_alone

log = logging.getLogger(__name__)

EXTRA_QUEUES: Final = PRESTAGE_THREADS + 2
"""Queues that every agent has beside its workers': those of prestaging, of upkeep and of repair."""


@dataclass(frozen=True, slots=True)
class QueuePlan:
    """The I/O queue ids of each thread that talks to enclosures; an enclosure takes one Connect for an id.

    Ids run from 1 without a gap: workers, prestaging, upkeep, repair, write-back, path prober, members,
    guests, S3, queries, places in G4, slots that are lent. None, or an empty range: this agent has no such
    thread.
    """

    workers: range
    prestage: range
    upkeep: int
    repair: int
    write_back: int | None
    path_prober: int | None
    members: int | None
    """Of agent/membership/auto_join.py."""
    guests: tuple[range, ...]
    """By virtio-fs device; one id for each of its request queues."""
    s3: range
    query: range
    spill: range
    """One for each place in G4 (agent/spill/tier.py)."""
    slots: range
    """`links_of` for each reader (agent/service/slot_lender.py)."""

    def __post_init__(self) -> None:
        ids = sorted(self._ids())
        if ids != list(range(1, len(ids) + 1)):
            raise AssertionError(f"queue ids are not each there once: {ids}")

    def _ids(self) -> list[int]:
        one = (self.upkeep, self.repair, self.write_back, self.path_prober, self.members)
        ids = [each for each in one if each is not None]
        for several in (
            self.workers,
            self.prestage,
            *self.guests,
            self.s3,
            self.query,
            self.spill,
            self.slots,
        ):
            ids += several
        return ids

    @property
    def total(self) -> int:
        return max(self._ids())

    @property
    def extra(self) -> int:
        """Queues beside the workers' that there have to be. Without those for slots that are lent, the first
        process serves all puts."""
        return self.total - len(self.workers) - len(self.slots)

    @classmethod
    def of(
        cls, configuration: Configuration, workers: int | None = None, slots: int | None = None
    ) -> "QueuePlan":
        """`workers`, `slots`: as many of those that are wanted as the enclosures grant; None: all of them."""
        wanted, following = configuration.agent.worker_count, 1

        def take(count: int) -> range:
            nonlocal following
            taken = range(following, following + count)
            following += count
            return taken

        def take_if(has_thread: bool) -> int | None:
            return take(1).start if has_thread else None

        if slots is None:
            readers = 0 if why_alone(configuration) else configuration.agent.process_count - 1
            slots = readers * links_of(configuration)
        return cls(
            take(wanted if workers is None else workers),
            take(PRESTAGE_THREADS),
            take(1).start,
            take(1).start,
            take_if(any(policy.write == "back" for policy in configuration.policies)),
            take_if(bool(configuration.discovery)),
            take_if(configuration.pool.membership == "auto"),
            tuple(take(device.queue_count(wanted)) for device in configuration.virtiofs),
            take(configuration.s3.workers if configuration.s3.listen else 0),
            take(configuration.query.workers if configuration.query.listen else 0),
            take(len(configuration.spill)),
            take(slots),
        )


def process_of(guest: int, queue: int, processes: int) -> int:
    """The process of an agent that serves a request queue of a guest, all from 0; 0 is the first.

    Guests begin at different ones, for a guest's kernel may use its first queue alone.
    """
    return (guest + queue) % processes


def queues_at(configuration: Configuration, process: int) -> list[tuple[int, int]]:
    """The guests and their request queues, each from 0, that a process serves; each queue has a thread."""
    settings = configuration.agent
    return [
        (guest, queue)
        for guest, wish in enumerate(configuration.virtiofs)
        for queue in range(wish.queue_count(settings.worker_count))
        if process_of(guest, queue, settings.process_count) == process
    ]


def granted_workers(fabric: Fabric, wanted: int, extra: int = EXTRA_QUEUES) -> int:
    """How many workers, `wanted` at most, have a queue on every connected enclosure, beside `extra` others.

    A worker without a queue on one of N enclosures would miss each N-th of its requests, so the poorest
    enclosure decides. Raises G35Error where it grants too few for one worker.
    """
    workers = wanted
    for enclosure in fabric.enclosures:
        if enclosure.session is None:
            continue
        granted = enclosure.session.facts.io_queues
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


def spare_queues(fabric: Fabric, used: int, wanted: int) -> int:
    """How many of some `wanted` queues there are on every connected enclosure, beside `used` others."""
    granted = [each.session.facts.io_queues for each in fabric.enclosures if each.session is not None]
    spare = max(0, min([used + wanted, *granted]) - used)
    if spare < wanted:
        log.warning(
            "enclosures grant %d of %d I/O queues for puts by the other processes of this agent: the first "
            "process serves what goes beyond that; let them grant more, or lower agent.processes",
            spare,
            wanted,
        )
    return spare
