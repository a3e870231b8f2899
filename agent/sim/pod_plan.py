"""What pod is simulated: its shape and its rates, with presets. Rates are bytes a second, sizes bytes.

Shapes and rates of pods, and of models on GPUs, are those of the table of figures (agent/figures). It has
not: PCIe 5.0 x16 of a GPU, two PCIe 5.0 drives of a host's own, room for cache in GPUs, latencies.
Those are assumed, and options.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Final

from agent.errors import UserError, did_you_mean
from agent.figures.prefill import PrefillCost, cost_of
from agent.figures.tables import KvPrecision, Tables, find
from agent.sizes import readable_bytes

SLOT_VALUE_MAX: Final = 16 << 20
"""The largest value of a volume: a block that weighs more is striped over several values."""
FAULTS: Final = ("stop", "slow", "err", "kill", "lose", "agent", "join", "leave")
ALL_FAULTS: Final = "all"
GPUS_MAX, DRIVES_MAX, ENCLOSURES_MAX = 1 << 14, 1 << 10, 1 << 10
TENANTS_MAX: Final = 64
DRIVES_IN_ALL_MAX: Final = 1 << 14
ANNOUNCED: Final = "announced"
LEARNED: Final = "learned"
PREFILL_TOKENS: Final = 2000
"""Of the prompts of a rate that is given without theirs: as short as in published ones."""
FABRICS: Final = ("none", "ecmp", "spray")
SPINES_MAX: Final = 256
LOSS_MAX: Final = 0.1
NOISE_MAX: Final = 0.95
AGENT_DIRECTORY_CACHE: Final = 64 << 20
"""Of an agent that is not configured otherwise."""
DIRECTORY_CACHES_MAX: Final = 1 << 30
"""Of all agents of a simulated pod together."""
TOKENS_S_LEAST, TOKENS_S_MOST = 1e-6, 1e15
"""A second, of a GPU that computes or generates."""
FAULT_EVERY_LEAST: Final = 0.01
"""Seconds between two faults: with less, a run would hardly come to its end."""


@dataclass(frozen=True, slots=True)
class PodPlan:
    """A pod, its rates, and what goes wrong in it."""

    gpus: int = 4
    gpus_per_host: int = 4
    enclosures: int = 1
    drives: int = 32
    """In each enclosure."""
    drive_bytes: int = 15_360_000_000_000
    tenants: int = 1
    workers: int = 8
    """Of each host's agent: so many operations are under way at once."""
    bytes_per_token: int = 35_136
    drive_read: float = 14e9
    drive_write: float = 7e9
    drive_writes_a_day: float = 1.0
    """Of its capacity, for the time of its warranty."""
    drive_latency: float = 80e-6
    drive_tail: float = 1e-3
    """One read in a hundred takes up to so much longer."""
    enclosure_nic: float = 400e9
    host_nic: float = 100e9
    gpu_pcie: float = 64e9
    """Of each GPU."""
    network_latency: float = 10e-6
    prefill_rate: float = 26_156.0
    """Tokens a second of one GPU, over prompts of `prefill_tokens`."""
    prefill_tokens: int = PREFILL_TOKENS
    prefill_cost: PrefillCost | None = None
    """How the rate falls with the length of the context; None: not at all."""
    decode_rate: float = 13_386.0
    g1_bytes: int = 40 << 30
    """Room for cache in each GPU's memory."""
    g2_bytes: int = 256 << 30
    """Room for cache in each host's memory."""
    g3_bytes: int = 16_000_000_000_000
    """A host's own SSDs, in the row `g3`."""
    g3_rate: float = 28e9
    g4_rate: float = 0.0
    """Shared storage behind the pool; 0: none. The rows `g4` and `g35+g4` need it."""
    directory_cache: int = 4 << 20
    """What each agent remembers of directories."""
    directory_fresh: float = 0.0
    """For how long an agent believes a remembered directory that a key is absent; see its configuration."""
    read_deadline: float = 0.05
    write_deadline: float = 5.0
    overlap: bool = True
    """Loading begins when a request arrives, and not when its GPU is free."""
    prestage: str = ""
    """Without `overlap`: whether blocks that were found are announced to the agent when their request arrives
    (`announced`), or the agent guesses what follows a block that is read (`learned`)."""
    prestage_bytes: int = 4 << 30
    """Of an agent's memory, for what is prestaged."""
    copies: int = 1
    """Of each value: 2 in two enclosures, where there are two."""
    hedges: bool = True
    """Of two copies, the other is asked where the first is slow."""
    on_kv: bool = False
    """The volumes lie on KV namespaces."""
    gate: bool = False
    """The recompute gate: off, as in an agent that is not configured otherwise."""
    faults: tuple[str, ...] = ()
    fault_every: float = 5.0
    fabric: str = "none"
    """Between the NICs: `none`, or a leaf-spine that hashes flows (`ecmp`) or sprays packets (`spray`)."""
    spines: int = 18
    hosts_per_leaf: int = 18
    enclosures_per_leaf: int = 4
    oversubscription: float = 1.0
    """How much more a leaf's ports carry than its links to the spines."""
    ecn: bool = False
    """Switches mark packets, and DCQCN controls the flows' rates."""
    loss: float = 0.0
    """Part of the packets that one link loses."""
    noise: float = 0.0
    """Part of all links between leaves and spines that a neighbour takes."""

    def __post_init__(self) -> None:
        counts = {
            "GPUs": (self.gpus, GPUS_MAX), "GPUs of a host": (self.gpus_per_host, 64),
            "enclosures": (self.enclosures, ENCLOSURES_MAX), "drives": (self.drives, DRIVES_MAX),
            "tenants": (self.tenants, TENANTS_MAX), "workers": (self.workers, 256),
            "tokens of a rate's prompts": (self.prefill_tokens, 1 << 30),
            "bytes of a token": (self.bytes_per_token, 1 << 20), "spines": (self.spines, SPINES_MAX),
            "hosts of a leaf": (self.hosts_per_leaf, 1024),
            "enclosures of a leaf": (self.enclosures_per_leaf, 1024),
        }  # fmt: skip
        for name, (count, most) in counts.items():
            if not 1 <= count <= most:
                raise UserError(f"a pod has 1 to {most:,} {name}, not {count:,}", "give a number in between")
        if self.enclosures * self.drives > DRIVES_IN_ALL_MAX:
            raise UserError(
                f"{self.enclosures * self.drives:,} drives in all are more than {DRIVES_IN_ALL_MAX:,}",
                "simulate a part of the pod: halve --gpus, --enclosures and --requests alike",
            )
        rates = {
            "--drive-read": self.drive_read, "--drive-write": self.drive_write,
            "--enclosure-nic": self.enclosure_nic, "--host-nic": self.host_nic, "--gpu-pcie": self.gpu_pcie,
            "--prefill-rate": self.prefill_rate, "--decode-rate": self.decode_rate,
        }  # fmt: skip
        times = {
            "--drive-latency-ms": self.drive_latency, "--drive-tail-ms": self.drive_tail,
            "--read-deadline-ms": self.read_deadline, "--directory-fresh-ms": self.directory_fresh,
        }  # fmt: skip
        for name, rate in {**rates, **times, "--fault-every": self.fault_every}.items():
            if math.isnan(rate):
                raise UserError(f"{name}: {rate} is no number", "give one")
        if not FAULT_EVERY_LEAST <= self.fault_every < float("inf"):
            raise UserError(
                f"faults cannot come every {self.fault_every:g} s", f"give {FAULT_EVERY_LEAST} s or more"
            )
        for name, rate in rates.items():
            if rate <= 0:
                raise UserError(f"{name} of {rate:g} carries nothing", "give a rate above zero")
        for name in ("--prefill-rate", "--decode-rate"):
            if not TOKENS_S_LEAST <= rates[name] <= TOKENS_S_MOST:
                raise UserError(
                    f"{name}: {rates[name]:g} is not from {TOKENS_S_LEAST:g} to {TOKENS_S_MOST:g}",
                    "give a rate in between",
                )
        if self.gpus % self.gpus_per_host:
            raise UserError(
                f"{self.gpus} GPUs are no whole hosts of {self.gpus_per_host}", "see --gpus-per-host"
            )
        for fault in self.faults:
            if fault not in FAULTS:
                known, near = ", ".join(FAULTS), did_you_mean(fault, (*FAULTS, ALL_FAULTS))
                raise UserError(
                    f"no fault {fault!r}{near}",
                    f"there are {known}, or {ALL_FAULTS} of them",
                )

        if self.on_kv and (self.tenants > 1 or {"join", "leave"} & set(self.faults)):
            raise UserError(
                "on KV namespaces a volume has its drives to itself, and the map does not change",
                "leave out the row g35-kv, or --tenants and the faults join and leave",
            )
        self._check_fabric()

    def _check_fabric(self) -> None:
        if self.fabric not in FABRICS:
            known = ", ".join(FABRICS)
            raise UserError(
                f"no fabric {self.fabric!r}{did_you_mean(self.fabric, FABRICS)}", f"there are {known}"
            )
        for name, part, most in (("--loss", self.loss, LOSS_MAX), ("--noise", self.noise, NOISE_MAX)):
            if not 0 <= part <= most:
                raise UserError(f"{name}: {part:g} is not from 0 to {most:g}", "give a part in between")
        if not 1 <= self.oversubscription <= 64:
            raise UserError(
                f"--oversubscription: {self.oversubscription:g} is not from 1 to 64", "give 1 for none"
            )
        if self.fabric == "none" and (self.ecn or self.loss or self.noise):
            raise UserError(
                "--ecn, --loss and --noise are matters of a fabric", "give --fabric ecmp or --fabric spray"
            )

    def prefill_seconds(self, tokens: int, cached: int = 0) -> float:
        """Of one GPU: to compute a prompt of so many tokens, whose first ones are found."""
        cost = self.prefill_cost
        if cost is None:
            return (tokens - cached) / self.prefill_rate
        measured = cost.flops(self.prefill_tokens) / self.prefill_tokens
        return (cost.flops(tokens) - cost.flops(cached)) / measured / self.prefill_rate

    @property
    def hosts(self) -> int:
        return self.gpus // self.gpus_per_host


def plan_of(
    tables: Tables,
    pod: str,
    model: str,
    kv: KvPrecision,
    gpu: str,
    *,
    computes: bool = True,
    **changes: object,
) -> PodPlan:
    """A pod by its name in the table of figures, for a model on a GPU, with other figures where they are not
    None. `computes`: the GPUs have to hold the model's weights. Raises UserError: with the nearest name, or
    where a rate was neither published nor given."""
    found = find("pod", pod, tables.pods)
    memory_gb = find("gpu", gpu, tables.gpus).dram_gb.value
    enclosure, rate = tables.enclosures[found.enclosure], tables.rates.get((model, gpu))
    decode = rate.decode_tokens_s if rate is not None else None
    figures: dict[str, Any] = {
        "gpus": int(found.gpus.value),
        "gpus_per_host": int(found.gpus_per_host.value),
        "enclosures": int(found.enclosures.value),
        "drives": int(enclosure.drives.value),
        "drive_bytes": round(enclosure.drive_tb.value * 1e12),
        "prefill_cost": cost_of(find("model", model, tables.models)),
        "prefill_tokens": None if rate is None else rate.context,
        "bytes_per_token": find("model", model, tables.models).stored_bytes_per_token(kv),
        "drive_read": enclosure.drive_read_gb_s.value * 1e9,
        "drive_write": enclosure.drive_write_gb_s.value * 1e9,
        "drive_writes_a_day": enclosure.drive_writes_a_day.value,
        "enclosure_nic": enclosure.nic_gb_s.value * 1e9,
        "host_nic": found.host_nic_gb_s.value * 1e9,
        "prefill_rate": None if rate is None else rate.tokens_s.value,
        "decode_rate": None if decode is None else decode.value,
    }
    figures |= {name: value for name, value in changes.items() if value is not None}
    if computes and figures["gpus"] > 0:
        tables.check_fit(model, gpu, figures["gpus"])
    if figures["prefill_tokens"] is None:
        figures["prefill_tokens"] = PREFILL_TOKENS
    # The rule of g35 claims: the memory of a server is room for cache.
    figures.setdefault("g2_bytes", round(memory_gb * 1e9) * figures["gpus_per_host"])
    hosts = max(1, figures["gpus"] // max(1, figures["gpus_per_host"]))
    figures.setdefault("directory_cache", min(AGENT_DIRECTORY_CACHE, DIRECTORY_CACHES_MAX // hosts))
    for name, option in (("prefill_rate", "--prefill-rate"), ("decode_rate", "--decode-rate")):
        if figures[name] is None:
            raise UserError(
                f"the table has no {name.replace('_', ' ')} of {model} on {gpu}",
                f"give {option}, in tokens a second of one GPU",
            )
    return PodPlan(**figures)


def block_values(plan: PodPlan, block_tokens: int) -> tuple[int, int]:
    """How many values a block is striped over, and the bytes of one, a multiple of the LBA."""
    whole = plan.bytes_per_token * block_tokens
    values = -(-whole // SLOT_VALUE_MAX)
    return values, -(-whole // values // 4096) * 4096


def sets_of_a_drive(plan: PodPlan, values: int, set_bytes: int) -> int:
    """Sets of one tenant's volume on each drive. Raises UserError where a drive has no room for one."""
    sets = plan.drive_bytes // (set_bytes * values * plan.tenants)
    if not sets:
        drive, needed = readable_bytes(plan.drive_bytes), readable_bytes(set_bytes * values)
        raise UserError(
            f"a drive of {drive} has no room for a set of {needed}",
            "give larger drives (--drive-size), or fewer --tenants",
        )
    return min(sets, (1 << 40) // set_bytes * 1024)


def changed(plan: PodPlan, **changes: object) -> PodPlan:
    """The plan with other figures; None leaves one as it is."""
    return replace(plan, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
