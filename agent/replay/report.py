"""What a replay says at its end: one record, as JSON or as a table."""

from dataclasses import dataclass, field
from typing import Any

from agent.replay.course import Sample
from agent.replay.latencies import Latencies
from agent.replay.tally import Cause, Tally
from agent.sizes import readable_bytes


@dataclass(frozen=True, slots=True)
class FromMemory:
    """What the agent counted meanwhile, of all its clients: gets, and what was read ahead of them."""

    gets: int
    served: int
    late: int
    prestaged_bytes: int
    useful_bytes: int

    @classmethod
    def between(cls, before: dict[str, Any], after: dict[str, Any]) -> "FromMemory | None":
        """From two looks at a volume's counters; None where the agent was another one by then."""
        names = ("hits", "prestage_hits", "prestage_late", "prestaged_bytes", "prestage_useful_bytes")
        counts = [int(after.get(name, 0)) - int(before.get(name, 0)) for name in names]
        return None if min(counts) < 0 else cls(*counts)

    @property
    def wasted_bytes(self) -> int:
        """Read ahead and not served, or not yet."""
        return max(0, self.prestaged_bytes - self.useful_bytes)


@dataclass(frozen=True, slots=True)
class Report:
    """The results. `good` is whether the replay did what it is for: everything, and no wrong byte."""

    sums: Tally
    seconds: float
    value_bytes: int
    block_bytes: int
    planned_requests: int
    finished: bool
    mount_alive: bool
    parts: int = 1
    """Values of each block."""
    agent_waits: int = 0
    agent_wait_seconds: float = 0.0
    gave_up_seconds: float | None = None
    """How long was waited for an agent that did not come back; None: it was there, or came back."""
    broken_lines: int = 0
    concurrency: int = 1
    complaints: list[str] = field(default_factory=list)
    lru_hit_ratio: float | None = None
    lru_blocks: int | None = None
    samples: list[Sample] = field(default_factory=list)
    memory: FromMemory | None = None

    @property
    def good(self) -> bool:
        return not self.troubles()

    def troubles(self) -> list[str]:
        """Why the replay counts as failed, in sentences; empty where it did not."""
        sums, found = self.sums, []
        if not sums.requests:
            found.append("the trace has no request that can be played")
        if sums.wrong_bytes:
            found.append(f"{sums.wrong_bytes} wrong bytes were served, in {sums.wrong_blocks} blocks")
        if self.gave_up_seconds is not None:
            found.append(
                f"the agent did not come back within {self.gave_up_seconds:g} s; the replay ended after "
                f"{sums.requests} requests"
            )
        elif not self.mount_alive:
            found.append("no agent answers behind the mount any more")
        if sums.requests != self.planned_requests or (not self.finished and self.gave_up_seconds is None):
            found.append(f"{sums.requests} of {self.planned_requests} requests were played")
        if sums.hits + sums.misses.total() != sums.blocks:
            found.append("the causes of misses do not add up to the misses")
        return found

    def record(self) -> dict[str, Any]:
        """For `--json`. Latencies in milliseconds (None: none measured), throughput in MiB/s."""
        sums = self.sums
        return {
            "requests": sums.requests,
            "planned_requests": self.planned_requests,
            "blocks": sums.blocks,
            "block_bytes": self.block_bytes,
            "values_of_a_block": self.parts,
            "value_bytes": self.value_bytes,
            "hits": sums.hits,
            "hit_ratio": _share(sums.hits, sums.blocks),
            "token_hit_ratio": _share(sums.tokens_saved, sums.tokens),
            "prefill_tokens": sums.tokens,
            "prefill_tokens_saved": sums.tokens_saved,
            "bytes_read": sums.bytes_read,
            "bytes_written": sums.bytes_written,
            "wrong_bytes": sums.wrong_bytes,
            "wrong_blocks": sums.wrong_blocks,
            "misses": sums.blocks - sums.hits,
            "miss_causes": {str(cause): sums.misses[cause] for cause in Cause},
            "puts": sums.puts,
            "puts_refused": sums.puts_refused,
            "get_p50_ms": _milliseconds(sums.get_latencies, 0.5),
            "get_p99_ms": _milliseconds(sums.get_latencies, 0.99),
            "put_p50_ms": _milliseconds(sums.put_latencies, 0.5),
            "put_p99_ms": _milliseconds(sums.put_latencies, 0.99),
            **self._memory(),
            "seconds": round(self.seconds, 3),
            "read_mib_per_s": self._rate(sums.bytes_read),
            "written_mib_per_s": self._rate(sums.bytes_written),
            "broken_lines": self.broken_lines,
            "mount_alive": self.mount_alive,
            "agent_waits": self.agent_waits,
            "agent_wait_seconds": self.agent_wait_seconds,
            "lru_hit_ratio": self.lru_hit_ratio,
            "lru_blocks": self.lru_blocks,
        }

    def notes(self) -> list[str]:
        """What the table does not say by itself, in sentences."""
        if self.lru_hit_ratio is None:
            return []
        rule = (
            f"The LRU is the yardstick: {self.lru_blocks:,} blocks, empty at the start, and the requests "
            "reach it one after the other."
        )
        if self.concurrency == 1 or self.sums.blocks == 0:
            return [rule]
        return [
            f"{rule} The mount was asked by {self.concurrency} at a time: a block that one request is still "
            "storing is a miss (never stored) for the next. --concurrency 1 compares like with like."
        ]

    def _memory(self) -> dict[str, Any]:
        """Shares of gets and of bytes that were read ahead; None where nobody knows, or none were."""
        memory = self.memory or FromMemory(0, 0, 0, 0, 0)
        return {
            "memory_share": _share(memory.served, memory.gets) if memory.gets else None,
            "prestage_late": memory.late,
            "prestaged_bytes": memory.prestaged_bytes,
            "prestage_wasted_bytes": memory.wasted_bytes,
            "prestage_wasted_share": _share(memory.wasted_bytes, memory.prestaged_bytes)
            if memory.prestaged_bytes
            else None,
        }

    def _rate(self, count: int) -> float:
        return round(count / (1 << 20) / max(self.seconds, 1e-9), 1)

    def rows(self) -> list[tuple[str, str]]:
        sums, record = self.sums, self.record()
        rows = [
            (
                "requests",
                f"{sums.requests:,}" + (f" of {self.planned_requests:,}" if not self.finished else ""),
            ),
            ("blocks", f"{sums.blocks:,} of {readable_bytes(self.block_bytes)}"),
            ("hit ratio, blocks", _percent(record["hit_ratio"])),
            ("hit ratio, tokens", _percent(record["token_hit_ratio"])),
            ("prefill tokens saved", f"{sums.tokens_saved:,} of {sums.tokens:,}"),
            ("read", f"{readable_bytes(sums.bytes_read)}, {record['read_mib_per_s']:,} MiB/s"),
            ("written", f"{readable_bytes(sums.bytes_written)}, {record['written_mib_per_s']:,} MiB/s"),
            ("get p50 / p99", _pair(record["get_p50_ms"], record["get_p99_ms"])),
            ("put p50 / p99", _pair(record["put_p50_ms"], record["put_p99_ms"])),
            ("time", f"{self.seconds:.1f} s"),
        ]
        if self.lru_hit_ratio is not None:
            rows.insert(3, (f"  an empty LRU of {self.lru_blocks:,} blocks", _percent(self.lru_hit_ratio)))
        if self.parts > 1:
            rows.insert(2, ("  values of each", f"{self.parts:,} of {readable_bytes(self.value_bytes)}"))
        if self.memory is not None and self.memory.prestaged_bytes:
            wasted = f"{readable_bytes(self.memory.wasted_bytes)} wasted, {self.memory.late:,} late"
            rows.append(("read ahead", f"{readable_bytes(self.memory.prestaged_bytes)}, {wasted}"))
            rows.append(("gets from memory", _percent(record["memory_share"] or 0.0)))
        rows.append(("misses", f"{record['misses']:,}"))
        rows += [(f"  {_words(cause)}", f"{sums.misses[cause]:,}") for cause in Cause if sums.misses[cause]]
        if self.agent_waits:
            rows.append(("waited for the agent", f"{self.agent_waits:,} x, {self.agent_wait_seconds:.1f} s"))
        if sums.puts_refused:
            rows.append(("puts refused", f"{sums.puts_refused:,}"))
        if self.broken_lines:
            rows.append(("broken lines skipped", f"{self.broken_lines:,}"))
        rows.append(("wrong bytes", f"{sums.wrong_bytes:,}"))
        return rows


def _words(cause: Cause) -> str:
    return cause.replace("_", " ")


def _share(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _milliseconds(latencies: Latencies, share: float) -> float | None:
    seconds = latencies.quantile(share)
    return None if seconds is None else round(1e3 * seconds, 4)


def _pair(one: float | None, other: float | None) -> str:
    return "none measured" if one is None or other is None else f"{one:.3f} / {other:.3f} ms"
