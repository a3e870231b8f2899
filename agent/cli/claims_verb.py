"""`g35 claims`: what the announced claims need, where they hold, and where not."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agent.cli.record_options import options_of, path_of, text_for
from agent.sizes import parse_rate

if TYPE_CHECKING:
    from rich.table import Table

    from agent.claims.report import Answer

CONTEXT_MAX = 1 << 24


def _gb_s(text: str) -> float | None:
    """GB/s out of a rate as `g35 sim` takes it: `2.5TB/s`, or `8Tb/s` in bits; None for nothing."""
    return parse_rate(text) / 1e9 if text else None


@dataclass(frozen=True, slots=True)
class ClaimsOptions:
    """What the claims are judged for."""

    model: Annotated[
        str,
        typer.Option(help="The model, by its name in agent/figures/figures.toml; a wrong name lists all."),
    ] = "deepseek-v3"
    kv: Annotated[
        Literal["bf16", "fp8"],
        typer.Option(help="Precision of the KV cache, bf16 or fp8; weights are taken as FP8."),
    ] = "fp8"
    gpu: Annotated[str, typer.Option(help="The GPU: h100, h200, gb200, vr200.")] = "gb200"
    pod: Annotated[str, typer.Option(help="The pod: superpod, rack, one.")] = "superpod"
    trace: Annotated[
        Path | None,
        typer.Option(
            parser=path_of,
            metavar="<path>",
            help="Take context and hits from a trace in Mooncake's format, which may be packed (.xz).",
        ),
    ] = None
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--context", min=1, max=CONTEXT_MAX, help="Tokens of a prompt; default: the trace's, or 131072."
        ),
    ] = None
    hits: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of prompt tokens that are found; default: the trace's, or 0.9. With a trace never "
            "below what servers find in their own memory.",
        ),
    ] = None
    g4: Annotated[
        str,
        typer.Option(
            callback=text_for(parse_rate),
            help="Rate of shared storage for the whole pod, such as 2.5TB/s; Tb/s are bits. Default: as the "
            "pod.",
        ),
    ] = ""
    data: Annotated[
        Path | None,
        typer.Option(
            parser=path_of, metavar="<path>", help="A TOML file with more models, GPUs, enclosures and pods."
        ),
    ] = None
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False
    plot: Annotated[
        Path | None,
        typer.Option(
            parser=path_of, metavar="<path>", help="Draw six plots into this folder, which is made."
        ),
    ] = None


@options_of(ClaimsOptions)
def claims(_context: typer.Context, options: ClaimsOptions) -> None:
    """Which of the announced claims of a G3.5 tier hold for a model, a GPU and a pod, and where not.

    Prints inputs with their sources, break-even bandwidth, speed-ups, energy, endurance, a verdict for each
    claim, and what each input changes at half and at double. A trace takes a minute.
    """
    from agent.claims.report import answer, record
    from agent.claims.scenario import Choice
    from agent.claims.trace import read_trace
    from agent.cli.tables import progress_bar
    from agent.cli.up.interrupts import ended_by_signals
    from agent.figures.tables import load

    if options.plot is not None:
        from agent.claims.plots import draw_all, make_folder

        make_folder(options.plot)
    tables = load(options.data)
    choice = Choice(options.model, options.kv, options.gpu, options.pod, _gb_s(options.g4))
    for kind, name, records in (
        ("model", choice.model, tables.models),
        ("gpu", choice.gpu, tables.gpus),
        ("pod", choice.pod, tables.pods),
    ):
        _known(kind, name, records)
    # An end by SIGTERM as well: a bar that is left as it is hides the terminal's cursor.
    with ended_by_signals(), progress_bar() if options.trace is not None else nullcontext() as bar:
        trace = None
        task = None if bar is None else bar.add_task("reading", total=1.0)

        def show(share: float) -> None:
            if bar is not None and task is not None:
                bar.update(task, completed=share)

        if options.trace is not None:
            trace = read_trace(options.trace, show)
            if bar is not None and task is not None:
                bar.update(task, description="hit ratios by capacity", completed=0.0)
        said = answer(
            tables, choice, trace=trace, context=options.prompt_tokens, hit_share=options.hits, progress=show
        )
    if options.json_output:
        print(json.dumps(record(said), indent=2))
    else:
        show_tables(said)
    # Last: where no plot can be written, what took minutes to compute is not lost.
    if options.plot is not None:
        draw_all(said, options.plot)


def _known(kind: str, name: str, records: dict[str, Any]) -> None:
    from agent.errors import did_you_mean

    if name not in records:
        raise typer.BadParameter(
            f"no {kind} {name!r}{did_you_mean(name, records)}; there are {', '.join(records)}",
            param_hint=f"--{kind}",
        )


def show_tables(said: "Answer") -> None:
    from agent.claims.report import record
    from agent.cli.tables import folding_table, print_tables

    found = record(said)
    title = f"{said.choice.model}, KV in {said.choice.kv}, {said.choice.gpu}, {said.choice.pod}"
    inputs = folding_table(f"inputs: {title}", ("what", "source", "read"), ("value",))
    for row in found["inputs"]:
        _add_row(inputs, row["what"], row["source"], row["date"], f"{row['value']:,.6g}")
    shown = [inputs, _summary(found)]
    shown.append(_table("by context, at the best hit share", found["contexts"]))
    shown.append(
        _table("prefill speed-up by hit share, prestaged and with the load first", found["speed_up"])
    )
    shown.append(_table("whole GPUs over computing again, by their share of prefill", found["whole_gpu"]))
    if found["trace"] is not None:
        shown.append(_table("hit ratio of tokens by capacity", found["trace"]["hit_curve"]))
    energy = [{"way": way, **parts} for way, parts in found["energy_j"].items()]
    shown.append(_table("joules of a prompt token", energy))
    shown.append(_table("capacity, as it was said", found["capacities"]))
    shown.append(_table("other models, same pod and context, at their best hit share", found["models"]))
    tiers = [{"tier": tier, **times} for tier, times in found["ttft_s"].items()]
    shown.append(
        _table(
            f"seconds to the first token, one whole host a request, nothing local: {found['ttft_prompts']}",
            tiers,
        )
    )
    shown.append(_table("each input at half and at double", found["sensitivity"]))
    published = folding_table("published figures", ("what", "published", "here", "judged"))
    for each in said.published:
        _add_row(published, each.what, each.published, each.here, each.judgement)
    shown.append(published)
    verdicts = folding_table("verdicts", ("claim", "holds", "where"))
    for claim in said.claims:
        _add_row(verdicts, claim.claim, _yes(claim.holds), claim.where)
    shown.append(verdicts)
    print_tables(*shown)


def _yes(is_so: bool | None) -> str:
    return "not judged" if is_so is None else "yes" if is_so else "no"


def _summary(found: dict[str, Any]) -> Any:
    from agent.cli.tables import folding_table

    table = folding_table("in sum, for one GPU", ("",), ("",), head=False)
    wanted = found["hit_share_asked"]
    asked = []
    if wanted is not None and wanted < found["local_share"]:
        asked = [("  --hits", f"{wanted:.1%}, less than the servers find in their own memory")]
    rows = [
        ("context", f"{found['context']:,} tokens"),
        ("hit share", f"{found['hit_share']:.1%}, of it {found['local_share']:.1%} in the server itself"),
        *asked,
        ("prefill", f"{found['prefill_tokens_s']:,.0f} tokens/s"),
        ("break-even bandwidth B*", f"{found['break_even_gb_s']:.3g} GB/s"),
        *((f"  of the {name}", f"{rate:.3g} GB/s") for name, rate in found["lanes_gb_s"].items()),
        ("  of G4", f"{found['g4_gb_s']:.3g} GB/s"),
        ("supply, bandwidth over B*", f"{found['supply']:.3g}"),
        ("what limits", found["limit"]),
        ("drive writes a day", f"{found['drive_writes_a_day']:.2g} of {found['drive_writes_a_day_rated']:g}"),
        ("a value stays", f"{found['retention_hours']:.1f} h"),
    ]
    if (trace := found["trace"]) is not None:
        part = "" if trace["is_whole"] else ", the first of the file"
        rows.append(("trace", f"{trace['requests']:,} requests, {trace['blocks']:,} blocks{part}"))
        rows.append(("  keeps busy, all computed", f"{trace['busy_gpus']:.1f} GPUs"))
        rows.append(("  broken lines skipped", f"{trace['broken_lines']:,}"))
    for what, how_much in rows:
        _add_row(table, what, how_much)
    return table


def _table(title: str, rows: list[dict[str, Any]]) -> Any:
    """A table of records: the first column names the row, then words, then numbers."""
    from agent.cli.tables import folding_table

    names = list(rows[0]) if rows else []
    words = [*names[:1], *(name for name in names[1:] if isinstance(rows[0][name], str))]
    numbers = [name for name in names if name not in words]
    table = folding_table(title, [_heading(name) for name in words], [_heading(name) for name in numbers])
    for row in rows:
        first = row[names[0]]
        named = f"{first:.1%}" if isinstance(first, float) else _cell(first)
        _add_row(table, named, *(_cell(row[name]) for name in (*words[1:], *numbers)))
    return table


def _add_row(table: "Table", *cells: str) -> None:
    """A row of cells as they are: square brackets of a user's file are no markup."""
    from rich.text import Text

    table.add_row(*(Text(cell) for cell in cells))


_HEADINGS = {
    "context": "context, tokens",
    "break_even_gb_s": "B*, GB/s",
    "g4_threshold_tb_s": "5x over a G4 to, TB/s",
    "dpu": "DPU",
    "total": "in all",
    "tb_a_gpu": "TB a GPU",
    "enclosure_tb": "an enclosure, TB",
    "pod_pb": "the pod, PB",
    "gpu_tb": "a GPU, TB",
    "retention_hours": "a value stays, h",
    "drive_writes_of_rated": "drive writes of those rated",
}


def _heading(name: str) -> str:
    from agent.claims.scenario import in_words

    return _HEADINGS.get(name) or in_words(name)


def _cell(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"
