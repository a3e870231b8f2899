"""What an engine's connector is told: the same keys in the JSON of each engine, and more for vLLM's tier."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from host_shim.control_wire import VOLUME_NAME_BYTES_MAX

TTL_SECONDS_MAX = (1 << 32) - 1
DEADLINE_SECONDS_MAX = 3600.0
POOLS_MAX = 64


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """Options of a connector. A value that makes no sense raises ValueError as the engine starts."""

    mount: str
    """Where the pool is mounted."""
    volume: str = "kv"
    """Volume of kind `kv`, with slots at least 64 bytes longer than the engine's blocks."""
    threads: int = 4
    """Tasks of each direction (load, store) that are under way at a time."""
    parallel: int = 4
    """Transfers that one task has under way at a time."""
    ttl: float | None = None
    """Seconds after which blocks expire; None: as the volume says."""
    prestage: bool = True
    """Whether a lookup brings what it found into the agent's memory."""

    def __post_init__(self) -> None:
        if not self.mount or not isinstance(self.mount, str):
            raise ValueError('g35: the option "mount" names the folder where the pool is mounted')
        if not _is_volume_name(self.volume):
            raise ValueError(f'g35: "volume" is a volume\'s name, and not {self.volume!r}')
        for name, count in (("threads", self.threads), ("parallel", self.parallel)):
            if type(count) is not int or not 1 <= count <= 64:
                raise ValueError(f'g35: "{name}" is a whole number from 1 to 64, and not {count!r}')
        if self.ttl is not None:
            checked_seconds("ttl", self.ttl, TTL_SECONDS_MAX, "; without it, the volume decides")
        if not isinstance(self.prestage, bool):
            raise ValueError(f'g35: "prestage" is true or false, and not {self.prestage!r}')

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """Options out of JSON. Unknown keys raise ValueError: a typing error must not go unseen."""
        known = sorted(field.name for field in fields(cls))
        unknown = sorted(set(found) - set(known))
        if unknown:
            near = [name for each in unknown for name in difflib.get_close_matches(each.lower(), known, 1)]
            meant = f"; did you mean {', '.join(near)}?" if near else ""
            raise ValueError(
                f"g35: unknown options {', '.join(unknown)}; there are {', '.join(known)}{meant}"
            )
        if "mount" not in found:
            raise ValueError('g35: the option "mount" is missing')
        return cls(**found)


def _has_port(address: str) -> bool:
    """Whether an address of ZeroMQ ends in a port that there is; `*` is any that is free."""
    port = address.rpartition(":")[2]
    return port == "*" or (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65535)


@dataclass(frozen=True, slots=True)
class PublisherOptions(ConnectorOptions):
    """Options of a connector that publishes events itself: SGLang's and LMCache's."""

    events: str = ""
    """Where events are published, as ZeroMQ has it (`tcp://*:5557`); empty: nowhere."""
    events_topic: str = ""

    def __post_init__(self) -> None:
        ConnectorOptions.__post_init__(self)
        for name, text in (("events", self.events), ("events_topic", self.events_topic)):
            if not isinstance(text, str):
                raise ValueError(f'g35: "{name}" is a text, and not {text!r}')
        if self.events and "://" not in self.events:
            raise ValueError(f'g35: "events" is an address such as tcp://*:5557, and not {self.events!r}')
        if self.events.startswith("tcp://") and not _has_port(self.events):
            raise ValueError(f'g35: "events" ends in a port, 1 to 65535; there is none in {self.events!r}')


@dataclass(frozen=True, slots=True)
class HiCacheOptions(PublisherOptions):
    """Options of SGLang's back-end."""

    pools: Mapping[str, str] = field(default_factory=dict)
    """Volumes for pools of hybrid models, by SGLang's names of the pools; all others are in `volume`."""

    def __post_init__(self) -> None:
        PublisherOptions.__post_init__(self)
        pools: Any = self.pools
        good = isinstance(pools, Mapping) and len(pools) <= POOLS_MAX and "kv" not in pools
        if not good or not all(_is_volume_name(each) for pair in pools.items() for each in pair):
            raise ValueError(
                "g35: \"pools\" has a volume's name for names of SGLang's pools, such as "
                f'{{"indexer": "small"}}, {POOLS_MAX} at most, and none for "kv", whose volume is "volume"; '
                f"not {pools!r}"
            )


@dataclass(frozen=True, slots=True)
class TierOptions(ConnectorOptions):
    """Options of vLLM's tier. Those of jobs are seconds."""

    namespace: str = ""
    """Keeps apart what vLLM would take for the same: a tenant, other weights under one name."""
    lookup_deadline: float = 0.25
    load_deadline: float = 5.0
    store_deadline: float = 30.0
    locality: str = "REMOTE"
    """What vLLM publishes of the tier."""
    enable_kv_events: bool = False
    """Whether vLLM gets events of the tier to publish, where its own events are on."""

    def __post_init__(self) -> None:
        ConnectorOptions.__post_init__(self)
        for name in ("lookup_deadline", "load_deadline", "store_deadline"):
            checked_seconds(name, getattr(self, name), DEADLINE_SECONDS_MAX)
        if not isinstance(self.namespace, str):
            raise ValueError(f'g35: "namespace" is a text, and not {self.namespace!r}')
        if not isinstance(self.enable_kv_events, bool):
            raise ValueError(f'g35: "enable_kv_events" is true or false, and not {self.enable_kv_events!r}')


def _is_volume_name(found: Any) -> bool:
    """An engine's configuration may have anything there."""
    return isinstance(found, str) and 0 < len(found.encode()) <= VOLUME_NAME_BYTES_MAX


def checked_seconds(name: str, found: Any, most: float, more: str = "") -> None:
    """Raise ValueError for what is no time in seconds above 0 and up to `most`."""
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found <= most:
        raise ValueError(
            f'g35: "{name}" is a number of seconds, above 0 and up to {most:g}{more}; not {found!r}'
        )
