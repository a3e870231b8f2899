"""`g35 bench --profile`: where the processor time of a get or put goes, by process and by kind of thread.

What the kernel tells divides a thread's time into user, kernel, in the queue for a processor, and asleep.
User time is divided once more: the cipher works outside the interpreter's lock. It is not watched but
reckoned, by the bytes that were moved and what our library takes for as many on this machine, measured before
and after. The rest of the user time is Python's own. It holds the interpreter's lock, so no second thread of
the process can do such work at the same time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.bench.meter import ThreadMeter
from agent.bench.names_and_units import Entry
from agent.bench.pool_probes import GetProbe, PutProbe
from agent.bench.probe_table import probe_for
from agent.bench.processor_time import Usage
from agent.bench.redis_pipelines import PipelineProbe
from agent.bench.redis_probes import RedisProbe
from agent.bench.rounds import WARM_UP_SECONDS, Probe, metered
from agent.bench.sites import Sites
from agent.bench.work_floors import CipherPart
from agent.errors import G35Error

PROFILED = ("kv_get_1m", "kv_put_1m", "kv_get_64k_b32", "kv_put_64k_b32")
"""Where no name is given."""
WITH_A_CIPHER = "agent"
UNIT_BYTES = 1 << 20
"""The cipher's calls are as long as the value, and no longer than this."""
CIPHER_SECONDS = 0.2
LEAST_SHARE = 0.001
"""Kinds of threads that used less of all processor time are shown as one."""
OTHERS = "others"
COLUMNS = ("lock", "cipher", "kernel", "queue", "waiting")
"""The times of a `Share`."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one process, or one kind of its threads, took for a value, in microseconds."""

    name: str
    threads: int
    lock: float
    cipher: float
    kernel: float
    queue: float
    waiting: float
    """Asleep, summed over its threads: for an answer, for work, or for the interpreter's lock."""

    @property
    def processor(self) -> float:
        return self.lock + self.cipher + self.kernel


@dataclass(frozen=True, slots=True)
class Profile:
    """Of one name. `processes` are as a request reaches them, each with its kinds of threads."""

    entry: Entry
    values: int
    seconds: float
    processes: Sequence[tuple[Share, Sequence[Share]]]

    @property
    def processor(self) -> float:
        """Microseconds a value, of all processes."""
        return sum(whole.processor for whole, _ in self.processes)


def can_profile(entry: Entry) -> bool:
    """Whether its client is this process, and what serves it is known."""
    return entry.kind.startswith(("kv_", "redis_"))


def profiles(
    entries: Sequence[Entry], seconds: float, folder: Path, said: Callable[[str, float], None]
) -> list[Profile]:
    """Of these entries, each of `seconds`. Raises G35Error, and NotHere where a part cannot be had."""
    found = []
    with Sites(folder) as sites:
        for number, entry in enumerate(entries):
            said(f"preparing {entry.name}", number / len(entries))
            probe = probe_for(entry, sites)
            probe.prepare()
            said(entry.name, (number + 0.5) / len(entries))
            found.append(_profile(entry, probe, sites, seconds))
        troubles = [line for site in sites.pools.values() for line in site.complaints()]
    if troubles:
        raise G35Error("; ".join(troubles))
    return found


def _profile(entry: Entry, probe: Probe, sites: Sites, seconds: float) -> Profile:
    probe.round(min(seconds, WARM_UP_SECONDS))
    cipher = _cipher(entry, probe)
    rates = [cipher.measure(CIPHER_SECONDS)["cipher"]] if cipher else []
    meter = ThreadMeter(_serving(probe, sites))
    with metered(meter):
        ran = probe.round(seconds)
    if cipher:
        rates.append(cipher.measure(CIPHER_SECONDS)["cipher"])
    values = ran.bytes // entry.value_bytes
    if not values or not meter.parts:
        raise G35Error(f"{entry.name}: no value was moved, so its processor time is not known")
    # Of the two the smaller: the other was disturbed more.
    calls = entry.value_bytes / min(entry.value_bytes, UNIT_BYTES)
    sealed = min(rates) * calls * values / 1e6 if rates else 0.0
    return Profile(entry, values, ran.seconds, shares(meter.usage, values, ran.seconds, sealed))


def _cipher(entry: Entry, probe: Probe) -> CipherPart | None:
    """What measures the cipher of its values, where they are sealed."""
    if not isinstance(probe, GetProbe | PutProbe):
        return None
    part = CipherPart(min(entry.value_bytes, UNIT_BYTES), opens=isinstance(probe, GetProbe))
    part.prepare()
    return part


def _serving(probe: Probe, sites: Sites) -> dict[str, int]:
    if isinstance(probe, GetProbe | PutProbe):
        return sites.pool(probe.shape).processes()
    assert isinstance(probe, RedisProbe | PipelineProbe)
    return {"redis-server": sites.redis.pid}


def shares(
    usage: Mapping[str, Mapping[str, Usage]], values: int, seconds: float, cipher_seconds: float
) -> list[tuple[Share, list[Share]]]:
    """Microseconds a value, by process and kind of thread.

    The cipher's are those of the agent's threads that used the most user time: they open and seal.
    """
    all_used = sum(kind.processor for kinds in usage.values() for kind in kinds.values())
    found = []
    for process, kinds in usage.items():
        busiest = max(kinds, key=lambda kind: kinds[kind].user, default="")
        shown: dict[str, Usage] = {}
        for kind, used in kinds.items():
            name = kind if used.processor >= LEAST_SHARE * all_used else OTHERS
            shown[name] = used if name not in shown else _both(shown[name], used)
        parts = [
            _share(
                kind, used, values, seconds,
                cipher_seconds if process == WITH_A_CIPHER and kind == busiest else 0.0,
            )
            for kind, used in sorted(shown.items(), key=lambda item: (item[0] == OTHERS, -item[1].processor))
        ]  # fmt: skip
        found.append((_sum(process, parts), parts))
    return found


def _both(one: Usage, other: Usage) -> Usage:
    """Of the threads of two kinds."""
    sum_of = one.plus(other)
    sum_of.threads = one.threads + other.threads
    return sum_of


def _share(name: str, used: Usage, values: int, seconds: float, cipher_seconds: float) -> Share:
    each = 1e6 / values
    cipher = min(cipher_seconds, used.user)
    asleep = max(0.0, used.threads * seconds - used.processor - used.queued)
    return Share(
        name, used.threads, (used.user - cipher) * each, cipher * each, used.kernel * each,
        used.queued * each, asleep * each,
    )  # fmt: skip


def _sum(name: str, parts: Sequence[Share]) -> Share:
    return Share(
        name,
        sum(part.threads for part in parts),
        *(sum(getattr(part, column) for part in parts) for column in COLUMNS),
    )
