"""The six plots of `g35 claims --plot DIR`, as PNG files of the same content for the same answer."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.claims.report import WAYS, Answer
from agent.claims.scenario import TARGET, Scenario
from agent.claims.verdicts import STATED_TB_A_GPU
from agent.errors import UserError

SHARES = tuple(step / 100 for step in range(101))
CONTEXTS = tuple(int(1024 * 2 ** (step / 4)) for step in range(41))
"""Tokens: 1,024 to 1,048,576."""
_DOTS_AN_INCH = 90
_LEVELS = (1.5, 2, 3, 5, 8, 16)
_COLOURS = ("#440154", "#46337e", "#365c8d", "#277f8e", "#4ac16d", "#a0da39", "#fde725")
_PARTS = ("computing", "waiting", "storage", "dpu")


def make_folder(folder: Path) -> None:
    """Make the folder of the plots. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_draw(folder, error) from None


def _cannot_draw(folder: Path, error: OSError) -> UserError:
    return UserError(f"cannot draw into {folder}: {error.strerror or error}", "check --plot")


def draw_all(said: Answer, folder: Path) -> list[Path]:
    """Draw every plot into the folder; their paths. Raises UserError where it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    choice = said.choice
    title = f"{choice.model}, KV {choice.kv}, {choice.gpu}, {choice.pod}"
    plots: dict[str, Callable[[Any, Answer], None]] = {
        "speed_up": _speed_up,
        "phases": _phases,
        "g4_threshold": _g4_threshold,
        "hit_ratio": _hit_ratio,
        "energy": _energy,
        "first_token": _first_token,
    }
    drawn = []
    make_folder(folder)
    try:
        for name, draw in plots.items():
            figure, axes = pyplot.subplots(figsize=(7, 4.2))
            draw(axes, said)
            axes.set_title(title, fontsize=10)
            axes.grid(alpha=0.3)
            figure.tight_layout()
            drawn.append(folder / f"{name}.png")
            _save(figure, drawn[-1])
            pyplot.close(figure)
    except OSError as error:
        raise _cannot_draw(folder, error) from None
    return drawn


def _save(figure: Any, path: Path) -> None:
    """Write beside, then rename: where the disk has no room, an earlier plot stays as it is."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(beside, dpi=_DOTS_AN_INCH, format="png", metadata={"Software": None})
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _at(scenario: Scenario, share: float) -> Scenario:
    return replace(scenario, hit_share=max(share, scenario.local_share))


def _speed_up(axes: Any, said: Answer) -> None:
    percent = [100 * share for share in SHARES]
    points = [_at(said.scenario, share) for share in SHARES]
    axes.plot(
        percent, [each.speed_up("recompute") for each in points], label="over computing again, prestaged"
    )
    axes.plot(
        percent,
        [each.speed_up("recompute", overlapped=False) for each in points],
        "--",
        label="the same, load first",
    )
    axes.plot(percent, [each.speed_up("g4") for each in points], label="over G4, prestaged")
    ceiling = said.scenario.with_best_hits()
    axes.axhline(
        ceiling.speed_up("recompute"), color="grey", lw=1, label=f"ceiling of the {said.scenario.lane}"
    )
    axes.axhline(TARGET, color="red", lw=1, ls=":", label="5x")
    axes.set(xlabel="share of prompt tokens found, %", ylabel="prefill speed-up", yscale="log")
    axes.legend(fontsize=8)


def _phases(axes: Any, said: Answer) -> None:
    """Context against hit share: where 5x over computing again holds, and what limits elsewhere."""
    rows = [
        [_at(replace(said.scenario, context=context), share).speed_up("recompute") for context in CONTEXTS]
        for share in SHARES
    ]
    percent = [100 * share for share in SHARES]
    filled = axes.contourf(CONTEXTS, percent, rows, levels=_LEVELS, colors=_COLOURS, extend="both")
    axes.figure.colorbar(filled, ax=axes, label="speed-up over computing again")
    axes.contour(CONTEXTS, percent, rows, levels=[TARGET], colors="red")
    best = [100 * replace(said.scenario, context=context).best_hit_share for context in CONTEXTS]
    axes.plot(CONTEXTS, best, color="white", lw=1.5)
    axes.set(
        xlabel="context, tokens (red: 5x; above white: the network limits)",
        ylabel="found, %",
        xscale="log",
        ylim=(0, 100),
    )


def _g4_threshold(axes: Any, said: Answer) -> None:
    for name, at in (("at the best hit share", 1.0), ("at this hit share", said.scenario.hit_share)):
        points = [_at(replace(said.scenario, context=context), at) for context in CONTEXTS]
        if at == 1.0:
            points = [each.with_best_hits() for each in points]
        tb_s = [each.g4_threshold_gb_s() * each.gpus / 1000 for each in points]
        axes.plot(CONTEXTS, tb_s, label=f"5x needs a G4 below, {name}")
    now = said.scenario.g4_gb_s * said.scenario.gpus / 1000
    axes.axhline(now, color="red", lw=1, ls=":", label="this G4")
    axes.set(xlabel="context, tokens", ylabel="G4 of the pod, TB/s", xscale="log", ylim=(0, None))
    axes.legend(fontsize=8)


def _hit_ratio(axes: Any, said: Answer) -> None:
    found = said.found
    if found is None:
        axes.text(0.5, 0.5, "needs a trace: --trace FILE", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    sizes = [found.tb_a_gpu(point.blocks) for point in found.curve]
    for name in ("clairvoyant", "lru", "pool", "fifo"):
        axes.plot(sizes, [100 * getattr(point, name) for point in found.curve], marker=".", label=name)
    axes.axhline(100 * found.unbounded, color="grey", lw=1, label="without bound")
    axes.axvline(STATED_TB_A_GPU, color="red", lw=1, ls=":", label="16 TB a GPU")
    axes.set(
        xlabel=f"TB a GPU, of {found.busy_gpus:.1f} that the trace keeps busy",
        ylabel="found of tokens, %",
        xscale="log",
        ylim=(0, None),
    )
    axes.legend(fontsize=8)


def _energy(axes: Any, said: Answer) -> None:
    parts = {part: [getattr(said.scenario.energy(way), part) for way in WAYS] for part in _PARTS}
    below = [0.0] * len(WAYS)
    for part, joules in parts.items():
        axes.bar(WAYS, joules, bottom=below, label=part)
        below = [one + more for one, more in zip(below, joules, strict=True)]
    axes.set(ylabel="joules of a prompt token")
    axes.legend(fontsize=8)


def _first_token(axes: Any, said: Answer) -> None:
    for tier, times in said.ttft_s.items():
        shares = [100 * (number + 1) / len(times) for number in range(len(times))]
        axes.plot(times, shares, label=tier)
    axes.set(xlabel="seconds to the first token", ylabel="requests, %", xscale="log", ylim=(0, 100))
    axes.legend(fontsize=8)
