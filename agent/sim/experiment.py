"""An experiment: the same requests before each of several stores, and what is printed of it.

The rows differ in the store alone. `g35` is the agent's own code; the others are formulas (other_stores.py).
"""

import itertools
import math
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from agent.errors import UserError, did_you_mean
from agent.figures.tables import Host
from agent.replay.trace_lines import BLOCK_TOKENS, block_tokens_of
from agent.sim.pod_plan import AGENT_DIRECTORY_CACHE, ANNOUNCED, LEARNED, PodPlan, block_values, changed
from agent.sim.pod_run import PodRun, RowResult
from agent.sim.pool_store import sets_for
from agent.sim.workload import (
    INPUT_TOKENS_MAX,
    MadeRequests,
    Measured,
    TraceRequests,
    check_workload,
    demand_of,
    trace_requests,
)
from agent.sizes import counted, readable_bytes, readable_rate

ROWS: Final[dict[str, str]] = {
    "g35": "the pool, by the agent's own code",
    "g35-waits": "the pool, and loading begins only when the GPUs are free",
    "g35-prestages": "as g35-waits, and its blocks are announced to the agent when a request arrives",
    "g35-learns": "as g35-waits, and the agent guesses what follows a block that is read",
    "g35-copies": "the pool with two copies of each value",
    "g35-hedges": "two copies, and the other one is asked where the first is slow",
    "g35-kv": "the pool on KV namespaces",
    "g35+g4": "the pool with shared storage behind it",
    "recompute": "no store: what the hosts' memory has not is computed again",
    "g3": "each host's own SSDs",
    "g4": "shared storage alone, without an end",
    "lustre-dpu": "a shared file system with its servers in the DPUs, over the same enclosures",
}
CHANGES: Final[dict[str, dict[str, Any]]] = {
    "g35-waits": {"overlap": False},
    "g35-prestages": {"overlap": False, "prestage": ANNOUNCED},
    "g35-learns": {"overlap": False, "prestage": LEARNED},
    "g35-copies": {"copies": 2, "hedges": False},
    "g35-hedges": {"copies": 2},
    "g35-kv": {"on_kv": True},
}
"""What a row changes in the plan."""
AT_HOST: Final = "g35@"
"""The pool before hosts of another maker, by a name of the table: their PCIe and NICs, and the same GPUs."""
DEFAULT_ROWS: Final = ("g35", "recompute", "g3", "lustre-dpu")
NEED_G4: Final = ("g4", "g35+g4")
PRESTAGING: Final = ("g35-prestages", "g35-learns")
LOAD_LEAST: Final = 1e-6
LOAD_MAX: Final = 100
RATE_ROUNDS: Final = 6
NO_FABRIC_NOTE: Final = "Left out: there is no fabric between the NICs: no congestion, no loss, no incast."
FABRIC_NOTE: Final = "Left out: pauses between switches (PFC). Shared storage has a network of its own."
LOOKED_AT: Final = 20_000
"""Requests, from the first on, that come to the load that is asked for."""


Source: TypeAlias = Callable[[], MadeRequests | TraceRequests]
"""Makes the requests of a row, from the start with each call."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is to be played. `load`: the part of the GPUs' time that computing every prompt whole would take.
    0: requests come at the trace's own pace."""

    plan: PodPlan
    seed: int = 35
    requests: int = 1000
    workload: str = "mixed"
    trace: Path | None = None
    load: float = 0.7
    rows: tuple[str, ...] = DEFAULT_ROWS
    made_block_tokens: int | None = None
    """Of a block of a workload that is made up. Fewer, larger blocks are simulated sooner."""
    about: Mapping[str, str] = field(default_factory=dict)
    """What the plan was made of, by the names of the table: preset, model, kv, gpu."""
    hosts: Mapping[str, Host] = field(default_factory=dict)
    """For the rows g35@NAME."""
    players: int = 0
    """So many play the requests as `g35 replay` does, without GPUs. 0: engines serve them."""

    def __post_init__(self) -> None:
        for row in self.rows:
            known = [*ROWS, *(f"{AT_HOST}{name}" for name in self.hosts)]
            if row not in known:
                raise UserError(f"no row {row!r}{did_you_mean(row, known)}", f"there are {', '.join(known)}")
            self.plan_of(row)
            if row in NEED_G4 and not self.plan.g4_rate:
                raise UserError(f"the row {row} needs the rate of shared storage", "give --g4, such as 1TB/s")
        if self.players and self.rows != ("g35",):
            raise UserError("players play the pool alone", "give --rows g35, or leave --rows out")
        if self.trace is None:
            check_workload(self.workload)
        if self.trace is not None and self.made_block_tokens is not None:
            raise UserError("a trace has blocks of its own size", "leave --block-tokens out")
        if math.isnan(self.load):
            raise UserError(f"--load: {self.load} is no number", "give one, such as 0.7")
        if not 0 <= self.load <= LOAD_MAX:
            raise UserError(f"--load: {self.load:g} is not from 0 to {LOAD_MAX}", "give one, such as 0.7")
        if 0 < self.load < LOAD_LEAST:
            raise UserError(f"--load: {self.load:g} is less than {LOAD_LEAST:g}", "give one, such as 0.7")
        if self.trace is None and not self.load:
            raise UserError("a workload that is made up has no pace of its own", "give --load, such as 0.7")

    def plan_of(self, row: str) -> PodPlan:
        """The plan of a row: what it changes in that of the experiment. Raises UserError."""
        plan = self.plan
        if row != "g35+g4" and is_pool(row):
            plan = changed(plan, g4_rate=0.0)
        plan = replace(plan, **CHANGES.get(row, {}))
        if not row.startswith(AT_HOST):
            return plan
        host = self.hosts[row.removeprefix(AT_HOST)]
        each = int(host.gpus_per_host.value)
        larger = each / plan.gpus_per_host
        return changed(
            plan, gpus_per_host=each, host_nic=host.host_nic_gb_s.value * 1e9,
            gpu_pcie=host.gpu_pcie_gb_s.value * 1e9,
            g2_bytes=round(plan.g2_bytes * larger), g3_bytes=round(plan.g3_bytes * larger),
            g3_rate=plan.g3_rate * larger,
        )  # fmt: skip

    @property
    def block_tokens(self) -> int:
        """Of a block: as the trace's first request says."""
        if self.trace is None or not self.trace.is_file():
            return self.made_block_tokens or BLOCK_TOKENS
        return block_tokens_of(self.trace)

    def check_room(self, block_tokens: int) -> None:
        """Raises UserError where the drives have no room for a row of the pool, before a row is played."""
        for row in self.rows:
            if is_pool(row):
                plan = self.plan_of(row)
                sets_for(plan, *block_values(plan, block_tokens))

    def source(self) -> Source:
        """The requests, from the start with each call."""
        if self.trace is not None and self.trace.exists() and not self.trace.is_file():
            raise UserError(
                f"{self.trace} is no regular file", "a trace is read once for each row: give it as a file"
            )
        look_at = min(self.requests or LOOKED_AT, LOOKED_AT)
        if self.trace is None:
            rate, pace = self._made_rate(look_at)
            return lambda: self._made(rate, pace)
        trace, pace = self.trace, 1.0
        if self.load:
            demand = demand_of(trace_requests(trace, look_at, 1.0), look_at, self.plan)
            load = demand.load(self.plan)
            pace = self.load / load if load else 1.0
        return lambda: trace_requests(trace, self.requests, pace)

    def _made(self, rate: float, pace: float) -> MadeRequests:
        return MadeRequests(self.workload, self.seed, rate, self.block_tokens, pace)

    def _made_rate(self, look_at: int) -> tuple[float, float]:
        """How many requests a second come to `load`, and how much faster they are to come then.

        The rate does most of it, which leaves pauses between turns as they are. The rest is some per cent
        (more, of a few requests): the same dice fall otherwise at another rate.
        """
        rate, tried = self.plan.gpus / 2.0, []
        for _ in range(RATE_ROUNDS):
            # How long prompts are depends on how long sessions have been under way.
            load = demand_of(self._made(rate, 1.0), look_at, self.plan).load(self.plan)
            if load is None:
                return rate, 1.0
            tried.append((rate, self.load / load))
            rate *= self.load / load
        return min(tried, key=lambda each: abs(math.log(each[1])))


@dataclass(frozen=True, slots=True)
class PlayedRow:
    """One row, and what it cost and found."""

    result: RowResult
    load: float | None
    broken_lines: int
    complaints: Sequence[str]
    cpu_seconds: float
    memory_bytes: int


@dataclass(slots=True)
class Report:
    """The outcome of an experiment."""

    experiment: Experiment
    rows: list[RowResult] = field(default_factory=list)
    complaints: Sequence[str] = ()
    """The first broken lines of the trace."""
    broken_lines: int = 0
    load: float | None = None
    """The load that the requests came to, all of them; None where they came at once."""
    row_cpu_seconds: list[float] = field(default_factory=list)
    """Of each row by itself: the longest one is what a run takes where every row has a processor."""
    memory_bytes: int = 0

    @property
    def cpu_seconds(self) -> float:
        return sum(self.row_cpu_seconds)

    def add(self, row: PlayedRow) -> None:
        self.rows.append(row.result)
        self.row_cpu_seconds.append(row.cpu_seconds)
        self.load, self.broken_lines, self.complaints = row.load, row.broken_lines, row.complaints
        self.memory_bytes = max(self.memory_bytes, row.memory_bytes)

    @property
    def first(self) -> RowResult:
        return self.rows[0]

    def speed_up(self, row: RowResult) -> float | None:
        """Prompt tokens a GPU second, against computing again what the hosts' memory has not."""
        base = next((each for each in self.rows if each.name == "recompute"), None)
        if base is None or not base.tokens_per_gpu_second:
            return None
        return row.tokens_per_gpu_second / base.tokens_per_gpu_second

    def notes(self) -> list[str]:
        """What stands for something else, and what was left out."""
        values, value_bytes = block_values(self.experiment.plan, self.experiment.block_tokens)
        notes = [
            "Replaced: values have lengths and no contents; a stand-in seals them, with headers and proofs.",
            FABRIC_NOTE if self.experiment.plan.fabric != "none" else NO_FABRIC_NOTE,
        ]
        if self.experiment.players:
            notes.append("Left out: processors. Doors, ciphers and interpreters take no time.")
        else:
            notes += self._notes_of_engines()
        if self.broken_lines:
            lines = counted(self.broken_lines, "broken line")
            notes.insert(0, f"Left out: {lines} of the trace; the first: {self.complaints[0]}.")
        cache = self.experiment.plan.directory_cache
        if cache < AGENT_DIRECTORY_CACHE:
            notes.append(
                f"Reduced: an agent remembers {readable_bytes(cache)} of directories, instead of "
                f"{readable_bytes(AGENT_DIRECTORY_CACHE)}."
            )
        if values > 1:
            notes.insert(
                0,
                f"Sampled: a block is {values} values of {readable_bytes(value_bytes)}. The agent's code "
                f"runs for the first of them; the others cross other drives' links beside it.",
            )
        return [*self._notes_of_nothing_loaded(), *notes]

    def _notes_of_engines(self) -> list[str]:
        notes = []
        if any(self.experiment.plan_of(row.name).overlap for row in self.rows):
            notes.append(
                "Replaced: gets into the host's memory begin when a request arrives, instead of prestaging; "
                "the row g35-prestages has the agent's own."
            )
        if self.experiment.plan.prefill_cost is None:
            notes.append("Left out: a GPU computes at a constant rate, whatever the length of the context.")
        crossed = [
            f"{row.name} {row.fabric_per_byte:.2f}" for row in self.rows if row.fabric_per_byte is not None
        ]
        if crossed:
            notes.append(f"Times that a byte, loaded or stored, crossed the fabric: {', '.join(crossed)}.")
        return notes

    def _notes_of_nothing_loaded(self) -> list[str]:
        """Why all stores look alike, where the first one was never of use."""
        row, nothing = self.first, f"No block was loaded from a store in the row {self.first.name}"
        if self.experiment.players or row.blocks_loaded or row.name == "recompute":
            return []
        if not row.blocks_in_gpu + row.blocks_in_host:
            return [f"{nothing}: none was found anywhere."]
        return [
            f"{nothing}: the memory of GPUs and hosts had all that was found. Use --g1 0 --g2 0, or more "
            "requests."
        ]

    def record(self) -> dict[str, Any]:
        """The report as JSON has it."""
        experiment, first = self.experiment, self.first
        plan = asdict(experiment.plan)
        played: dict[str, Any] = {}
        if experiment.players:
            played = {
                "players": experiment.players, "seconds": round(first.virtual_seconds, 3),
                "blocks": first.blocks, "bytes_read": first.bytes_loaded, "bytes_written": first.bytes_stored,
                "read_mib_per_s": _mib_s(first.bytes_loaded, first),
                "written_mib_per_s": _mib_s(first.bytes_stored, first),
            }  # fmt: skip
        return {
            "digest": first.digest,
            "hit_ratio": first.hit_ratio,
            "seed": experiment.seed,
            "requests": first.requests,
            "workload": experiment.workload if experiment.trace is None else str(experiment.trace),
            "block_tokens": experiment.block_tokens,
            "load": experiment.load,
            "load_reached": self.load,
            **experiment.about,
            **played,
            "broken_lines": self.broken_lines,
            "pod": plan,
            "bytes": first.link_bytes,
            "misses": first.misses,
            "counts": first.counts,
            "rows": [
                {
                    "name": row.name, "what": what_is(row.name), "digest": row.digest,
                    "hit_ratio": row.hit_ratio, "blocks": row.blocks, "blocks_in_gpu": row.blocks_in_gpu,
                    "blocks_in_host": row.blocks_in_host, "blocks_loaded": row.blocks_loaded,
                    "loaded_ratio": row.loaded_ratio, "cached_tokens": row.cached_tokens,
                    "input_tokens": row.input_tokens, "speed_up": self.speed_up(row),
                    "tokens_per_gpu_second": row.tokens_per_gpu_second,
                    "ttft_seconds": {
                        "mean": row.ttft_mean, "p50": row.ttft_p50, "p95": row.ttft_p95, "p99": row.ttft_p99,
                    },
                    "gpu_busy_seconds": row.busy_seconds, "gpu_stalled_seconds": row.stalled_seconds,
                    "virtual_seconds": row.virtual_seconds, "bytes": row.link_bytes, "misses": row.misses,
                    "drive_writes_a_day": row.drive_writes_a_day,
                    "most_written_drive": row.most_written_drive,
                    "counts": row.counts, "fabric_per_byte": row.fabric_per_byte,
                    "cpu_seconds": cpu_seconds,
                }
                for row, cpu_seconds in zip(self.rows, self.row_cpu_seconds, strict=True)
            ],
            "notes": self.notes(),
            "cpu_seconds": self.cpu_seconds,
            "memory_bytes": self.memory_bytes,
        }  # fmt: skip

    def _model_facts(self) -> list[tuple[str, str]]:
        plan, about = self.experiment.plan, self.experiment.about
        g4 = f"{readable_rate(plan.g4_rate)} for the pod" if plan.g4_rate else "none"
        named = [("model", "{model}, KV in {kv}, on {gpu}".format(**about))] if about else []
        named += [("preset", about["preset"])] if about else []
        return [
            *named,
            ("token", f"{plan.bytes_per_token:,} bytes of KV cache"),
            ("a GPU, tokens/s", f"computes {self._prefill_words()}"),
            ("a GPU, answers", f"generates {plan.decode_rate:,.0f} tokens/s"),
            ("G1, G2", f"{readable_bytes(plan.g1_bytes)} a GPU, {readable_bytes(plan.g2_bytes)} a host"),
            ("G3", f"{plan.g3_bytes / 1e12:.4g} TB a host, {readable_rate(plan.g3_rate)}"),
            ("G4", g4),
        ]

    def _prefill_words(self) -> str:
        """The rate of prompts as it was measured, and of the longest that a made workload has."""
        plan, long = self.experiment.plan, INPUT_TOKENS_MAX
        if plan.prefill_cost is None:
            return f"{plan.prefill_rate:,.0f}"
        slower = long / plan.prefill_seconds(long)
        return f"{plan.prefill_rate:,.0f} in prompts of {plan.prefill_tokens:,}, {slower:,.0f} of {long:,}"

    def _fabric_facts(self) -> list[tuple[str, str]]:
        plan = self.experiment.plan
        if plan.fabric == "none":
            return []
        words = [plan.fabric, counted(plan.spines, "spine"), f"{plan.oversubscription:g}:1"]
        words += ["ECN and DCQCN"] if plan.ecn else []
        words += [f"one link loses {plan.loss:.3g} of its packets"] if plan.loss else []
        words += [f"a neighbour takes {plan.noise:.0%}"] if plan.noise else []
        return [("fabric", ", ".join(words))]

    def _pace(self) -> tuple[str, str]:
        players, row = self.experiment.players, self.first
        if players:
            read, written = _mib_s(row.bytes_loaded, row), _mib_s(row.bytes_stored, row)
            return "throughput", f"{counted(players, 'player')}: {read} MiB/s read, {written} written"
        if self.load is None:
            return "load", "all at once"
        return "load", f"{self.load:.3g} of the GPUs' time, all computed"

    def facts(self) -> list[tuple[str, str]]:
        """The first row in words, for a table."""
        plan, row = self.experiment.plan, self.first
        flash = plan.enclosures * plan.drives * plan.drive_bytes
        facts = [
            *self._model_facts(),
            (
                "pod",
                f"{plan.gpus:,} GPUs in {counted(plan.hosts, 'host')}, "
                f"{counted(plan.enclosures, 'enclosure')} of {counted(plan.drives, 'drive')}",
            ),
            ("flash", f"{flash / 1e15:.4g} PB, {flash / plan.gpus / 1e12:.4g} TB a GPU"),
            *self._fabric_facts(),
            ("rates", f"enclosure {readable_rate(plan.enclosure_nic)}, host {readable_rate(plan.host_nic)}, "
                      f"drive {readable_rate(plan.drive_read)}"),
            ("requests", f"{row.requests:,} in {row.virtual_seconds:.4g} s of virtual time"),
            self._pace(),
            ("digest", row.digest),
            ("hit_ratio", f"{row.hit_ratio:.4f} of {row.blocks:,} block references"),
            ("blocks in GPUs", f"{row.blocks_in_gpu:,}"),
            ("blocks in hosts", f"{row.blocks_in_host:,}"),
            ("blocks loaded", f"{row.blocks_loaded:,}"),
        ]  # fmt: skip
        facts += [(f"misses, {name}", f"{count:,}") for name, count in row.misses.items() if count]
        facts += [
            (f"bytes, {name}", readable_bytes(count)) for name, count in row.link_bytes.items() if count
        ]
        facts += [
            (
                "drive writes a day",
                f"{row.drive_writes_a_day:.3g} of {plan.drive_writes_a_day:g} that drives last",
            ),
            ("  most, of one drive", f"{row.most_written_drive:.3g}"),
        ]
        facts += [(name, f"{count:,}") for name, count in row.counts.items() if count]
        facts += [
            (
                "all rows took",
                f"{self.cpu_seconds:.3g} s of processor, the longest of them "
                f"{max(self.row_cpu_seconds):.3g} s",
            ),
            ("memory", readable_bytes(self.memory_bytes)),
        ]
        return facts


def is_pool(row: str) -> bool:
    """Whether the agent's own code plays a row."""
    return row.startswith("g35")


def what_is(row: str) -> str:
    """A row in words."""
    if row.startswith(AT_HOST):
        return f"the pool, and hosts of the kind {row.removeprefix(AT_HOST)}"
    return ROWS[row]


def _mib_s(count: int, row: RowResult) -> float:
    return round(count / (1 << 20) / max(row.virtual_seconds, 1e-9), 1)


def _see_that_it_asked(requests: TraceRequests) -> None:
    """Raises UserError for a trace without a prompt."""
    if requests.tokens:
        return
    file, why = requests.file, ""
    if file.complaints:
        why = f"; the first of {counted(file.broken_lines, 'broken line')}: {file.complaints[0]}"
    raise UserError(
        f"no request was played: {file.path} has none with blocks and tokens{why}",
        "see that the trace has lines in Mooncake's format",
    )


def play_row(experiment: Experiment, source: Source, name: str, say: Callable[[int], None]) -> PlayedRow:
    """Play one row. `say` hears how many of its requests were served, now and then. Raises UserError."""
    began, plan = time.process_time(), experiment.plan_of(name)
    requests = source()
    played = Measured(itertools.islice(requests, experiment.requests or None), plan)
    kind = "g35" if is_pool(name) else name
    result = PodRun(
        kind, plan, experiment.seed, experiment.block_tokens, iter(played), say, experiment.players
    ).run()
    broken = 0
    complaints: Sequence[str] = ()
    if isinstance(requests, TraceRequests):
        broken, complaints = requests.file.broken_lines, tuple(requests.file.complaints)
        _see_that_it_asked(requests)
    result.name = name
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    load = played.demand().load(plan)
    return PlayedRow(result, load, broken, complaints, time.process_time() - began, memory)


def play(experiment: Experiment, say: Callable[[str, int], None] | None = None) -> Report:
    """Play every row. `say` hears the row and how many of its requests were served, now and then."""
    report, source = Report(experiment), experiment.source()
    for name in experiment.rows:

        def heard(served: int, name: str = name) -> None:
            if say is not None:
                say(name, served)

        report.add(play_row(experiment, source, name, heard))
    return report
