"""Which numbers there are: their names, units and floors. Scripts use the names; they don't change.

A name is made of what is measured and the size of its values. `kind` picks the probe (probing.py).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType

SIZES = MappingProxyType({"64k": 1 << 16, "1m": 1 << 20, "4m": 1 << 22})

RATE, LATENCY, MICROSECONDS, RATIO, MEMORY = "GiB/s", "ms", "us", "ratio", "MiB"
CPU_COST = "s/GiB"
COPIES = "bytes/byte"
SECONDS = "s"


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
    by_name: bool = False
    """Measured only where it is asked for, by its name or a pattern of names."""

    @property
    def value_bytes(self) -> int:
        return SIZES[self.size]

    @property
    def in_rounds(self) -> bool:
        """Whether it is a speed, taken in rounds among the others, rather than a count taken once."""
        return self.unit in (RATE, LATENCY, MICROSECONDS, CPU_COST) and not self.alone


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

PEERS_ASKED = frozenset(
    {
        *(f"{peer}_get_1m_x4" for peer in PEERS),
        "kv_get_4m_x4",
        "mooncake_get_4m_x4",
    }
)
"""Those of their names that every bench measures; there are sixty."""


def _beside_peers() -> Iterable[Entry]:
    for peer, what in PEERS.items():
        for verb in ("get", "put"):
            for size in SIZES:
                for in_flight in (1, 4):
                    name = f"{peer}_{verb}_{size}_x{in_flight}"
                    yield Entry(
                        name, f"{peer.removesuffix('_tls')}_{verb}_in_flight", RATE,
                        f"{what}, {verb}s, {in_flight} in flight", size, f"raw_tcp_{size}",
                        tls=peer.endswith("_tls"), in_flight=in_flight, by_name=name not in PEERS_ASKED,
                    )  # fmt: skip


def _entries() -> Iterable[Entry]:
    for size in SIZES:
        yield Entry(f"raw_tcp_{size}", "raw_tcp", RATE, "one loopback TCP stream, recv_into", size)
    for size in ("1m", "4m"):
        yield Entry(
            f"fuse_memory_{size}", "fuse_memory", RATE, "reads through a mount from ready memory", size
        )
    yield Entry("aes_1m", "aes", RATE, "AES-256-GCM opens 1 MiB in four units, one core", "1m")
    for size in SIZES:
        yield Entry(
            f"kv_get_{size}", "kv_get", RATE, "/kv gets, AES on, four in flight", size, f"raw_tcp_{size}"
        )
    yield Entry("kv_get_1m_single", "kv_get_single", RATE, "the same, one key a call", "1m", "raw_tcp_1m")
    yield Entry(
        "kv_get_1m_pyfuse3", "kv_get", RATE, "the same by the reference door", "1m", "raw_tcp_1m", "pyfuse3"
    )
    for size in SIZES:
        yield Entry(
            f"kv_put_{size}", "kv_put", RATE, "/kv puts, AES on, four in flight", size, f"raw_tcp_{size}"
        )
    yield Entry("kv_get_64k_p50_ms", "kv_get_p50", LATENCY, "/kv gets, one at a time", "64k")
    yield Entry(
        "kv_get_64k_asleep_p50_ms",
        "kv_get_asleep_p50",
        LATENCY,
        "the same, of an agent that lets processors sleep",
        "64k",
    )
    yield Entry("udp_gso", "roce", RATE, "bare UDP, bursts of 60 KiB by segmentation offload")
    for verb in ("write", "read"):
        yield Entry(
            f"roce_{verb}_1m",
            "roce",
            RATE,
            f"RDMA {verb.upper()}, emulated NICs, two in flight",
            "1m",
            "udp_gso",
        )
    yield Entry("roce_send_64b_p50_us", "roce", MICROSECONDS, "half of a SEND of 64 bytes to and fro")
    yield Entry(
        "kv_get_1m_rdma", "kv_get", RATE, "/kv gets over NVMe/RDMA on the emulated NICs", "1m", "kv_get_1m",
        transport="rdma",
    )  # fmt: skip
    for verb in ("get", "put"):
        yield Entry(
            f"virtiofs_{verb}_1m", f"virtiofs_{verb}", RATE, f"/kv {verb}s by virtio-fs, Python driver", "1m",
            f"kv_{verb}_1m",
        )  # fmt: skip
    for way, kind, what in (
        ("fuse", "mount", "CPU of the process that gets, by the FUSE mount"),
        ("virtiofs", "virtiofs", "CPU of the Python driver that gets, by virtio-fs (a guest's: in the lab)"),
        ("file", "file", "CPU of a process that reads a local file out of the page cache"),
    ):
        yield Entry(
            f"host_cpu_s_per_gib_{way}", f"host_cpu_{kind}", CPU_COST, what, "1m",
            None if way == "file" else "host_cpu_s_per_gib_file",
        )  # fmt: skip
    for way in ("fuse", "virtiofs"):
        yield Entry(
            f"copies_per_byte_{way}", f"copies_{way}", COPIES, "bytes the agent copied / served in gets", "1m"
        )
    for tls in (False, True):
        name, what = ("redis_tls", "Redis over TLS") if tls else ("redis", "Redis")
        for verb in ("get", "put"):
            for size in SIZES:
                yield Entry(
                    f"{name}_{verb}_{size}", f"redis_{verb}", RATE, f"{what}, four clients", size,
                    f"raw_tcp_{size}", tls=tls,
                )  # fmt: skip
        yield Entry(
            f"{name}_get_64k_p50_ms", "redis_get_p50", LATENCY, f"{what}, one at a time", "64k", tls=tls
        )
    yield from _beside_peers()
    yield Entry(
        "prestaged_get_1m_x4", "prestaged_get_in_flight", RATE, "/kv gets of prestaged values", "1m",
        "kv_get_1m_x4", in_flight=4,
    )  # fmt: skip
    for share, what in (("served", "gets from memory / gets"), ("wasted", "bytes not served / bytes read")):
        yield Entry(f"prestage_{share}_share", "prestage_replay", RATIO, f"the trace, learned ahead: {what}")
    yield Entry(
        "shim_loop_block_ms", "loop", LATENCY, "longest hold-up of an event loop that calls host_shim", "1m",
        alone=True,
    )  # fmt: skip
    yield Entry("write_amplification", "write_amplification", RATIO, "bytes to the drives / of values", "1m")
    yield Entry("agent_rss_mib", "agent_rss", MEMORY, "resident memory of the agent after the gets and puts")
    yield Entry(
        "tenant_erase_ms", "tenants", LATENCY, "a tenant with 100,000 slots made unreadable", alone=True
    )
    yield Entry(
        "tenant_timing_auc",
        "tenants",
        RATIO,
        "by time: another's keys among unknown ones; 0.5: none",
        alone=True,
    )
    yield Entry(
        "notice_stopped_s", "stopped", SECONDS, "until an enclosure that was stopped is suspected", alone=True
    )
    yield Entry(
        "get_p99_ms_while_stopped",
        "stopped",
        LATENCY,
        "99 of 100 gets within it, an enclosure of 3 stopped",
        alone=True,
    )
    yield Entry(
        "failover_get_p99_ms",
        "failover",
        LATENCY,
        "99 of 100 gets within it, one path of 2 cut",
        alone=True,
    )
    yield Entry("lru_hit_ratio", "lru_hit_ratio", RATIO, "a full LRU of as many blocks, same trace")
    yield Entry(
        "hit_ratio", "hit_ratio", RATIO, "the trace, room for a quarter of its blocks", floor="lru_hit_ratio"
    )


CATALOG: MappingProxyType[str, Entry] = MappingProxyType({entry.name: entry for entry in _entries()})


def unknown(names: Iterable[str]) -> list[str]:
    """Those of `names`, names or patterns of them, that there are not."""
    return [name for name in names if not fnmatch.filter(CATALOG, name)]


def matching(names: Iterable[str]) -> set[str]:
    """What there is of `names`, names or patterns of them."""
    return {name for pattern in names for name in fnmatch.filter(CATALOG, pattern)}


def chosen(names: Iterable[str]) -> list[Entry]:
    """The entries of `names` and of their floors, in the catalog's order.

    A name may be a pattern as the shell has them (`*_get_1m_x4`). Where there are none: all that every bench
    measures.
    """
    wanted = matching(names) or {name for name, entry in CATALOG.items() if not entry.by_name}
    wanted |= {floor for name in wanted if (floor := CATALOG[name].floor) is not None}
    return [entry for name, entry in CATALOG.items() if name in wanted]
