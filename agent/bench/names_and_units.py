"""Which numbers there are: their names, units and floors. Scripts use the names; they don't change.

A name is made of what is measured and the size of its values. `kind` picks the probe (probe_table.py).
"""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

SIZES = MappingProxyType({"64k": 1 << 16, "1m": 1 << 20, "4m": 1 << 22})
BATCH_SIZES = MappingProxyType({"64k": 1 << 16, "16k": 1 << 14, "4k": 1 << 12})
"""Of values that move in batches."""
FILE_SIZES = MappingProxyType({"2m": 2 << 20, "16m": 16 << 20, "64m": 64 << 20})
"""Of files that are read and written whole, by path."""
LONG_FILE_SIZES = MappingProxyType({"1g": 1 << 30})
"""Of files that are read on and on by one thread."""
VALUE_BY_PATH = MappingProxyType({"2m": "2m", "16m": "16m", "64m": "16m"})
"""The value of /kv that a file of a size is compared with: 16 MiB is the longest."""

RATE, LATENCY, MICROSECONDS, RATIO, MEMORY = "GiB/s", "ms", "us", "ratio", "MiB"
CPU_COST = "s/GiB"
COPIES = "bytes/byte"
UNIT_SECONDS = "s"
OVER_FLOOR = "over_floor "
"""Begins the kind of each processor time over its floor."""
GOALS = MappingProxyType(
    {
        "get_1m_over_floor": 1.2,
        "put_1m_over_floor": 1.4,
        "get_1m_registered_over_floor": 1.2,
        "put_1m_registered_over_floor": 1.4,
        "get_64k_over_floor": 2.0,
    }
)
"""At most so many times the floor is the goal; a bench fails nowhere where it is more."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One number. `size` is bytes of a value; `door` and `tls` are set where they make a difference."""

    name: str
    kind: str
    unit: str
    what: str
    size: str = ""
    floor: str | None = None
    door: str = "fuse"
    tls: bool = False
    transport: str = "tcp"
    alone: bool = False
    """Measured once, on a pool of its own."""
    in_flight: int = 0
    """Operations under way at a time, where the name says so."""
    load: int = 0
    """Percent of the highest rate at which requests arrive, where the name says so."""
    by_name: bool = False
    """Measured only where it is asked for, by its name or a pattern of names."""

    @property
    def value_bytes(self) -> int:
        return (SIZES | BATCH_SIZES | FILE_SIZES | LONG_FILE_SIZES)[self.size]

    @property
    def in_rounds(self) -> bool:
        """Whether it is taken in rounds among the others, as speeds and costs are, not counted once."""
        timed = self.unit in (RATE, LATENCY, MICROSECONDS, CPU_COST) or self.kind.startswith(OVER_FLOOR)
        return timed and not self.alone


PEERS = MappingProxyType(
    {
        "kv": "/kv, one key a call",
        "mooncake": "Mooncake Store over TCP",
        "lm": "LMCache's lm:// server",
        "redis": "Redis",
        "redis_tls": "Redis over TLS",
    }
)
"""Stores that are measured side by side, `PEER_get_1m_x4`, and what to call them."""

PEERS_ASKED = frozenset({*(f"{peer}_get_1m_x4" for peer in PEERS), "kv_get_4m_x4", "mooncake_get_4m_x4"})
"""Those of their names that every bench measures; there are sixty."""


LOAD_SIZES, LOADS, LOADED = ("64k", "1m"), (30, 60, 90), ("kv", "redis")
"""Of gets under a fixed load: sizes, percent of the highest rate, and stores."""


def _entries() -> Iterable[Entry]:
    def of_sizes(name: str, kind: str, what: str, tls: bool = False) -> Iterable[Entry]:
        for size in SIZES:
            yield Entry(f"{name}_{size}", kind, RATE, what, size, f"raw_tcp_{size}", tls=tls)

    for size in SIZES:
        yield Entry(f"raw_tcp_{size}", "raw_tcp", RATE, "one loopback TCP stream, recv_into", size)
    for size in ("1m", "4m"):
        what = "reads through a mount from ready memory"
        yield Entry(f"fuse_memory_{size}", "fuse_memory", RATE, what, size)
    yield Entry("aes_1m", "aes", RATE, "AES-256-GCM opens 1 MiB in four units, one core", "1m")
    yield from of_sizes("kv_get", "kv_get", "/kv gets, AES on, four in flight")
    yield Entry("kv_get_1m_single", "kv_get_single", RATE, "the same, one key a call", "1m", "raw_tcp_1m")
    what = "the same by the reference door"
    yield Entry("kv_get_1m_pyfuse3", "kv_get", RATE, what, "1m", "raw_tcp_1m", "pyfuse3")
    yield from of_sizes("kv_put", "kv_put", "/kv puts, AES on, four in flight")
    yield Entry("kv_get_64k_p50_ms", "kv_get_p50", LATENCY, "/kv gets, one at a time", "64k")
    what = "the same, of an agent that lets processors sleep"
    yield Entry("kv_get_64k_asleep_p50_ms", "kv_get_asleep_p50", LATENCY, what, "64k")
    yield Entry("udp_gso", "roce", RATE, "bare UDP, bursts of 60 KiB by segmentation offload")
    for verb in ("write", "read"):
        what = f"RDMA {verb.upper()}, emulated NICs, two in flight"
        yield Entry(f"roce_{verb}_1m", "roce", RATE, what, "1m", "udp_gso")
    yield Entry("roce_send_64b_p50_us", "roce", MICROSECONDS, "half of a SEND of 64 bytes to and fro")
    what = "/kv gets over NVMe/RDMA on the emulated NICs"
    yield Entry("kv_get_1m_rdma", "kv_get", RATE, what, "1m", "kv_get_1m", transport="rdma")
    what = "/kv gets from a file of this machine in place"
    yield Entry("local_get_1m", "kv_get", RATE, what, "1m", "kv_get_1m", transport="local")
    for verb in ("get", "put"):
        what = f"/kv {verb}s by virtio-fs, Python driver"
        yield Entry(f"virtiofs_{verb}_1m", f"virtiofs_{verb}", RATE, what, "1m", f"kv_{verb}_1m")
    for way, kind, what in (
        ("fuse", "mount", "CPU of the process that gets, by the FUSE mount"),
        ("virtiofs", "virtiofs", "CPU of the Python driver that gets, by virtio-fs (a guest's: in the lab)"),
        ("file", "file", "CPU of a process that reads a local file out of the page cache"),
    ):
        floor = None if way == "file" else "host_cpu_s_per_gib_file"
        yield Entry(f"host_cpu_s_per_gib_{way}", f"host_cpu_{kind}", CPU_COST, what, "1m", floor)
    for way in ("fuse", "virtiofs"):
        what = "bytes the agent copied / served in gets"
        yield Entry(f"copies_per_byte_{way}", f"copies_{way}", COPIES, what, "1m")
    for name in ("redis", "redis_tls"):
        tls = name == "redis_tls"
        for verb in ("get", "put"):
            yield from of_sizes(f"{name}_{verb}", f"redis_{verb}", f"{PEERS[name]}, four clients", tls)
        what = f"{PEERS[name]}, one at a time"
        yield Entry(f"{name}_get_64k_p50_ms", "redis_get_p50", LATENCY, what, "64k", tls=tls)
    for (peer, what), verb, size, in_flight in product(PEERS.items(), ("get", "put"), SIZES, (1, 4)):
        name = f"{peer}_{verb}_{size}_x{in_flight}"
        yield Entry(
            name, f"{peer.removesuffix('_tls')}_{verb}_in_flight", RATE,
            f"{what}, {verb}s, {in_flight} in flight", size, f"raw_tcp_{size}",
            tls=peer.endswith("_tls"), in_flight=in_flight, by_name=name not in PEERS_ASKED,
        )  # fmt: skip
    for verb, size in product(("get", "put"), BATCH_SIZES):
        what = f"/kv {verb}s, 32 keys a call, registered memory, four threads"
        name, peer = f"kv_{verb}_{size}_b32", f"redis_{verb}_{size}_b32"
        yield Entry(peer, f"redis_{verb}_batch", RATE, f"Redis, {verb}s, pipelines of 32, four clients", size)
        yield Entry(name, f"kv_{verb}_batch", RATE, what, size, peer)
    for size, load, peer in product(LOAD_SIZES, LOADS, LOADED):
        what = f"{PEERS[peer]}, gets that arrive at {load} % of the highest rate: 99 of 100 within it"
        yield Entry(f"{peer}_get_{size}_load_{load}_p99_ms", "get_load", LATENCY, what, size, load=load)
    for name, path, size, what in (
        ("get_1m", "get", "1m", "gets through the mount"),
        ("put_1m", "put", "1m", "puts through the mount"),
        ("get_1m_registered", "get_registered", "1m", "gets into registered memory"),
        ("put_1m_registered", "put_registered", "1m", "puts out of registered memory"),
        ("get_64k", "get_batch", "64k", "gets, 32 keys a call, registered memory"),
        ("rdma_get_1m", "rdma_get", "1m", "gets through the mount, emulated NICs"),
    ):
        what = f"processor time of {what} / of the work no design can leave out"
        yield Entry(f"{name}_over_floor", OVER_FLOOR + path, RATIO, what, size)
    for verb, size in product(("get", "put"), FILE_SIZES):
        asked = size != "16m"
        floor = f"by_path_{verb}_{VALUE_BY_PATH[size]}"
        if size == VALUE_BY_PATH[size]:
            what = f"/kv {verb}s by path, whole values, O_DIRECT, four threads"
            yield Entry(floor, f"by_path_{verb}", RATE, what, size, "raw_tcp_1m", by_name=asked)
        what = f"/shared {verb}s, whole files, O_DIRECT, four threads"
        yield Entry(f"shared_{verb}_{size}", f"shared_{verb}", RATE, what, size, floor, by_name=asked)
        what = f"the same without O_DIRECT{', none of it in the page cache' if verb == 'get' else ''}"
        kind = f"shared_{verb}_cached"
        yield Entry(f"shared_{verb}_{size}_cached", kind, RATE, what, size, floor, by_name=True)
    for name, kind, verb, what in (
        (
            "fs_read_1g",
            "fs_read",
            "get",
            "a file of 1 GiB of /fs read, one thread, none of it in the page cache",
        ),
        ("fs_read_1g_direct", "fs_read_direct", "get", "the same with O_DIRECT, 4 MiB a read"),
        ("fs_write_1g_fsync", "fs_write", "put", "such a file written, with the fsync at its end"),
    ):
        yield Entry(name, kind, RATE, what, "1g", f"kv_{verb}_4m", by_name=True)
    what = "such a read of a file that lies ready in memory behind our door: the kernel's own pace"
    yield Entry("fuse_memory_1g_cached", "fuse_memory_cached", RATE, what, "1g", by_name=True)
    kind, what = "prestaged_get_in_flight", "/kv gets of prestaged values"
    yield Entry("prestaged_get_1m_x4", kind, RATE, what, "1m", "kv_get_1m_x4", in_flight=4)
    for share, what in (("served", "gets from memory / gets"), ("wasted", "bytes not served / bytes read")):
        yield Entry(f"prestage_{share}_share", "prestage_replay", RATIO, f"the trace, learned ahead: {what}")
    what = "longest hold-up of an event loop that calls host_shim"
    yield Entry("shim_loop_block_ms", "loop", LATENCY, what, "1m", alone=True)
    yield Entry("write_amplification", "write_amplification", RATIO, "bytes to the drives / of values", "1m")
    yield Entry("agent_rss_mib", "agent_rss", MEMORY, "resident memory of the agent after the gets and puts")
    for name, kind, unit, what in (
        ("tenant_erase_ms", "tenants", LATENCY, "a tenant with 100,000 slots made unreadable"),
        ("tenant_timing_auc", "tenants", RATIO, "by time: another's keys among unknown ones; 0.5: none"),
        ("notice_stopped_s", "stopped", UNIT_SECONDS, "until an enclosure that was stopped is suspected"),
        (
            "get_p99_ms_while_stopped",
            "stopped",
            LATENCY,
            "99 of 100 gets within it, an enclosure of 3 stopped",
        ),
        ("query_1k_p99_ms", "query", LATENCY, "99 of 100 queries of 1,000 keys within it, 50 a second"),
        ("failover_get_p99_ms", "failover", LATENCY, "99 of 100 gets within it, one path of 2 cut"),
        ("up_ready_s", "start", UNIT_SECONDS, "g35 up on new drives to its ready, the least of three"),
        (
            "restart_first_hit_s",
            "start",
            UNIT_SECONDS,
            "from an agent's kill to the next hit, least of three",
        ),
    ):
        yield Entry(name, kind, unit, what, alone=True)
    what = "from an agent's kill to the next hit, 1,000 namespaces"
    yield Entry("start_1000_namespaces_s", "many_namespaces", UNIT_SECONDS, what, alone=True, by_name=True)
    what = "gets by the S3 door, four clients, AES on"
    yield Entry("s3_get_1m", "s3", RATE, what, "1m", "raw_tcp_1m", alone=True)
    what = "the same by RDMA, emulated NICs"
    yield Entry("s3_rdma_get_1m", "s3", RATE, what, "1m", "s3_get_1m", alone=True)
    yield Entry("lru_hit_ratio", "hit_ratio", RATIO, "a full LRU of as many blocks, same trace")
    what = "the trace, room for a quarter of its blocks"
    yield Entry("hit_ratio", "hit_ratio", RATIO, what, floor="lru_hit_ratio")
    what += ", all that is evicted in G4; by directories alone, nothing is stored"
    yield Entry("hit_ratio_with_g4", "hit_ratio", RATIO, what, floor="lru_hit_ratio")


CATALOG: MappingProxyType[str, Entry] = MappingProxyType({entry.name: entry for entry in _entries()})


def unknown(names: Iterable[str]) -> list[str]:
    """Those of `names`, names or patterns of them, that there are not."""
    return [name for name in names if not fnmatch.filter(CATALOG, name)]


def matching(names: Iterable[str]) -> set[str]:
    """What there is of `names`, names or patterns of them."""
    return {name for pattern in names for name in fnmatch.filter(CATALOG, pattern)}


def chosen(names: Iterable[str]) -> list[Entry]:
    """The entries of `names` and of their floors, in the order in which they stand here.

    A name may be a pattern as the shell has them (`*_get_1m_x4`). Where there are none: all that every bench
    measures.
    """
    wanted = matching(names) or {name for name, entry in CATALOG.items() if not entry.by_name}
    wanted |= {floor for name in wanted if (floor := CATALOG[name].floor) is not None}
    return [entry for name, entry in CATALOG.items() if name in wanted]
