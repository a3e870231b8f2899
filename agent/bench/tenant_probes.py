"""Two tenants of one pool: whether a get's time tells what the other has stored, and how long an erase takes.

The pool lies in sparse files: a hundred thousand slots are laid out, few are filled, and erasing touches
none.
"""

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agent.bench.own_pool import own_pool
from agent.bench.single_probes import Counted
from agent.cli.tenant_verb import erase_tenant
from agent.config.configuration import load_configuration
from agent.errors import G35Error
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.map.document import DATA_START, EXTENT_ALIGNMENT, set_size
from host_shim.pool import Pool

VALUE_BYTES = 64 << 10
SETS = -(-100_000 // SLOTS_PER_SET)
STORED = 2000
SEED = 35


@dataclass(frozen=True, slots=True)
class TenantSite:
    """An enclosure with one drive, a pool with a volume for each of blue and red, and an agent."""

    folder: Path
    mount: Path
    config: Path

    def flush(self) -> None:
        for path in (self.folder / "drives").iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())


@contextmanager
def tenant_site(folder: Path) -> Iterator[TenantSite]:
    """Such a site in a folder that is made, for as long as the block runs."""
    drive = DATA_START + 2 * (SETS * set_size(VALUE_BYTES) + 2 * EXTENT_ALIGNMENT)
    size = -(-drive // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT
    drives = ["--drives", "1", "--drive-size", str(size), "--folder", str(folder / "drives")]
    volumes = "".join(
        f'[[volumes]]\nname = "{name}"\ntenant = "{name}"\nvalue_size = {VALUE_BYTES}\nshare = 0.5\n'
        for name in ("blue", "red")
    )
    with own_pool(folder, drives, volumes) as pool:
        yield TenantSite(folder, pool.mount, pool.config)


def measure(folder: Path) -> dict[str, Counted]:
    """Both numbers, on a site of their own below `folder`."""
    with tenant_site(folder) as site:
        dice = random.Random(SEED)
        stored = [dice.randbytes(16) for _ in range(STORED)]
        with Pool(site.mount) as pool:
            blue = pool.volume("blue")
            for key in stored:
                if not blue.put(key, key * (VALUE_BYTES // len(key))):
                    raise G35Error("the agent refused a put into an empty volume")
            timing = _timing(pool, stored, dice)
        return {"tenant_timing_auc": timing, "tenant_erase_ms": _erase(site)}


def _timing(pool: Pool, stored: list[bytes], dice: random.Random) -> Counted:
    """Red asks for keys of blue's and for as many that nobody has stored, in a mixed order, and for each
    once: directories are remembered, so asking again is quicker, for any key."""
    unknown = [dice.randbytes(16) for _ in stored]
    samples = [(kind, key) for kind, keys in enumerate((unknown, stored)) for key in keys]
    dice.shuffle(samples)
    red, found = pool.volume("red"), {}
    for name in ("get", "exists"):
        times: list[list[float]] = [[], []]
        for kind, key in samples:
            began = time.perf_counter()
            there = red.get(key) if name == "get" else red.exists([key])[0]
            times[kind].append(time.perf_counter() - began)
            if there:
                raise G35Error("red was given what blue has stored")
        found[name] = auc(times[0], times[1])
    worst = max(found.values(), key=lambda value: abs(value - 0.5))
    return Counted(worst, {**{f"auc_{name}": value for name, value in found.items()}, "samples": len(stored)})


def _erase(site: TenantSite) -> Counted:
    """Once what was stored before is on the disk: the flush of the map would wait for that, too."""
    site.flush()
    erased = erase_tenant(load_configuration(site.config), "blue")
    if erased.left:
        raise G35Error(f"the tenant was not erased: {erased.left}")
    details = {"slots": SETS * SLOTS_PER_SET, "values": STORED, "namespaces": 1}
    return Counted(erased.seconds * 1e3, details)


def auc(first: Sequence[float], second: Sequence[float]) -> float:
    """The probability that one of `second` is greater than one of `first`, ties counted half.

    0.5: nobody can tell by the number which row it is from; 0 or 1: everybody can (Mann and Whitney 1947).
    """
    both = np.concatenate([np.asarray(first, float), np.asarray(second, float)])
    order = np.argsort(both, kind="stable")
    _, inverse, counts = np.unique(both[order], return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = np.empty(len(both))
    ranks[order] = ((ends - counts + 1 + ends) / 2)[inverse]
    u = ranks[len(first) :].sum() - len(second) * (len(second) + 1) / 2
    return float(u / (len(first) * len(second)))
