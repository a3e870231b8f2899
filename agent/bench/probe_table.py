"""From a name of names_and_units.py to the probe that measures it."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from agent.bench.client_process import LineClient, cost, speed
from agent.bench.fixed_load import LoadProbe
from agent.bench.floors import AesProbe, FuseMemoryProbe, RawTcpProbe
from agent.bench.long_file_probes import KernelReadProbe, LongFileProbe
from agent.bench.names_and_units import Entry
from agent.bench.over_floor import PATHS, OverFloorProbe
from agent.bench.pool_probes import GetProbe, PutProbe, puts_at_a_time, shape_for, values_got
from agent.bench.prestage_probes import PrestagedProbe
from agent.bench.redis_pipelines import PIPELINED, PipelineProbe
from agent.bench.redis_probes import RedisProbe
from agent.bench.rounds import Probe, Sample
from agent.bench.shared_probes import FileProbe
from agent.bench.sites import PoolShape, Sites
from agent.bench.virtiofs_probes import MOUNT, VIRTIOFS, ClientProbe, FileCpuProbe
from agent.errors import G35Error

SLOT_BYTES_MIN = 1 << 16
"""A volume has no smaller slots."""
SECONDS_MIN = 0.5
"""Two processes and a connection are set up each time; less would measure little else."""


def _peer(peer: str, verb: str) -> Callable[[Sites, Entry], Probe]:
    return lambda sites, entry: PeerProbe(sites, peer, verb, entry.value_bytes, entry.in_flight)


def _redis(verb: str, *, median_only: bool = False) -> Callable[[Sites, Entry], Probe]:
    return lambda sites, entry: RedisProbe(
        sites, verb, entry.value_bytes, tls=entry.tls,
        clients=1 if median_only else entry.in_flight, median_only=median_only,
    )  # fmt: skip


def _one_get(sites: Sites, shape: PoolShape) -> Probe:
    return GetProbe(sites, shape, batch=1, in_flight=1, median_only=True)


def _batches(probe: type[GetProbe | PutProbe], sites: Sites, entry: Entry) -> Probe:
    shape = shape_for(max(entry.value_bytes, SLOT_BYTES_MIN))
    return probe(sites, shape, batch=PIPELINED, registered=True, value_bytes=entry.value_bytes)


def _file(folder: str, verb: str, *, direct: bool = True) -> Callable[[Sites, Entry], Probe]:
    return lambda sites, entry: FileProbe(sites, folder, verb, entry.value_bytes, direct)


PROBES: Mapping[str, Callable[[Sites, Entry], Probe]] = {
    "raw_tcp": lambda sites, entry: RawTcpProbe(sites, entry.value_bytes),
    "fuse_memory": lambda sites, entry: FuseMemoryProbe(sites, entry.value_bytes),
    "aes": lambda sites, entry: AesProbe(entry.value_bytes),
    "kv_get": lambda sites, entry: GetProbe(sites, shape_for(entry.value_bytes, entry.door, entry.transport)),
    "kv_get_single": lambda sites, entry: GetProbe(sites, shape_for(entry.value_bytes), batch=1),
    "kv_put": lambda sites, entry: PutProbe(sites, shape_for(entry.value_bytes, entry.door)),
    "kv_get_p50": lambda sites, entry: _one_get(sites, shape_for(entry.value_bytes)),
    "kv_get_asleep_p50": lambda sites, entry: _one_get(
        sites, replace(shape_for(entry.value_bytes), stay_awake="never")
    ),
    "roce": lambda sites, entry: RoceProbe(entry.name, entry.unit),
    "virtiofs_get": lambda sites, entry: ClientProbe(sites, VIRTIOFS, entry.value_bytes, "get", speed),
    "virtiofs_put": lambda sites, entry: ClientProbe(sites, VIRTIOFS, entry.value_bytes, "put", speed),
    "host_cpu_mount": lambda sites, entry: ClientProbe(sites, MOUNT, entry.value_bytes, "get", cost),
    "host_cpu_virtiofs": lambda sites, entry: ClientProbe(sites, VIRTIOFS, entry.value_bytes, "get", cost),
    "host_cpu_file": lambda sites, entry: FileCpuProbe(sites, entry.value_bytes),
    "kv_get_in_flight": lambda sites, entry: GetProbe(
        sites, shape_for(entry.value_bytes), batch=1, in_flight=entry.in_flight, registered=True
    ),
    "kv_put_in_flight": lambda sites, entry: PutProbe(
        sites, shape_for(entry.value_bytes), batch=1, in_flight=entry.in_flight, registered=True
    ),
    "kv_get_batch": lambda sites, entry: _batches(GetProbe, sites, entry),
    "kv_put_batch": lambda sites, entry: _batches(PutProbe, sites, entry),
    "get_load": LoadProbe,
    "redis_get_batch": lambda sites, entry: PipelineProbe(sites, "get", entry.value_bytes),
    "redis_put_batch": lambda sites, entry: PipelineProbe(sites, "put", entry.value_bytes),
    **{f"over_floor {path}": lambda sites, entry: OverFloorProbe(sites, entry) for path in PATHS},
    "prestaged_get_in_flight": lambda sites, entry: PrestagedProbe(
        sites, shape_for(entry.value_bytes), entry.in_flight
    ),
    **{
        f"{name}_{verb}": _file(folder, verb)
        for name, folder in (("by_path", "kv/kv"), ("shared", "shared/shared"))
        for verb in ("get", "put")
    },
    **{f"shared_{verb}_cached": _file("shared/shared", verb, direct=False) for verb in ("get", "put")},
    "fuse_memory_cached": lambda sites, entry: KernelReadProbe(sites, "read", entry.value_bytes),
    "fs_read": lambda sites, entry: LongFileProbe(sites, "read", entry.value_bytes),
    "fs_read_direct": lambda sites, entry: LongFileProbe(sites, "read", entry.value_bytes, direct=True),
    "fs_write": lambda sites, entry: LongFileProbe(sites, "write", entry.value_bytes),
    **{f"redis_{verb}{how}": _redis(verb) for verb in ("get", "put") for how in ("", "_in_flight")},
    "redis_get_p50": _redis("get", median_only=True),
    **{
        f"{peer}_{verb}_in_flight": _peer(peer, verb)
        for peer in ("mooncake", "lm")
        for verb in ("get", "put")
    },
}
"""By `Entry.kind`; what is not here is counted once (single_probes.py)."""


def probe_for(entry: Entry, sites: Sites) -> Probe:
    return PROBES[entry.kind](sites, entry)


class PeerProbe:
    """`verb` is "get" or "put"; one value a call, so many calls in flight."""

    def __init__(self, sites: Sites, peer: str, verb: str, value_bytes: int, in_flight: int) -> None:
        self._sites, self._peer, self._verb = sites, peer, verb
        self._bytes, self._in_flight = value_bytes, in_flight
        self._client: LineClient

    def prepare(self) -> None:
        self._client = self._sites.peer(self._peer)
        values, puts = values_got(self._bytes), puts_at_a_time(self._bytes)
        self._client.ask("prepare", bytes=self._bytes, values=values, puts=puts)

    def round(self, seconds: float) -> Sample:
        return speed(self._client.ask(self._verb, seconds, bytes=self._bytes, in_flight=self._in_flight))


class RoceProbe:
    """One record of the emulator's benchmark, by its name."""

    def __init__(self, name: str, unit: str) -> None:
        self._name, self._unit = name, unit

    def prepare(self) -> None:
        """Nothing: the program starts what it needs, and compares contents, in every round."""

    def round(self, seconds: float) -> Sample:
        command = [sys.executable, "-P", "-m", "emulator.roce.bench"]
        command += ["--seconds", str(max(seconds, SECONDS_MIN)), self._name]
        began = time.perf_counter()
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        took = time.perf_counter() - began
        try:
            record = json.loads(ran.stdout)
            value, unit = float(record["value"]), record["unit"]
        except (ValueError, KeyError, TypeError):
            raise G35Error(f"{self._name} was not measured: {ran.stderr.strip() or ran.stdout!r}") from None
        if unit != self._unit:
            raise G35Error(f"{self._name} came in {unit}, not in {self._unit}")
        return Sample(value, 1, 0, took)
