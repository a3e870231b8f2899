"""vLLM's KV offloading on a mounted pool: a secondary tier, loaded by `module_path` (docs/engines/vllm.md).

    "secondary_tiers": [{"type": "G35Tier", "module_path": "host_shim.vllm_tier", "mount": "/mnt/g35"}]

Written against vLLM 0.33.0 (vllm/v1/kv_offload/tiering/base.py). vLLM calls every method from its scheduler:
none but `drain_jobs` waits for the pool, and none raises for its sake. A late answer is MISS, a late job
fails. Verdicts are in tier_lookups.py, transfers in tier_jobs.py. No other module of host_shim imports vLLM.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from host_shim.connector_options import TierOptions
from host_shim.named_values import NamedValues, name_of
from host_shim.pool import Pool
from host_shim.tier_jobs import TierJobs
from host_shim.tier_lookups import TierLookups

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

_log = logging.getLogger(__name__)


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
        self._chunk_bytes = int(self.block_size_bytes)
        self._layout = layout_name(offloading_spec, self._chunk_bytes, taken.namespace)
        self._pool = Pool(taken.mount, sessions=taken.threads + 1, parallel=1)
        self._values = NamedValues(self._pool, taken.volume, taken.ttl)
        self._checked = False
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
        )

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
        self._jobs.store(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids.tolist())

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Have chunks filled."""
        self._jobs.load(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids.tolist())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended since the last call; a load that failed in part says what it brought."""
        results = []
        for job in self._jobs.finished():
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
        """Forget what this request asked for."""
        self._lookups.forget_request(req_context.req_id)

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
        self._pool.close(0)

    def _name(self, key: bytes) -> bytes:
        return name_of(self._layout, bytes(key))

    def _ask(self, keys: Sequence[bytes]) -> list[bool]:
        if not self._checked:
            why = self._values.why_unusable(self._chunk_bytes)
            self._checked = self._values.agent_seen or why is not None
            if why is not None:
                _log.warning("the g35 tier will store nothing: %s", why)
        return self._values.exists([self._name(key) for key in keys], prestage=self._options.prestage)

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """Labels of vLLM's info metric."""
        return ("g35_volume",)

    def config_info(self) -> dict[str, str]:
        """Their values."""
        return {"g35_volume": self._options.volume}
