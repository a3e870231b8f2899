"""Two tenants of one pool: whether the time of a get tells one what the other has stored, and how long it
takes to erase one.

The pool lies in sparse files, because a hundred thousand slots are laid out and few of them filled: erasing
touches none of them, and that is what the number shows.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from agent.bench.rank_statistics import auc
from agent.bench.single_probes import Counted
from agent.cli.tenant_verb import erase_tenant
from agent.cli.up.children import Child
from agent.config.configuration import Configuration, load_configuration
from agent.errors import G35Error
from agent.fs.doors.mounting import clear_dead_mount
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.map.document import DATA_START, EXTENT_ALIGNMENT, set_size
from host_shim.pool import Pool

VALUE_BYTES = 64 << 10
SLOTS = 100_000
STORED = 2000
SEED = 35


class TenantSite:
    """An enclosure with one drive, a pool with a volume for each of blue and red, and an agent."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self.mount = folder, folder / "mnt"
        self._config = folder / "agent.toml"
        self._stack = ExitStack()
        self.sets = -(-SLOTS // SLOTS_PER_SET)

    def __enter__(self) -> TenantSite:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    @property
    def configuration(self) -> Configuration:
        return load_configuration(self._config)

    def _start(self) -> None:
        folder = self._folder
        ready, bytes_of_blue = folder / "jbof.json", self.sets * set_size(VALUE_BYTES)
        drive = DATA_START + 2 * (bytes_of_blue + 2 * EXTENT_ALIGNMENT)
        command = [
            sys.executable, "-P", "-m", "emulator.jbof", "--name", "jbof", "--drives", "1",
            "--drive-size", str(-(-drive // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT), "--address", "127.0.0.1",
            "--folder", str(folder / "drives"), "--control", str(folder / "jbof.sock"),
            "--ready-file", str(ready),
        ]  # fmt: skip
        self._run_child("the enclosure", command, ready)
        where = json.loads(ready.read_text())
        volumes = "".join(
            f'[[volumes]]\nname = "{name}"\ntenant = "{name}"\nvalue_size = {VALUE_BYTES}\nshare = 0.5\n'
            for name in ("blue", "red")
        )
        self._config.write_text(
            f'[agent]\nmount = "{self.mount}"\nstate = "{folder / "state"}"\n'
            f'key_file = "{folder / "root.key"}"\nread_deadline_ms = 2000\n'
            f'[[enclosures]]\nname = "jbof"\naddress = "127.0.0.1"\nport = {where["port"]}\n'
            f'nqn = "{where["nqn"]}"\n{volumes}'
        )
        self._g35("key", "new", str(folder / "root.key"))
        self._g35("pool", "format", "--config", str(self._config))
        up = folder / "agent.pid"
        command = [
            sys.executable, "-P", "-m", "agent.cli", "agent", "--config", str(self._config),
            "--ready-file", str(up),
        ]  # fmt: skip
        self._stack.callback(clear_dead_mount, self.mount)
        self._run_child("the agent", command, up)

    def flush(self) -> None:
        """Bring the drives' files to the disk."""
        for path in (self._folder / "drives").iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())

    def _run_child(self, name: str, command: list[str], ready: Path) -> None:
        log = ready.with_suffix(".log")
        child = Child(name, command, log, ready.exists, ready.with_suffix(".process"))
        self._stack.callback(child.stop)
        child.start()
        child.wait_ready(seconds=60.0)

    def _g35(self, *words: str) -> None:
        command = [sys.executable, "-P", "-m", "agent.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise G35Error(f"g35 {words[0]} {words[1]}: {done.stderr.strip()}")


def measure(folder: Path) -> dict[str, Counted]:
    """Both numbers, on a site of their own below `folder`."""
    with TenantSite(folder) as site:
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
    once: directories are remembered, so asking again is quicker, whoever has stored what."""
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
    erased = erase_tenant(site.configuration, "blue")
    if erased.left:
        raise G35Error(f"the tenant was not erased: {erased.left}")
    details = {"slots": site.sets * SLOTS_PER_SET, "values": STORED, "namespaces": 1}
    return Counted(erased.seconds * 1e3, details)
