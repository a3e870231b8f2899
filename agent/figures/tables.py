"""The table of figures: models, GPUs, published rates, enclosures and pods, as checked records.

`figures.toml` has what comes along. A user's file of the same form adds records or replaces whole ones.
Unknown keys are refused, and each figure has a source and a date. Units stand in the names; GB and TB are
decimal.
"""

import datetime
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from agent.config.document_problems import checked, toml_in
from agent.errors import NAME_SHOWN_MAX, ConfigError, UserError, did_you_mean, shown_name

OWN_TABLES = Path(__file__).with_name("figures.toml")
KvPrecision = Literal["bf16", "fp8"]
ELEMENT_BYTES: Mapping[KvPrecision, int] = {"bf16": 2, "fp8": 1}
_LATEST_CONTEXT = 131_072
"""Tokens over which a window that does not grow is spread, where nobody names a context."""


def _measurable(value: float) -> float:
    """Checked by itself, so that zero is told as zero."""
    if value < _LEAST:
        raise ValueError(f"should be at least {_LEAST:g}")
    return value


def _printed(text: str) -> str:
    if not text.isprintable():
        raise ValueError("should have printable characters alone, in one line")
    return text


def _of_the_calendar(date: str) -> str:
    """A month, or a day. Raises ValueError for one that no calendar has."""
    try:
        datetime.date.fromisoformat(date if date.count("-") == 2 else f"{date}-01")
    except ValueError:
        raise ValueError("should be a month or a day of the calendar: YYYY-MM or YYYY-MM-DD") from None
    return date


_LEAST = 1e-9
"""Of any figure: products and quotients of several stay numbers."""
Positive = Annotated[float, Field(gt=0, lt=1e15, allow_inf_nan=False), AfterValidator(_measurable)]
Count = Annotated[int, Field(gt=0, lt=1 << 40)]
Source = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printed)]
Date = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}(-[0-9]{2})?$"), AfterValidator(_of_the_calendar)]
SharedBy = Annotated[int, Field(gt=0, le=4096)]
"""Tokens that share an entry: no more than the shortest prompt of the tables of `g35 claims`."""


def _few(kinds: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Checked behind the rows, so that a wrong row is told alone."""
    if not 1 <= len(kinds) <= _KINDS_OF_LAYERS_MAX:
        raise ValueError(
            f"should have 1 to {_KINDS_OF_LAYERS_MAX} rows: [layers, tokens that share an entry]"
        )
    return kinds


_KINDS_OF_LAYERS_MAX = 8
Layers = Annotated[tuple[tuple[Count, SharedBy], ...], AfterValidator(_few)]
R = TypeVar("R", bound="_Record")


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Figure(_Record):
    """One number, where it was read, and when (YYYY-MM)."""

    value: Positive
    source: Source
    date: Date


def _whole(figure: Figure) -> Figure:
    if not figure.value.is_integer():
        raise ValueError(f"a count is a whole number, not {figure.value:g}")
    return figure


def _share(figure: Figure) -> Figure:
    if figure.value > 1:
        raise ValueError(f"a share is at most 1, not {figure.value:g}")
    return figure


Whole = Annotated[Figure, AfterValidator(_whole)]
Share = Annotated[Figure, AfterValidator(_share)]


class Parameters(_Record):
    """Billions of parameters: all, and those that one token uses."""

    total: Positive
    active: Positive

    @model_validator(mode="after")
    def _uses_no_more_than_all(self) -> "Parameters":
        if self.active > self.total:
            raise ValueError(
                f"a token uses {self.active:g} of {self.total:g} billion: active is more than all"
            )
        return self


class Window(_Record):
    """Layers that keep the last tokens alone."""

    tokens: Count
    layers: Count


class Indexer(_Record):
    """What chooses the `top_k` entries that a token attends to: its own cache, and its heads."""

    elements: Count
    heads: Count
    top_k: Count
    layers: Layers
    bytes: Positive | None = None
    """Of one element; None: as the other elements of the cache."""


class Model(_Record):
    """A model: what its cache weighs and what a prefill costs, from its own `config.json`."""

    source: Source
    date: Date
    layers: Layers
    """(How many, tokens that share one entry) for each kind of layer with full attention."""
    heads: Count
    kv_heads: Count | None = None
    head_dim: Count | None = None
    latent: Count | None = None
    qk_dim: Count | None = None
    v_dim: Count | None = None
    bf16_elements: int = Field(0, ge=0, lt=1 << 20)
    """Of an entry: those that engines store in bfloat16 whatever the precision."""
    window: Window | None = None
    indexer: Indexer | None = None
    parameters: Parameters | None = None

    @model_validator(mode="after")
    def _has_an_entry(self) -> "Model":
        grouped = self.kv_heads is not None and self.head_dim is not None
        if grouped == (self.latent is not None):
            raise ValueError("needs either kv_heads and head_dim, or latent, qk_dim and v_dim")
        if not grouped and (self.qk_dim is None or self.v_dim is None):
            raise ValueError("needs qk_dim and v_dim beside latent")
        return self

    @property
    def entry_elements(self) -> int:
        """Of one layer, for one token or for those that share an entry."""
        return self.latent or 2 * (self.kv_heads or 0) * (self.head_dim or 0)

    def bytes_per_token(self, kv: KvPrecision, context: int = _LATEST_CONTEXT) -> float:
        """KV bytes of a token, window and indexer included, spread over `context` tokens.

        Every element takes the bytes of the precision, as calculators of cache sizes count.
        """
        element, entry = ELEMENT_BYTES[kv], self.entry_elements
        whole = sum(count * (context // ratio) for count, ratio in self.layers) * entry * element
        if self.window is not None:
            whole += self.window.layers * self.window.tokens * entry * element
        if self.indexer is not None:
            entries = sum(count * (context // ratio) for count, ratio in self.indexer.layers)
            return (whole + entries * self.indexer.elements * (self.indexer.bytes or element)) / context
        return whole / context

    def stored_bytes_per_token(self, kv: KvPrecision) -> int:
        """What an engine stores for a token, rounded up by layers, `bf16_elements` in two bytes.

        Window and indexer are not counted: what does not grow with the prompt, and what is made anew.
        """
        entry = self.entry_elements * ELEMENT_BYTES[kv]
        if kv == "fp8":
            entry += self.bf16_elements
        return sum(-(-entry * count // ratio) for count, ratio in self.layers)

    @property
    def attention_width(self) -> int:
        """Multiply-adds of one layer for one token and one token that it attends to: heads x (d_qk + d_v)."""
        dim = self.head_dim or 0
        return self.heads * ((self.qk_dim or dim) + (self.v_dim or dim))


class Gpu(_Record):
    """A GPU with its share of the server or rack that it stands in."""

    fp8_tflops: Figure
    memory_gb: Figure
    dram_gb: Figure
    watts: Figure
    utilisation: Share


class Rate(_Record):
    """A published rate of one GPU: prefill over prompts of `context` tokens, and decode where it was told."""

    model: str
    gpu: str
    context: Count
    tokens_s: Figure
    decode_tokens_s: Figure | None = None


class Enclosure(_Record):
    """An enclosure. `drive_writes_a_day`: of its capacity, for the time of its warranty."""

    drives: Whole
    drive_tb: Figure
    drive_read_gb_s: Figure
    drive_write_gb_s: Figure
    drive_writes_a_day: Figure
    nic_gb_s: Figure
    watts: Figure

    @property
    def capacity_tb(self) -> float:
        return self.drives.value * self.drive_tb.value


class Pod(_Record):
    """GPUs, enclosures of one kind, and the shared storage (G4) behind them."""

    enclosure: str
    gpus: Whole
    enclosures: Whole
    gpus_per_host: Whole
    host_nic_gb_s: Figure
    host_dpu_watts: Figure
    g4_gb_s: Figure
    g4_watts_per_gb_s: Figure


class Host(_Record):
    """A server of another maker: what differs from the pod's own on the way to its accelerators."""

    gpus_per_host: Whole
    host_nic_gb_s: Figure
    gpu_pcie_gb_s: Figure


class Tables:
    """All records by name. Immutable after `load`."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.gpus: dict[str, Gpu] = {}
        self.enclosures: dict[str, Enclosure] = {}
        self.pods: dict[str, Pod] = {}
        self.hosts: dict[str, Host] = {}
        self.rates: dict[tuple[str, str], Rate] = {}

    def check_fit(self, model: str, gpu: str, gpus: int) -> None:
        """Raises UserError where so many GPUs have no room for the weights, in FP8. Of a model whose
        parameters were not published nothing is known."""
        parameters, memory_gb = self.models[model].parameters, self.gpus[gpu].memory_gb.value
        if parameters is not None and parameters.total > gpus * memory_gb:
            raise UserError(
                f"{model} has {parameters.total:,.0f} GB of weights in FP8, and {gpus:,} {gpu} have "
                f"{gpus * memory_gb:,.0f} GB",
                "choose a larger pod, or another GPU or model",
            )

    def add(self, document: Mapping[str, Any], where: str) -> None:
        """Add the records of a document. Raises ConfigError that names every wrong key."""
        kinds: dict[str, type[_Record]] = {
            "models": Model, "gpus": Gpu, "enclosures": Enclosure, "pods": Pod, "hosts": Host,
        }  # fmt: skip
        for key, section in document.items():
            if key == "rates" and isinstance(section, list):
                for number, row in enumerate(section, 1):
                    rate = _checked(Rate, row, f"{where}, rate {number}")
                    self.rates[rate.model, rate.gpu] = rate
            elif key in kinds and isinstance(section, dict):
                records = getattr(self, key)
                for name, row in section.items():
                    _check_name(name, f"{where}, [{key}.{shown_name(name)}]")
                    records[name] = _checked(kinds[key], row, f"{where}, [{key}.{name}]")
            elif key in kinds or key == "rates":
                raise ConfigError(f"{where}: {key} should be a table of tables", _ADVICE)
            else:
                raise ConfigError(
                    f"{where}: unknown key {shown_name(key)}{did_you_mean(key, [*kinds, 'rates'])}", _ADVICE
                )
        for model, gpu in self.rates:
            if model not in self.models or gpu not in self.gpus:
                known: Mapping[str, Any] = self.gpus if model in self.models else self.models
                kind, unknown = ("GPU", gpu) if model in self.models else ("model", model)
                near = did_you_mean(unknown, known)
                raise ConfigError(
                    f"{where}: a rate of the unknown {kind} {shown_name(unknown)}{near}", _ADVICE
                )
        for name, pod in self.pods.items():
            if pod.enclosure not in self.enclosures:
                near = did_you_mean(pod.enclosure, self.enclosures)
                raise ConfigError(
                    f"{where}: pod {name} has unknown enclosures {shown_name(pod.enclosure)}{near}", _ADVICE
                )


_ADVICE = "docs/claims.md shows the form of each record"


def _check_name(name: str, where: str) -> None:
    """Raises ConfigError for a name that tables and messages cannot show."""
    if not 1 <= len(name) <= NAME_SHOWN_MAX or not name.isprintable():
        raise ConfigError(f"{where}: a name has 1 to {NAME_SHOWN_MAX} printable characters", _ADVICE)


def _checked(kind: type[R], row: Any, where: str) -> R:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} should be a table", _ADVICE)
    return checked(row, kind, f"{where} is not usable", _ADVICE)


def load(more: Path | None = None) -> Tables:
    """The table that comes along, and a user's file on top of it. Raises ConfigError."""
    tables = Tables()
    tables.add(toml_in(OWN_TABLES), OWN_TABLES.name)
    if more is not None:
        tables.add(toml_in(more), str(more))
    return tables


T = TypeVar("T")


def find(kind: str, name: str, records: Mapping[str, T]) -> T:
    """The record of a name. Raises UserError that names the nearest and all known ones."""
    if name not in records:
        raise UserError(
            f"no {kind} {name!r}{did_you_mean(name, records)}; there are {', '.join(records)}",
            f"add the {kind} to a file for --data",
        )
    return records[name]


@functools.cache
def stored_token_bytes() -> Mapping[str, int]:
    """What a token takes in a store by the name that `g35 replay --model` takes: NAME in bf16, NAME-fp8."""
    found = {}
    for name, model in load().models.items():
        found[name] = model.stored_bytes_per_token("bf16")
        found[f"{name}-fp8"] = model.stored_bytes_per_token("fp8")
    return found
