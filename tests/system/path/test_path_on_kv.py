"""A volume on KV namespaces, from the mount to the enclosures and back: nothing above the pool can tell."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from host_shim.pool import Pool
from nvmeof.transport.verbs_provider import free_loopback_address
from tests.support.nvme.enclosure_process import EnclosureProcess
from tests.support.nvme.transport_ways import EMULATED
from tests.support.pool_up import wait_each_served
from tests.support.processes import Processes, Started

KIB = 1 << 10
MIB = 1 << 20


class KvPool:
    """Two enclosures with a KV drive each, a pool formatted by `g35 pool format`, and an agent."""

    def __init__(self, processes: Processes, folder: Path, stack: ExitStack, transport: str) -> None:
        self.folder, self.mount = folder, folder / "mnt"
        self.config = folder / "agent.toml"
        self._processes = processes
        self.transport = transport
        self.drives: list[list[str]] = []
        self.enclosures: list[EnclosureProcess] = []
        for number in range(2):
            address = "127.0.0.1" if transport == "tcp" else free_loopback_address()
            options = ["--drives=0", "--kv-drives=1", "--drive-size=8M", f"--folder={folder / f'd{number}'}"]
            self.drives.append([*options, f"--transport={transport}", f"--address={address}"])
            self.enclosures.append(self._start(number))
            stack.callback(lambda number=number: self.enclosures[number].stop())
        self._configure()
        self.agent: Started | None = None

    def _start(self, number: int, *options: str) -> EnclosureProcess:
        return EnclosureProcess.start([*self.drives[number], *options], self.folder, name=f"jbof-{number}")

    def _configure(self, *more: str) -> None:
        lines = [
            "[agent]",
            f'mount = "{self.mount}"',
            f'state = "{self.folder / "state"}"',
            f'key_file = "{self.folder / "root.key"}"',
            "read_deadline_ms = 10000",
        ]
        if self.transport == "rdma":
            local = free_loopback_address()
            lines += ["[fabric]", f'verbs_provider = "{EMULATED}"', f'local_address = "{local}"']
        for each in self.enclosures:
            lines += [
                "[[enclosures]]",
                f'name = "{each.ready["nqn"].rpartition(":")[2]}"',
                f'address = "{each.ready["address"]}"',
                f"port = {each.ready['port']}",
                f'nqn = "{each.ready["nqn"]}"',
                f'transport = "{self.transport}"',
            ]
        lines += ["[[volumes]]", 'name = "kv"', 'value_size = "256K"', "share = 1.0", *more]
        self.config.write_text("\n".join(lines) + "\n")

    def g35(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "agent.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    def format(self, *options: str) -> None:
        done = self.g35("pool", "format", "--config", str(self.config), *options)
        assert done.returncode == 0, done.stderr

    def serve(self) -> None:
        self.agent = self._processes.g35("agent", "--config", self.config)
        self.agent.wait_for_line("ready", 60)

    def end(self) -> None:
        assert self.agent is not None
        assert self.agent.stop(30) == 0

    def restart_enclosure(self, number: int) -> None:
        port = self.enclosures[number].ready["port"]
        self.enclosures[number].kill()
        self.enclosures[number] = self._start(number, f"--port={port}")

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.mount / ".g35/status.json").read_bytes().rstrip(b"\0"))
        return found


@pytest.fixture
def transport() -> str:
    """What tests override that shall go over something else."""
    return "tcp"


@pytest.fixture
def kv_pool(transport: str, processes: Processes, tmp_path: Path) -> Iterator[KvPool]:
    with ExitStack() as stack:
        pool = KvPool(processes, tmp_path, stack, transport)
        assert pool.g35("key", "new", str(tmp_path / "root.key")).returncode == 0
        pool.format()
        pool.serve()
        try:
            yield pool
        finally:
            assert pool.agent is not None
            if pool.agent.running:
                pool.end()


def values(seed: int, count: int, most: int = 256 * KIB) -> dict[bytes, bytes]:
    dice = random.Random(seed)
    return {dice.randbytes(16): dice.randbytes(dice.randrange(1, most)) for _ in range(count)}


@pytest.mark.parametrize("transport", ["tcp", "rdma"])
def test_put_get_exists_delete_and_a_restart_of_everything(kv_pool: KvPool, seed: int) -> None:
    stored = values(seed, 20)
    stored[bytes(range(16))] = b"m" * (256 * KIB)
    with Pool(kv_pool.mount) as pool:
        kv = pool.volume("kv")
        for key, value in stored.items():
            assert kv.put(key, value)
        wait_each_served(kv, stored)
        assert kv.exists([*stored, bytes(16)]) == [True] * len(stored) + [False]
        assert kv.get(bytes(16)) is None
        kv.delete([bytes(range(16))])
        assert kv.get(bytes(range(16))) is None
        del stored[bytes(range(16))]
    (volume,) = kv_pool.status()["volumes"]
    assert volume["slots_seen_taken"] > 0
    # By path: written in pieces, read in pieces, immutable.
    data = random.Random(seed).randbytes(200_001)
    name = kv_pool.mount / "kv/kv/by path"
    with name.open("wb", buffering=0) as file:
        for at in range(0, len(data), 50_000):
            file.write(data[at : at + 50_000])
    assert name.read_bytes() == data
    assert name.stat().st_size == len(data)
    with name.open("rb", buffering=0) as file:
        assert b"".join(iter(lambda: file.read(30_000), b"")) == data
    with pytest.raises(FileExistsError):
        name.open("wb")
    name.unlink()
    assert not name.exists()
    # Everything dies and comes back: what was acknowledged is there.
    kv_pool.end()
    kv_pool.restart_enclosure(0)
    kv_pool.restart_enclosure(1)
    kv_pool.serve()
    with Pool(kv_pool.mount) as pool:
        kv = pool.volume("kv")
        wait_each_served(kv, stored)
        assert kv.get(bytes(range(16))) is None


def test_damage_and_hangs_are_misses(kv_pool: KvPool, seed: int) -> None:
    stored = values(seed, 16)
    with Pool(kv_pool.mount) as pool:
        kv = pool.volume("kv")
        for key, value in stored.items():
            assert kv.put(key, value)
        kv_pool.enclosures[0].ask("flip", drive=0, on_read=True, length=4096)
        found = [kv.get(key) for key in stored]
        assert all(each in (None, value) for each, value in zip(found, stored.values(), strict=True))
        assert None in found
        assert found != [None] * len(found), "the other enclosure serves on"
        kv_pool.enclosures[0].ask("heal")
        # What was found damaged may be stored again, whatever the enclosure has by now.
        for key, value in stored.items():
            kv.put(key, value)
        wait_each_served(kv, stored)
        kv_pool.enclosures[1].ask("error", drive=0, status="unrecovered_error")
        assert None in [kv.get(key) for key in stored]
        kv_pool.enclosures[1].ask("heal")
        wait_each_served(kv, stored)
    causes = kv_pool.status()["totals"]["miss_causes"]
    assert causes["corrupt"] > 0


def test_a_full_volume_evicts_the_old_and_stays_within_its_bytes(kv_pool: KvPool, seed: int) -> None:
    dice = random.Random(seed)
    stored: dict[bytes, bytes] = {}
    with Pool(kv_pool.mount) as pool:
        kv = pool.volume("kv")
        for _ in range(100):  # 25 MiB for 16 MiB of drives
            key, value = dice.randbytes(16), dice.randbytes(256 * KIB)
            with suppress(OSError):  # refused, where the namespace is full and the volume as a whole is not
                if kv.put(key, value):
                    stored[key] = value
        # Asked twice: on a busy machine one get of many may be late.
        found = {key: kv.get(key) or kv.get(key) for key in stored}
    assert all(found[key] in (None, value) for key, value in stored.items())
    (volume,) = kv_pool.status()["volumes"]
    served = sum(each is not None for each in found.values())
    assert volume["evictions"] > 0
    assert served == len(stored) - volume["evictions"]
    assert served > 0.9 * 16 * MIB / (260 * KIB) - 2
    newest = list(stored)[-8:]
    assert sum(found[key] is not None for key in newest) >= 6
    for each in kv_pool.enclosures:
        (drive,) = each.ask("stats")["drives"]
        assert drive["used_bytes"] <= drive["size"]


def test_a_namespace_that_carries_something_is_not_formatted_unasked(kv_pool: KvPool) -> None:
    with Pool(kv_pool.mount) as pool:
        assert pool.volume("kv").put(bytes(16), b"value")
    kv_pool.end()
    done = kv_pool.g35("pool", "format", "--config", str(kv_pool.config))
    assert done.returncode != 0
    assert "carries a pool" in done.stderr
    shown = kv_pool.g35("pool", "show", "--config", str(kv_pool.config))
    assert "on 2 KV namespaces" in " ".join(shown.stdout.split())
    kv_pool.format("--force")
    for each in kv_pool.enclosures:
        assert each.ask("stats")["drives"][0]["keys"] == 1, "the superblock alone"
    kv_pool.serve()
    with Pool(kv_pool.mount) as pool:
        assert pool.volume("kv").get(bytes(16)) is None
