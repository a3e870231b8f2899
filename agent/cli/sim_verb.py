"""`g35 sim`: a pod in virtual time, with the agent's own code on simulated flash and links."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agent.cli.record_options import options_of, path_of, text_for
from agent.errors import UserError
from agent.sizes import parse_drive_size, parse_rate, parse_size

if TYPE_CHECKING:
    from agent.figures.tables import Tables
    from agent.sim.experiment import Experiment, Report


def _option(parse: Callable[[str], object], metavar: str) -> Callable[[str], Any]:
    """What makes an option of its help: its text is what `parse` takes."""
    return lambda help_text: typer.Option(callback=text_for(parse), metavar=metavar, help=help_text)


_rate_option = _option(parse_rate, "<rate>")
_size_option = _option(parse_size, "<size>")
_drive_size_option = _option(parse_drive_size, "<size>")


@dataclass(frozen=True, slots=True)
class SimOptions:
    """A pod as the user describes it: a preset, and what differs from it."""

    pod: Annotated[str, typer.Option(help="The pod to begin with: one, rack or superpod.")] = "rack"
    model: Annotated[
        str,
        typer.Option(help="The model, by its name in agent/figures/figures.toml; a wrong name lists all."),
    ] = "deepseek-v3"
    kv: Annotated[Literal["bf16", "fp8"], typer.Option(help="Precision of the KV cache, bf16 or fp8.")] = (
        "fp8"
    )
    gpu: Annotated[str, typer.Option(help="The GPU: h100, h200, gb200, vr200.")] = "gb200"
    data: Annotated[
        Path | None,
        typer.Option(
            parser=path_of,
            metavar="<path>",
            help="A TOML file with more models, GPUs, enclosures and pods.",
        ),
    ] = None
    gpus: Annotated[
        int | None, typer.Option(help="GPUs in all; default: the pod's, as for the options that follow.")
    ] = None
    gpus_per_host: Annotated[int | None, typer.Option(help="GPUs of a host, which share its DPU.")] = None
    enclosures: Annotated[int | None, typer.Option(help="Flash enclosures.")] = None
    drives: Annotated[int | None, typer.Option(help="Drives of each enclosure.")] = None
    drive_size: Annotated[
        str, _drive_size_option("Size of a drive, decimal as drives are sold, such as 15.36T.")
    ] = ""
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=(1 << 64) - 1,
            help="Another seed makes other requests; the same one gives the same digest.",
        ),
    ] = 35
    requests: Annotated[
        int,
        typer.Option(
            min=1, max=10_000_000, help="Play so many requests, or the whole trace if it is shorter."
        ),
    ] = 1000
    workload: Annotated[
        str | None, typer.Option(help="Without a trace: chat, agents, documents or mixed; default: mixed.")
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            parser=path_of,
            metavar="<path>",
            help="Take requests from a file: JSON lines in Mooncake's format.",
        ),
    ] = None
    block_tokens: Annotated[
        int | None,
        typer.Option(min=16, max=16384, help="Without a trace: tokens of a block; default: 512."),
    ] = None
    load: Annotated[
        float | None,
        typer.Option(
            help="Requests come so fast that GPUs without any cache would be busy for this share of the "
            "time. Default: 0.7; with --trace 0, the trace's own pace.",
        ),
    ] = None  # fmt: skip
    players: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            help="Play the requests as g35 replay --concurrency N --no-prestage does, without GPUs: to "
            "compare with a real pool. The only row is g35.",
        ),
    ] = None
    rows: Annotated[
        str,
        typer.Option(
            help="What to compare, with commas (docs/pod.md): g35, g35-waits, g35-prestages, g35-learns, "
            "g35-copies, g35-hedges, g35-kv, g35+g4, g35@amd, g35@intel, recompute, g3, g4, lustre-dpu. "
            "Default: g35, recompute, g3, lustre-dpu; with --g4 also g4, g35+g4."
        ),
    ] = ""
    faults: Annotated[
        str,
        typer.Option(
            help="What goes wrong, with commas (docs/pod.md): stop, slow, err, kill, lose, agent, join, "
            "leave; or all."
        ),
    ] = ""
    fault_every: Annotated[
        float | None,
        typer.Option(help="Seconds of virtual time between two faults, 0.01 or more; default: 5."),
    ] = None
    tenants: Annotated[
        int | None, typer.Option(help="Tenants that share the pool, a volume for each; default: 1.")
    ] = None
    workers: Annotated[int | None, typer.Option(help="Workers of each host's agent; default: 8.")] = None
    bytes_per_token: Annotated[
        int | None, typer.Option(help="KV-cache bytes of a token; default: the model's.")
    ] = None
    prestage_memory: Annotated[
        str, _size_option("Memory of an agent for what is prestaged, in the rows that prestage; default: 4G.")
    ] = ""
    prefill_rate: Annotated[
        float | None,
        typer.Option(help="Tokens a second that a GPU computes of prompts; default: as published."),
    ] = None
    prefill_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1 << 24,
            help="Tokens of the prompts that --prefill-rate was measured with; longer ones are computed "
            "slower. Default: as published, or 2000.",
        ),
    ] = None
    decode_rate: Annotated[
        float | None, typer.Option(help="Tokens a second that a GPU generates; default: as published.")
    ] = None
    g1: Annotated[str, _size_option("Room for cache in a GPU's memory; default: 40G.")] = ""
    g2: Annotated[
        str,
        _size_option("Room for cache in a host's memory; default: all memory of the host."),
    ] = ""
    g3: Annotated[
        str, _drive_size_option("Room on a host's own SSDs, in the row g3, decimal; default: 16T.")
    ] = ""
    g3_rate: Annotated[str, _rate_option("Rate of a host's own SSDs, in the row g3; default: 28GB/s.")] = ""
    g4: Annotated[
        str,
        _rate_option(
            "Rate of shared storage for the whole pod, such as 1TB/s; the rows g4 and g35+g4 need it."
        ),
    ] = ""
    drive_read: Annotated[str, _rate_option("Rate of a drive's reads.")] = ""
    drive_write: Annotated[str, _rate_option("Rate of a drive's writes.")] = ""
    enclosure_nic: Annotated[str, _rate_option("Rate of an enclosure's NICs together, each way.")] = ""
    host_nic: Annotated[str, _rate_option("Rate of a host's DPU, each way, such as 800Gb/s.")] = ""
    gpu_pcie: Annotated[str, _rate_option("Rate of a GPU's PCIe, each way; default: 64GB/s.")] = ""
    fabric: Annotated[
        str,
        typer.Option(help="Between the NICs: none, ecmp (flows are hashed) or spray (packets are spread)."),
    ] = "none"
    spines: Annotated[int | None, typer.Option(help="Spines of the fabric; default: 18. Needs a fabric.")] = (
        None
    )
    oversubscription: Annotated[
        float | None,
        typer.Option(
            help="How much more a leaf's ports carry than its links to spines; default: 1. Needs a fabric."
        ),
    ] = None
    ecn: Annotated[
        bool, typer.Option(help="Switches mark packets, and DCQCN controls rates. Needs a fabric.")
    ] = False
    loss: Annotated[
        float, typer.Option(help="Part of the packets that one link loses, such as 0.001. Needs a fabric.")
    ] = 0.0
    noise: Annotated[
        float, typer.Option(help="Part of the fabric that a neighbour takes, such as 0.3. Needs a fabric.")
    ] = 0.0
    drive_latency_ms: Annotated[
        float | None,
        typer.Option(min=0, max=1000, help="Time of each command beside its bytes; default: 0.08."),
    ] = None
    drive_tail_ms: Annotated[
        float | None,
        typer.Option(
            min=0, max=1000, help="One command in a hundred takes up to so much longer; default: 1."
        ),
    ] = None
    read_deadline_ms: Annotated[
        float | None,
        typer.Option(
            min=0.1, max=60_000, help="A read of the pool that takes longer is a miss; default: 50."
        ),
    ] = None
    directory_fresh_ms: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=3_600_000,
            help="How long an agent believes a remembered directory that a key is absent. Default: 0, for "
            "several agents; g35 up gives its only agent 1000.",
        ),
    ] = None
    gate: Annotated[
        bool,
        typer.Option(
            help="Turn the agent's recompute gate on: a block that would come too late is computed again."
        ),
    ] = False
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False

    def experiment(self) -> Experiment:
        """What is to be played. Raises UserError."""
        from agent.figures import tables

        figures = tables.load(self.data)
        with _as_wrong_usage():
            found = self._experiment(figures)
        tokens = found.block_tokens  # of a trace that cannot be read this is no matter of the arguments
        with _as_wrong_usage():
            found.check_room(tokens)
        return found

    def _experiment(self, figures: Tables) -> Experiment:
        from agent.sim.experiment import DEFAULT_ROWS, NEED_G4, Experiment
        from agent.sim.pod_plan import ALL_FAULTS, FAULTS, plan_of
        from agent.sim.workload import MIXED

        rates = {
            "g3_rate": self.g3_rate, "g4_rate": self.g4, "drive_read": self.drive_read,
            "drive_write": self.drive_write, "enclosure_nic": self.enclosure_nic, "host_nic": self.host_nic,
            "gpu_pcie": self.gpu_pcie,
        }  # fmt: skip
        sizes = {"g1_bytes": self.g1, "g2_bytes": self.g2, "prestage_bytes": self.prestage_memory}
        times = {
            "drive_latency": self.drive_latency_ms, "drive_tail": self.drive_tail_ms,
            "directory_fresh": self.directory_fresh_ms, "read_deadline": self.read_deadline_ms,
        }  # fmt: skip
        drives = {"drive_bytes": self.drive_size, "g3_bytes": self.g3}
        faults = _words(self.faults)
        plan = plan_of(
            figures, self.pod, self.model, self.kv, self.gpu, computes=self.players is None,
            gpus=self.gpus, gpus_per_host=self.gpus_per_host, enclosures=self.enclosures,
            drives=self.drives, tenants=self.tenants, workers=self.workers,
            bytes_per_token=self.bytes_per_token,
            prefill_rate=self.prefill_rate, prefill_tokens=self.prefill_tokens,
            decode_rate=self.decode_rate, fault_every=self.fault_every,
            fabric=self.fabric, spines=self.spines, oversubscription=self.oversubscription, ecn=self.ecn,
            loss=self.loss, noise=self.noise,
            gate=self.gate, faults=FAULTS if ALL_FAULTS in faults else faults,
            **{name: parse_rate(text) if text else None for name, text in rates.items()},
            **{name: None if each is None else each / 1000 for name, each in times.items()},
            **{name: parse_size(text) if text else None for name, text in sizes.items()},
            **{name: parse_drive_size(text) if text else None for name, text in drives.items()},
        )  # fmt: skip
        rows = _words(self.rows) or (*DEFAULT_ROWS, *(NEED_G4 if plan.g4_rate else ()))
        if self.players is not None:
            rows = _words(self.rows) or ("g35",)
            if self.load is not None:
                raise UserError("players take requests as fast as they can", "leave --players or --load out")
        load = self.load if self.load is not None else (0.7 if self.trace is None else 0.0)
        if self.fabric == "none" and (self.spines is not None or self.oversubscription is not None):
            raise UserError(
                "--spines and --oversubscription are matters of a fabric",
                "give --fabric ecmp or --fabric spray",
            )
        self._refuse_without_cause(rows, bool(faults))
        if self.trace is not None and self.workload is not None:
            raise UserError("a trace is its own workload", "leave --workload or --trace out")
        about = {"preset": self.pod, "model": self.model, "kv": self.kv, "gpu": self.gpu}
        return Experiment(
            plan, self.seed, self.requests, self.workload or MIXED, self.trace, load, rows,
            self.block_tokens, about, figures.hosts, self.players or 0,
        )  # fmt: skip

    def _refuse_without_cause(self, rows: tuple[str, ...], has_faults: bool) -> None:
        """Raises UserError for an option that would change nothing: it names what the option needs."""
        from agent.sim.experiment import NEED_G4, PRESTAGING

        if self.fault_every is not None and not has_faults:
            raise UserError("--fault-every is a matter of faults", "give --faults, such as all")
        for option, given, needed in (
            ("--g4", self.g4, NEED_G4),
            ("--prestage-memory", self.prestage_memory, PRESTAGING),
            ("--g3", self.g3, ("g3",)),
            ("--g3-rate", self.g3_rate, ("g3",)),
        ):
            if given and not set(needed) & set(rows):
                words = f"the row{'s' if len(needed) > 1 else ''} {' and '.join(needed)}"
                raise UserError(
                    f"{option} is a matter of {words}", f"add one to --rows, or leave {option} out"
                )


@contextmanager
def _as_wrong_usage() -> Iterator[None]:
    try:
        yield
    except UserError as wrong:
        advice = f"; {wrong.advice}" if wrong.advice else ""
        raise typer.BadParameter(f"{wrong.message}{advice}.") from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


@options_of(SimOptions)
def sim(_context: typer.Context, options: SimOptions) -> None:
    """Simulate a pod in virtual time: the agent's own code on flash and links that have rates.

    The same seed gives the same digest on any machine. Rates are decimal, and a small b means bits.
    """
    from agent.cli.tables import progress_bar
    from agent.cli.up.interrupts import ended_by_signals
    from agent.sim.rows_side_by_side import play_side_by_side

    experiment = options.experiment()
    # An end by SIGTERM as well: a bar that is left as it is hides the terminal's cursor.
    with ended_by_signals(), progress_bar() as progress:
        task = progress.add_task("", total=options.requests * len(experiment.rows))
        served: dict[str, int] = {}

        def say(row: str, count: int) -> None:
            served[row] = count
            progress.update(task, completed=sum(served.values()), description=f"{row} {count:,}")

        report = play_side_by_side(experiment, say)
    if options.json_output:
        print(json.dumps(report.record(), indent=2))
    else:
        show(report)


def show(report: Report) -> None:
    from agent.cli.tables import folding_table, print_facts

    rows = folding_table(
        "the same requests before each store", ("row",),
        ("hits", "speed-up", "tokens/GPU s", "TTFT p50", "p95", "p99", "GPUs wait"),
    )  # fmt: skip
    for row in report.rows if not report.experiment.players else ():
        speed_up = report.speed_up(row)
        rows.add_row(
            row.name, f"{row.hit_ratio:.1%}", "-" if speed_up is None else f"{speed_up:.2f}x",
            f"{row.tokens_per_gpu_second:,.0f}", f"{row.ttft_p50:.3g} s", f"{row.ttft_p95:.3g} s",
            f"{row.ttft_p99:.3g} s", f"{row.stalled_share:.1%}",
        )  # fmt: skip
    compared = () if report.experiment.players else (rows,)
    print_facts(f"row {report.first.name}", report.facts(), *compared, notes=report.notes())
