"""One scenario (model, GPU, pod, context, hits) and what comes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from agent.claims.equations import (
    Energy,
    Tier,
    break_even_gb_s,
    drive_writes_a_day,
    energy,
    retention_hours,
    slowest_lane,
    supply_for,
    utilisation_of,
    whole_gpu,
    work_of,
    written_gb_s,
)
from agent.errors import UserError
from agent.figures.prefill import PrefillCost, cost_of, prefill_tokens_s
from agent.figures.tables import Figure, KvPrecision, Tables, find

TERA = 1e12
TARGET = 5.0
"""The announced factor, of tokens a second and of power efficiency."""
ASSUMED_PREFILL_SHARE = 0.5
HOST_NIC, NETWORK, DRIVES = "host DPU", "network", "drives"


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user asks about, by names of the table. `g4_gb_s` is for the whole pod."""

    model: str
    kv: KvPrecision
    gpu: str
    pod: str
    g4_gb_s: float | None = None


@dataclass(frozen=True)
class Scenario:
    """The numbers of one calculation. Bandwidths, watts and capacity are for one GPU; shares from 0 to 1."""

    cost: PrefillCost
    flops_s: float
    bytes_per_token: float
    context: int
    hit_share: float
    local_share: float
    """What the GPU's own server (G1, G2) has of every prompt."""
    lanes_gb_s: Mapping[str, float]
    g4_gb_s: float
    gpu_watts: float
    storage_watts: float
    dpu_watts: float
    g4_watts_per_gb_s: float
    gpus: int
    capacity_tb: float
    drive_write_gb_s: float
    drive_writes_a_day: float
    prefill_share: float = ASSUMED_PREFILL_SHARE
    """Of GPU time, with no cache at all."""

    @cached_property
    def attention_share(self) -> float:
        return self.cost.attention_share(self.context)

    @cached_property
    def tokens_s(self) -> float:
        return prefill_tokens_s(self.cost, self.flops_s, self.context)

    @cached_property
    def break_even_gb_s(self) -> float:
        return break_even_gb_s(self.bytes_per_token, self.tokens_s)

    @property
    def lane(self) -> str:
        return slowest_lane(self.lanes_gb_s)[0]

    @property
    def gb_s(self) -> float:
        return slowest_lane(self.lanes_gb_s)[1]

    @property
    def supply(self) -> float:
        return self.gb_s / self.break_even_gb_s

    @cached_property
    def g35(self) -> Tier:
        return Tier(self.supply, self.attention_share, self.local_share)

    @property
    def g4_taken_gb_s(self) -> float:
        """Bytes of G4 pass the host's DPU as well: no more of a G4 is of use, or is counted in watts."""
        return min(self.g4_gb_s, self.lanes_gb_s[HOST_NIC])

    @cached_property
    def g4(self) -> Tier:
        return Tier(self.g4_taken_gb_s / self.break_even_gb_s, self.attention_share, self.local_share)

    @property
    def recompute(self) -> float:
        """Time of a prompt with what the server itself has, and no tier behind it."""
        return work_of(self.local_share, self.attention_share)

    def speed_up(self, over: str, *, overlapped: bool = True) -> float:
        """Of prefill over `nothing` (each prompt computed whole), `recompute`, or `g4`."""
        ours = self.g35.overlapped(self.hit_share) if overlapped else self.g35.serial(self.hit_share)
        if over == "g4":
            g4 = self.g4.overlapped(self.hit_share) if overlapped else self.g4.serial(self.hit_share)
            return g4 / ours
        return (1.0 if over == "nothing" else self.recompute) / ours

    @property
    def best_hit_share(self) -> float:
        """Where loading and computing take equally long: more hits than that help no more."""
        return self.g35.useful_share(1.0)

    def with_best_hits(self) -> "Scenario":
        return replace(self, hit_share=self.best_hit_share)

    def g4_threshold_gb_s(self) -> float:
        """The G4 of one GPU up to which G3.5 is `TARGET` times faster at these hits.

        0: not even computing again is that slow.
        """
        time = TARGET * self.g35.overlapped(self.hit_share)
        return supply_for(time, self.attention_share, self.local_share) * self.break_even_gb_s

    def limit(self) -> str:
        """What limits the prefill: a lane, or `hits`, for a GPU computes what is not found."""
        return self.lane if self.g35.useful_share(self.hit_share) < self.hit_share else "hits"

    def energy(self, way: str) -> Energy:
        """Joules of a prompt token: `nothing`, `recompute`, `g35` or `g4`."""
        if way in ("nothing", "recompute"):
            time = 1.0 if way == "nothing" else self.recompute
            return energy(time, time, self.tokens_s, self.gpu_watts, 0.0, 0.0)
        tier = self.g35 if way == "g35" else self.g4
        useful = tier.useful_share(self.hit_share)
        watts = self.storage_watts if way == "g35" else self.g4_taken_gb_s * self.g4_watts_per_gb_s
        return energy(
            tier.overlapped(self.hit_share),
            work_of(useful, self.attention_share),
            self.tokens_s,
            self.gpu_watts,
            watts,
            self.dpu_watts if way == "g35" else 0.0,
        )

    def power_gain(self, over: str) -> float:
        return self.energy(over).total / self.energy("g35").total

    @property
    def whole_gpus(self) -> float:
        """Speed-up over computing again of GPUs that also decode."""
        return whole_gpu(self.speed_up("recompute"), self.prefill_share)

    @property
    def written_gb_s(self) -> float:
        """What one GPU writes that does nothing but prefill, and stores all that was not found.

        Blocks that are found and computed all the same lie on the flash already.
        """
        time = self.g35.overlapped(self.hit_share)
        return written_gb_s(self.bytes_per_token, self.tokens_s, 1 - self.hit_share, time)

    @property
    def writes_a_day(self) -> float:
        """Of the whole capacity."""
        return drive_writes_a_day(self.written_gb_s, self.capacity_tb)

    @property
    def retention_hours(self) -> float:
        return retention_hours(self.capacity_tb, self.written_gb_s)


def calibrated(tables: Tables, choice: Choice) -> Figure:
    """Utilisation of the GPU for the model: by a published rate of just these two, else the GPU's own."""
    gpu = find("GPU", choice.gpu, tables.gpus)
    rate = tables.rates.get((choice.model, choice.gpu))
    if rate is None:
        return gpu.utilisation
    peak = gpu.fp8_tflops.value * TERA
    share = utilisation_of(_cost(choice.model, tables), peak, rate.tokens_s.value, rate.context)
    if share > 1:
        raise UserError(
            f"the rate of {choice.model} on {choice.gpu} is {share:.1f} times what the GPU can compute",
            "mend the rate, or fp8_tflops, in the file of --data",
        )
    source = f"computed from {rate.tokens_s.value:,.0f} tokens/s: {rate.tokens_s.source}"
    return Figure(value=share, source=source[:200], date=rate.tokens_s.date)


def _cost(name: str, tables: Tables) -> PrefillCost:
    model = find("model", name, tables.models)
    cost = cost_of(model)
    if cost is None:
        able = [each for each, record in tables.models.items() if record.parameters is not None]
        raise UserError(
            f"no parameters of {name} were published, so its prefill rate cannot be computed",
            f"add them by --data, or take one of {', '.join(able)}",
        )
    return cost


def most_hits(context: int) -> float:
    """The largest hit share: the answer begins at the last token of a prompt, so an engine computes it."""
    return 1 - 1 / context


def scenario_of(tables: Tables, choice: Choice, context: int, hit_share: float) -> Scenario:
    """The scenario of a choice. Raises UserError for unknown names and for a model that does not fit."""
    model, gpu = find("model", choice.model, tables.models), find("GPU", choice.gpu, tables.gpus)
    pod = find("pod", choice.pod, tables.pods)
    enclosure = tables.enclosures[pod.enclosure]
    gpus, enclosures = pod.gpus.value, pod.enclosures.value
    cost = _cost(choice.model, tables)
    assert model.parameters is not None
    tables.check_fit(choice.model, choice.gpu, int(gpus))
    bytes_per_token = model.bytes_per_token(choice.kv, context)
    if not bytes_per_token:
        raise UserError(
            f"{choice.model} stores no cache for a prompt of {context:,} tokens: more tokens share an entry",
            "name a longer --context",
        )
    g4_gb_s = pod.g4_gb_s.value if choice.g4_gb_s is None else choice.g4_gb_s
    return Scenario(
        cost=cost,
        flops_s=gpu.fp8_tflops.value * TERA * calibrated(tables, choice).value,
        bytes_per_token=bytes_per_token,
        context=context,
        hit_share=min(hit_share, most_hits(context)),
        local_share=0.0,
        lanes_gb_s=MappingProxyType(
            {
                HOST_NIC: pod.host_nic_gb_s.value / pod.gpus_per_host.value,
                NETWORK: enclosure.nic_gb_s.value * enclosures / gpus,
                DRIVES: enclosure.drives.value * enclosure.drive_read_gb_s.value * enclosures / gpus,
            }
        ),
        g4_gb_s=g4_gb_s / gpus,
        gpu_watts=gpu.watts.value,
        storage_watts=enclosure.watts.value * enclosures / gpus,
        dpu_watts=pod.host_dpu_watts.value / pod.gpus_per_host.value,
        g4_watts_per_gb_s=pod.g4_watts_per_gb_s.value,
        gpus=int(gpus),
        capacity_tb=enclosure.capacity_tb * enclosures / gpus,
        drive_write_gb_s=enclosure.drives.value * enclosure.drive_write_gb_s.value * enclosures / gpus,
        drive_writes_a_day=enclosure.drive_writes_a_day.value,
    )


def figures_used(tables: Tables, choice: Choice) -> list[tuple[str, float, str, str]]:
    """Every figure behind a choice: what, value, source, date. G4 is for the whole pod."""
    pod = find("pod", choice.pod, tables.pods)
    model = find("model", choice.model, tables.models)
    rows: list[tuple[str, float, str, str]] = [
        ("KV bytes a token", model.bytes_per_token(choice.kv), model.source, model.date)
    ]
    if model.parameters is not None:
        rows.append(("active parameters, billions", model.parameters.active, model.source, model.date))
    gpu = find("GPU", choice.gpu, tables.gpus)
    used = calibrated(tables, choice)
    for owner, record in (("GPU", gpu), ("enclosure", tables.enclosures[pod.enclosure]), ("pod", pod)):
        for name, figure in record:
            if isinstance(figure, Figure):
                shown = used if name == "utilisation" else figure
                row = (f"{owner}: {in_words(name)}", shown.value, shown.source, shown.date)
                given = name == "g4_gb_s" and choice.g4_gb_s is not None
                rows.append(row if not given else (row[0], choice.g4_gb_s or 0.0, "--g4", ""))
    return rows


_UNITS = {
    "_tokens_s": ", tokens/s",
    "_watts_per_gb_s": ", watts for each GB/s",
    "_gb_s": ", GB/s",
    "_tb_s": ", TB/s",
    "_gb": ", GB",
    "_tb": ", TB",
    "_pb": ", PB",
}
_SHORT = {each.lower(): each for each in ("B*", "DPU", "DRAM", "FIFO", "FP8", "G4", "GPU", "GPUs", "LRU")}
_SHORT |= {"g35": "G3.5", "tflops": "TFLOPS", "nic": "NIC", "tb": "TB"}


def in_words(name: str) -> str:
    """The name of a figure or a column for people, its unit behind a comma."""
    unit = next((unit for unit in _UNITS if name.endswith(unit)), "")
    words = name.removesuffix(unit).split("_")
    return " ".join(_SHORT.get(word, word) for word in words) + _UNITS.get(unit, "")
