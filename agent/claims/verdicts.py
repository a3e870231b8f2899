"""One verdict for each claim of the announcement, and what each input changes when it is half or double."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agent.claims.equations import hit_share_for, prefill_share_for
from agent.claims.scenario import DRIVES, HOST_NIC, NETWORK, TARGET, Choice, Scenario, scenario_of
from agent.errors import UserError
from agent.figures.tables import Pod, Tables

CONTEXTS = tuple(1 << power for power in range(12, 21, 2))
"""Tokens: 4,096 to 1,048,576."""
STATED_HIT_SHARES = (0.5, 0.8, 0.9, 0.95, 0.98)
STATED_PREFILL_SHARES = (0.3, 0.5, 0.8, 0.9, 1.0)
STATED_TB_A_GPU = 16.0
STATED_GPUS_AN_ENCLOSURE = 32
"""1,152 GPUs and 36 enclosures."""
POD_PB_STATED, KEYNOTE_TB = 18.4, 600.0
"""The pod by the announcement, and one enclosure by its keynote."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim, whether it holds for the inputs (None: they do not say), and where it does and does not."""

    claim: str
    holds: bool | None
    where: str


@dataclass(frozen=True, slots=True)
class ModelRow:
    """What a model of the table gets from the same GPU, pod and context, with as many hits as are of use."""

    model: str
    break_even_gb_s: float
    supply: float
    best_over_recompute: float
    best_over_g4: float
    g4_threshold_tb_s: float


def of_all_models(tables: Tables, choice: Choice, context: int) -> list[ModelRow]:
    """A row for each model of the table whose parameters are known, and that fits the pod."""
    rows = []
    for name in tables.models:
        try:
            best = scenario_of(tables, replace(choice, model=name), context, 1.0).with_best_hits()
        except UserError:
            continue
        threshold = best.g4_threshold_gb_s() * best.gpus / 1000
        rows.append(
            ModelRow(
                name,
                best.break_even_gb_s,
                best.supply,
                best.speed_up("recompute"),
                best.speed_up("g4"),
                threshold,
            )
        )
    return rows


def _split(rows: Sequence[ModelRow], holds: Callable[[ModelRow], bool]) -> str:
    able = [row.model for row in rows if holds(row)]
    rest = [row.model for row in rows if not holds(row)]
    if not able or not rest:
        return f"with the best hits for {'every' if able else 'no'} model of the table"
    return f"with the best hits for {', '.join(able)}; not for {', '.join(rest)}"


def _ways(scenario: Scenario, over: str) -> str:
    """The verdict is for perfect prestaging: what is loaded hides behind computing, in both tiers."""
    first = scenario.speed_up(over, overlapped=False)
    return f"{scenario.speed_up(over):.2f}x by perfect prestaging, {first:.2f}x with the load first"


def over_recompute(scenario: Scenario, contexts: Sequence[Scenario], rows: Sequence[ModelRow]) -> Claim:
    reach = [each.context for each in contexts if each.with_best_hits().speed_up("recompute") >= TARGET]
    least = hit_share_for(scenario.recompute / TARGET, scenario.attention_share)
    possible = scenario.with_best_hits().speed_up("recompute") >= TARGET
    hits = f"from a hit share of {least:.1%} on" if possible else "at no hit share"
    context = f"contexts from {min(reach):,} tokens on" if reach else "no context"
    return Claim(
        "5x tokens a second over computing again, prefill",
        scenario.speed_up("recompute") >= TARGET,
        f"at {scenario.context:,} tokens {hits}; by the bandwidth for {context}; "
        f"{_ways(scenario, 'recompute')}; " + _split(rows, lambda row: row.best_over_recompute >= TARGET),
    )


def _up_to(threshold_tb_s: float) -> str:
    if not threshold_tb_s:
        return "over no G4, for computing again is not five times slower"
    return f"over a G4 of at most {threshold_tb_s:.2f} TB/s"


def _g4_words(scenario: Scenario) -> str:
    """What the G4 of the pod gives, and what hosts take of one that is faster than their DPUs."""
    given, taken = (each * scenario.gpus / 1000 for each in (scenario.g4_gb_s, scenario.g4_taken_gb_s))
    return f"{given:.2f} TB/s" + (f", of which the hosts take {taken:.2f}" if taken < given else "")


def over_g4(scenario: Scenario, rows: Sequence[ModelRow]) -> Claim:
    here = scenario.g4_threshold_gb_s() * scenario.gpus / 1000
    best = scenario.with_best_hits()
    at_best = best.g4_threshold_gb_s() * scenario.gpus / 1000
    now = _up_to(here)
    then = _up_to(at_best)
    return Claim(
        "5x tokens a second over shared storage (G4), prefill",
        scenario.speed_up("g4") >= TARGET,
        f"at a hit share of {scenario.hit_share:.1%} {now}; at the best one, {best.hit_share:.1%}, {then}; "
        f"this G4 gives {_g4_words(scenario)}; {_ways(scenario, 'g4')}; "
        + _split(rows, lambda row: row.best_over_g4 >= TARGET),
    )


def of_whole_gpus(scenario: Scenario, *, by_trace: bool) -> Claim:
    """`by_trace`: the share of prefill is a trace's, and not assumed."""
    share = prefill_share_for(scenario.speed_up("recompute"), TARGET)
    taken, here = scenario.prefill_share, scenario.whole_gpus
    most = 1 / max(1 - taken, 1e-9)
    by = "as the trace has it" if by_trace else "as assumed"
    least = "at no share of prefill" if share is None else f"from {share:.1%} of GPU time in prefill on"
    return Claim(
        "5x tokens a second of whole GPUs, which also decode",
        here >= TARGET,
        f"{least}; with {taken:.1%}, {by}, it is {here:.2f}x, and never over {most:,.1f}x",
    )


def power_over_recompute(scenario: Scenario) -> Claim:
    gain, speed_up = scenario.power_gain("recompute"), scenario.speed_up("recompute")
    return Claim(
        "5x power efficiency over computing again, prefill",
        gain >= TARGET,
        f"{gain:.2f}x, where tokens a second are {speed_up:.2f}x: the same claim again, for enclosures and "
        f"DPUs take {_storage_share(scenario):.1%} of the energy of a token",
    )


def _storage_share(scenario: Scenario) -> float:
    spent = scenario.energy("g35")
    return (spent.storage + spent.dpu) / spent.total


def power_over_g4(scenario: Scenario, tables: Tables, choice: Choice) -> Claim:
    """What the watts of a G4 add to the claim of tokens a second, and where those watts come from."""
    gain, speed_up = scenario.power_gain("g4"), scenario.speed_up("g4")
    free = replace(scenario, g4_watts_per_gb_s=0.0).power_gain("g4")
    pod = tables.pods[choice.pod]
    watts, ours = pod.g4_watts_per_gb_s, tables.enclosures[pod.enclosure].watts
    rests = "; it holds by these watts alone" if free < TARGET <= gain else ""
    taken = f", which gives {_g4_words(scenario)}" if scenario.g4_taken_gb_s < scenario.g4_gb_s else ""
    return Claim(
        "5x power efficiency over shared storage (G4), prefill",
        gain >= TARGET,
        f"{gain:.2f}x, where tokens a second are {speed_up:.2f}x, and {free:.2f}x over a G4 that draws "
        f"nothing{rests}: {watts.value:,.0f} W for each GB/s of G4 ({watts.source}){taken}, "
        f"beside {ours.value:,.0f} W an enclosure ({ours.source}); enclosures and DPUs take "
        f"{_storage_share(scenario):.1%} of the energy of a token",
    )


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """The capacity by one statement: of an enclosure, of the pod, and for each GPU."""

    stated: str
    enclosure_tb: float
    pod_pb: float
    gpu_tb: float


def capacities(tables: Tables, choice: Choice) -> list[CapacityRow]:
    """What was said of the capacity, side by side."""
    pod = tables.pods[choice.pod]
    gpus, enclosures = pod.gpus.value, pod.enclosures.value
    drives = tables.enclosures[pod.enclosure].capacity_tb
    said = POD_PB_STATED * 1000 / 36
    rows = [("drives times their size", drives), ("a 36th of 18.4 PB", said), ("the keynote", KEYNOTE_TB)]
    return [
        CapacityRow(name, size, size * enclosures / 1000, size * enclosures / gpus) for name, size in rows
    ]


def of_capacity(rows: Sequence[CapacityRow], pod: Pod) -> Claim:
    """Judged for as many GPUs to an enclosure as the announced pod has; nothing was said of others."""
    own = rows[0]
    said = "; ".join(f"{row.gpu_tb:.2f} TB by {row.stated} ({row.enclosure_tb:.1f} TB)" for row in rows)
    gpus = pod.gpus.value / pod.enclosures.value
    if gpus != STATED_GPUS_AN_ENCLOSURE:
        return Claim(
            "16 TB a GPU",
            None,
            f"said of {STATED_GPUS_AN_ENCLOSURE} GPUs an enclosure, and this pod has {gpus:g}: {said}",
        )
    return Claim("16 TB a GPU", own.gpu_tb >= STATED_TB_A_GPU, said)


def of_hits(scenario: Scenario, found: float | None, most: float | None, curve_ends: bool) -> Claim:
    """Whether the capacity is enough. `found`: hit share at it; `most`: of a cache without bound."""
    hours = f"a value that nobody asks for stays {scenario.retention_hours:.1f} h where all GPUs only prefill"
    name = "The capacity finds what there is to find"
    if found is None or most is None:
        return Claim(name, None, f"needs a trace (--trace); {hours}")
    beyond = "; the trace ends before the pod is full" if curve_ends else ""
    return Claim(name, found >= most - 0.01, f"{found:.1%} of tokens of at most {most:.1%}{beyond}; {hours}")


def of_endurance(scenario: Scenario, used_again: float | None) -> Claim:
    rated, writes = scenario.drive_writes_a_day, scenario.writes_a_day
    where = (
        f"{writes:.1f} writes of the capacity a day where all GPUs only prefill and store all they compute, "
        f"of {rated:g}; it lasts where at most {min(1.0, rated / writes):.0%} of it is stored; a GPU writes "
        f"{scenario.written_gb_s:.2f} GB/s of the {scenario.drive_write_gb_s:.1f} GB/s that its drives take"
    )
    if used_again is not None:
        where += (
            f"; of the trace's blocks {used_again:.0%} are used again, which makes {writes * used_again:.1f}"
        )
    return Claim("The drives last", writes <= rated, where)


@dataclass(frozen=True, slots=True)
class SensitivityRow:
    """One input at half and at double: the speed-ups, the gain of power and the wear that come of it.

    `drive_writes_of_rated`: from 1 on the drives do not last.
    """

    input: str
    factor: float
    break_even_gb_s: float
    over_recompute: float
    over_g4: float
    whole_gpus: float
    power_over_recompute: float
    power_over_g4: float
    drive_writes_of_rated: float
    retention_hours: float


def _times(scenario: Scenario, name: str, factor: float) -> Scenario:
    return replace(scenario, **{name: getattr(scenario, name) * factor})


def _lane(name: str) -> Callable[[Scenario, float], Scenario]:
    return lambda scenario, factor: replace(
        scenario, lanes_gb_s={**scenario.lanes_gb_s, name: scenario.lanes_gb_s[name] * factor}
    )


def _field(name: str) -> Callable[[Scenario, float], Scenario]:
    return lambda scenario, factor: _times(scenario, name, factor)


def _enclosures(scenario: Scenario, factor: float) -> Scenario:
    """More of them bring network, drives, room and watts; the hosts stay as they are."""
    for lane in (NETWORK, DRIVES):
        scenario = _lane(lane)(scenario, factor)
    for name in ("storage_watts", "capacity_tb", "drive_write_gb_s"):
        scenario = _times(scenario, name, factor)
    return scenario


CHANGES: dict[str, Callable[[Scenario, float], Scenario]] = {
    "prefill rate": _field("flops_s"),
    "KV bytes a token": _field("bytes_per_token"),
    "context": lambda scenario, factor: replace(scenario, context=max(1, int(scenario.context * factor))),
    "share that is not found": lambda scenario, factor: replace(
        scenario, hit_share=max(0.0, 1 - (1 - scenario.hit_share) * factor)
    ),
    "network of the enclosures": _lane(NETWORK),
    "DPU of the host": _lane(HOST_NIC),
    "reads of the drives": _lane(DRIVES),
    "number of enclosures": _enclosures,
    "G4": _field("g4_gb_s"),
    "capacity": _field("capacity_tb"),
    "writes a day that the drives last": _field("drive_writes_a_day"),
    "prefill's share of GPU time": lambda scenario, factor: replace(
        scenario, prefill_share=min(1.0, scenario.prefill_share * factor)
    ),
    "watts of the enclosures": _field("storage_watts"),
    "watts of the host's DPU": _field("dpu_watts"),
    "watts of the GPU": _field("gpu_watts"),
    "watts of G4": _field("g4_watts_per_gb_s"),
}


def sensitivity(scenario: Scenario) -> list[SensitivityRow]:
    """Each input at half and at double, all others as they are."""
    rows = []
    for name, change in CHANGES.items():
        for factor in (0.5, 2.0):
            other = change(scenario, factor)
            rows.append(
                SensitivityRow(
                    name,
                    factor,
                    other.break_even_gb_s,
                    other.speed_up("recompute"),
                    other.speed_up("g4"),
                    other.whole_gpus,
                    other.power_gain("recompute"),
                    other.power_gain("g4"),
                    other.writes_a_day / other.drive_writes_a_day,
                    other.retention_hours,
                )
            )
    return rows
