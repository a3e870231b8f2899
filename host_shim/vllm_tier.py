"""vLLM's KV offloading on a mounted pool: a secondary tier, loaded by `module_path` (docs/engines/vllm.md).

    "secondary_tiers": [{"type": "G35Tier", "module_path": "host_shim.vllm_tier", "mount": "/mnt/g35"}]

Written against vLLM 0.33.0 (vllm/v1/kv_offload/tiering/base.py). vLLM calls every method from its scheduler:
none but `drain_jobs` waits for the pool, and none raises for its sake. A late answer is MISS, a late job
fails. Verdicts are in tier_lookups.py, transfers in tier_jobs.py. No other module of host_shim imports vLLM.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from host_shim.block_watch import GONE
from host_shim.connector_options import TierOptions
from host_shim.control_wire import NameForm, Outcome
from host_shim.kv_events import KvEvents
from host_shim.named_values import NamedValues, name_of
from host_shim.pool import Pool
from host_shim.prefix_records import PrefixRecords
from host_shim.tier_jobs import Job, TierJobs
from host_shim.tier_lookups import TierLookups

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

_log = logging.getLogger(__name__)

GROUP_BYTES = 4
"""An offload key ends in the number of its group."""


def layout_name(spec: OffloadingSpec, chunk_bytes: int, namespace: str) -> bytes:
    """What blocks have to agree in to be each other's: vLLM's own list of it, and the size of a chunk.

    The list is the one by which vLLM's fs tier separates its folders: model, type, groups, parallelism.
    """
    mapper = FileMapper.from_offloading_spec(
        root_dir="g35",
        offloading_spec=spec,
        blocks_per_file=spec.blocks_per_chunk,
        parallel_agnostic=True,
    )
    fields = json.dumps(mapper.get_run_config(), sort_keys=True, default=str)
    return name_of("vllm", namespace, fields, mapper.rank, chunk_bytes)


def _wants_events(options: TierOptions, spec: OffloadingSpec, tier_type: str) -> bool:
    if not options.enable_kv_events:
        return False
    config = getattr(spec, "kv_events_config", None)
    if config is None or not getattr(config, "enable_kv_cache_events", False):
        _log.warning(
            "tier %s is to tell of its blocks, and vLLM publishes no events: set --kv-events-config",
            tier_type,
        )
        return False
    return True


class G35Tier(SecondaryTierManager):
    """One volume of a pool as a secondary tier. The keys of its configuration are those of `TierOptions`."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **options: Any,
    ) -> None:
        """`options`: the keys of its configuration, those of `TierOptions`."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._options = taken = TierOptions.from_dict(options)
        self.locality = Locality(taken.locality)
        has_field = "locality" in getattr(OffloadingEvent, "__dataclass_fields__", {})
        self._locality_field = {"locality": self.locality} if has_field else {}
        self._chunk_bytes = int(self.block_size_bytes)
        self._layout = layout_name(offloading_spec, self._chunk_bytes, taken.namespace)
        self._pool = Pool(taken.mount, sessions=taken.threads + 1, parallel=1)
        self._values = NamedValues(self._pool, taken.volume, taken.ttl)
        self._checked = False
        self._form = NameForm(name_of(self._layout))
        self._events = KvEvents() if _wants_events(taken, offloading_spec, tier_type) else None
        self.records = PrefixRecords(self._values.speeds, self._values.report)
        self._request_of: dict[int, str] = {}
        self._under_way: Counter[str] = Counter()
        """Jobs of each request."""
        self._over: set[str] = set()
        """Requests that are over, and still have jobs."""
        self._lookups = TierLookups("g35-lookup", self._ask, taken.lookup_deadline)
        self._jobs = TierJobs(
            self._values,
            primary_kv_view.cast("B"),
            self._chunk_bytes,
            self._name,
            threads=taken.threads,
            load_deadline=taken.load_deadline,
            store_deadline=taken.store_deadline,
            new_room=self._values.room,
            find_gone=None if self._events is None else self._find_gone,
        )
        _log.info("names of blocks of group 0, for queries: %s", json.dumps(self.name_form().describe()))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Blocks are wanted as they come; nothing special for any request."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT or MISS once the pool has said so, RETRY until then, and no longer than the deadline."""
        found = self._lookups.verdict(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Have chunks stored; those that are there already are not written again."""
        self._note_job(job_metadata)
        self._jobs.store(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids.tolist())

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._note_job(job_metadata)
        self._jobs.load(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids.tolist())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended since the last call; a load that failed in part says what it brought."""
        results = []
        for job in self._jobs.finished():
            self._note_finished(job)
            if job.is_load and not job.success:
                there = set(job.done)
                self._lookups.mark_missing([key for key in job.keys if key not in there])
            results.append(
                JobResult(
                    job_id=job.job_id,
                    success=job.success,
                    successful_keys=job.done if job.is_load and job.done and not job.success else None,
                    transfer_time=job.seconds,
                    transfer_bytes=len(job.done) * self._chunk_bytes,
                )
            )
        return results

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what this request asked for. Its record ends with its last job."""
        request = req_context.req_id
        answers = self._lookups.answers(request)
        if answers:
            self.records.note_answers(request, answers)
        self._lookups.forget_request(request)
        if self._under_way[request]:
            self._over.add(request)
        else:
            del self._under_way[request]
            self.records.finish(request)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What was stored and found gone since the last call, where the options ask for events."""
        while self._events is not None and len(self._events):
            for told in self._events.take()[0]:
                yield OffloadingEvent(
                    keys=told.keys, medium=self.medium, removed=told.removed, **self._locality_field
                )

    @property
    def events_lost(self) -> int:
        """Events that vLLM did not take in time."""
        return 0 if self._events is None else self._events.lost

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """The step's new questions, as one batch."""
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Wait until every job is over, no longer than the deadlines."""
        self._jobs.drain()

    def shutdown(self) -> None:
        """End the threads; vLLM's memory is not touched any more when this returns."""
        self._lookups.close()
        self._jobs.close()
        self.records.close()
        self._pool.close(0)

    def _name(self, key: bytes) -> bytes:
        return self._form.name(bytes(key))

    def name_form(self, group: int = 0) -> NameForm:
        """How a router makes names of this engine's block hashes (docs/query.md)."""
        return NameForm(self._form.before, tail=group.to_bytes(GROUP_BYTES, "big"))

    def _note_job(self, job_metadata: TransferJob) -> None:
        context = getattr(job_metadata, "req_context", None)
        if context is not None:
            self._request_of[job_metadata.job_id] = context.req_id
            self._under_way[context.req_id] += 1

    def _note_finished(self, job: Job) -> None:
        """Tell of a job's blocks, and count them for its request."""
        if self._events is not None:
            if job.is_load:
                self._events.gone(job.gone)
            else:
                self._events.stored(job.done)
        request = self._request_of.pop(job.job_id, None)
        if request is None:
            return
        count = len(job.done)
        if job.is_load:
            self.records.note_moved(
                request, loaded=count, size=count * self._chunk_bytes, seconds=job.seconds
            )
        else:
            self.records.note_moved(request, stored=count)
        self._under_way[request] -= 1
        if not self._under_way[request]:
            del self._under_way[request]
            if request in self._over:
                self._over.remove(request)
                self.records.finish(request)

    def _find_gone(self, keys: Sequence[bytes]) -> list[bytes]:
        outcomes = self._values.lookup([self._name(key) for key in keys])
        return [key for key, one in zip(keys, outcomes, strict=True) if one in GONE]

    def _ask(self, keys: Sequence[bytes]) -> list[Outcome | None]:
        if not self._checked:
            why = self._values.why_unusable(self._chunk_bytes)
            self._checked = self._values.agent_seen or why is not None
            if why is not None:
                _log.warning("the g35 tier will store nothing: %s", why)
        found = self._values.lookup([self._name(key) for key in keys], prestage=self._options.prestage)
        if self._events is not None:
            self._events.gone([key for key, one in zip(keys, found, strict=True) if one in GONE])
        return found

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """Labels of vLLM's info metric."""
        return ("g35_volume",)

    def config_info(self) -> dict[str, str]:
        return {"g35_volume": self._options.volume}
