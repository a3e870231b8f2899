"""A tenant is erased under a serving agent; the drives are then searched with every key that is left."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agent.inline.root_keys import HeldRootKey, root_key_in
from agent.inline.secrets import Purpose, SecretKey, WrongKey
from agent.inline.suites import Place
from agent.pool.opening import COPY_BYTES
from agent.pool.pool_map import PoolMap
from agent.pool.slot import HEADER_BYTES, MAGIC, OpenSlot, SlotCodec
from agent.pool.superblock import decode_superblock_untrusted
from emulator.jbof.process import EnclosureProcess
from host_shim.pool import Pool, UnknownVolume
from tests.support.processes import Processes, Started
from tests.support.waiting import wait_until

TENANTS = ("blue", "red")
KEYS = [random.Random(f"tenant key {number}").randbytes(16) for number in range(12)]


class TwoTenants:
    """Two enclosures whose drives are files, a pool with a volume for each tenant, and an agent."""

    def __init__(self, processes: Processes, folder: Path, stack: ExitStack) -> None:
        self.folder, self.mount, self.config = folder, folder / "mnt", folder / "agent.toml"
        self._processes = processes
        self.enclosures: list[EnclosureProcess] = []
        for number in range(2):
            self.enclosures.append(self._start(number))
            stack.callback(lambda number=number: self.enclosures[number].stop())
        self.configure()
        assert self.g35("key", "new", str(folder / "root.key"))[0] == 0
        assert self.g35("pool", "format", "--config", str(self.config))[0] == 0

    def _start(self, number: int, *options: str) -> EnclosureProcess:
        folder = self.folder / f"d{number}"
        words = ["--drives=1", "--drive-size=24M", f"--folder={folder}", "--address=127.0.0.1", *options]
        return EnclosureProcess.start(words, self.folder, name=f"jbof-{number}")

    def restart(self, number: int) -> None:
        port = self.enclosures[number].ready["port"]
        self.enclosures[number].stop()
        self.enclosures[number] = self._start(number, f"--port={port}")

    def configure(self, *of_the_mount: str, more: str = "") -> None:
        lines = [
            "[agent]", f'mount = "{self.mount}"', f'state = "{self.folder / "state"}"',
            f'key_file = "{self.folder / "root.key"}"', "read_deadline_ms = 2000", *of_the_mount,
        ]  # fmt: skip
        for each in self.enclosures:
            name = each.ready["nqn"].rpartition(":")[2]
            lines += [
                "[[enclosures]]", f'name = "{name}"', 'address = "127.0.0.1"',
                f"port = {each.ready['port']}", f'nqn = "{each.ready["nqn"]}"',
            ]  # fmt: skip
        for name in TENANTS:
            lines += [
                "[[volumes]]", f'name = "{name}"', f'tenant = "{name}"', 'value_size = "64K"', "share = 0.3",
            ]  # fmt: skip
        for name in ("green", more):
            if name:
                lines += ["[[volumes]]", f'name = "{name}"', f'tenant = "{name}"', 'value_size = "64K"']
                lines.append("share = 0.2")
        self.config.write_text("\n".join(lines) + "\n")

    def g35(self, *words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "agent.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        return done.returncode, done.stdout + done.stderr

    def tenant(self, verb: str, *words: str) -> tuple[int, str]:
        return self.g35("tenant", verb, *words, "--config", str(self.config))

    def listed(self) -> dict[str, str]:
        code, text = self.tenant("list", "--json")
        assert code == 0, text
        return {row["name"]: row["key"] for row in json.loads(text)}

    def serve(self) -> Started:
        agent = self._processes.g35("agent", "--config", self.config)
        agent.wait_for_line("ready", 60)
        return agent

    def drives(self) -> list[bytes]:
        """The media, byte for byte."""
        return [
            file.read_bytes() for file in sorted(self.folder.glob("d*/*")) if file.stat().st_size > 1 << 20
        ]

    def pool_map(self) -> PoolMap:
        return decode_superblock_untrusted(self.drives()[0][:COPY_BYTES]).pool_map


@pytest.fixture
def two_tenants(processes: Processes, tmp_path: Path) -> Iterator[TwoTenants]:
    with ExitStack() as stack:
        yield TwoTenants(processes, tmp_path, stack)


def value_of(name: str, key: bytes) -> bytes:
    return name.encode() + random.Random(key).randbytes(9000)


def opened_with_what_is_left(pool_map: PoolMap, root: HeldRootKey, media: list[bytes]) -> dict[str, int]:
    """Every slot on the media, tried with the secret of each volume that any key still opens: how many
    values of `KEYS` opened, by the volume that they say they are of; and how many slots there are."""
    secrets: list[SecretKey] = []
    for volume in pool_map.volumes:
        context = bytes.fromhex(pool_map.pool_id + volume.volume_id)
        if not pool_map.is_erased(volume):
            secrets.append(pool_map.secret(volume, root))
        with pytest.raises(WrongKey):
            root.unwrap(Purpose.VOLUME, context, bytes.fromhex(volume.wrapped_secret))
    counts = dict.fromkeys([*(volume.name for volume in pool_map.volumes), "slots"], 0)
    for drive in media:
        at = drive.find(MAGIC)
        while at >= 0:
            counts["slots"] += 1
            header = memoryview(drive)[at : at + HEADER_BYTES]
            for secret in secrets:
                for volume in pool_map.volumes:
                    codec = SlotCodec(
                        bytes.fromhex(volume.tenant), bytes.fromhex(volume.volume_id),
                        SecretKey(secret.reveal()[32:]), volume.suite, volume.unit_bytes,
                    )  # fmt: skip
                    found = (codec.open(header, key, Place(bytes(16), 0)) for key in KEYS)
                    counts[volume.name] += sum(isinstance(each, OpenSlot) for each in found)
            at = drive.find(MAGIC, at + 1)
    return counts


def test_erase_under_a_serving_agent(two_tenants: TwoTenants) -> None:
    agent = two_tenants.serve()
    with Pool(two_tenants.mount) as pool:
        for name in TENANTS:
            for key in KEYS:
                assert pool.volume(name).put(key, value_of(name, key))
        before, root = two_tenants.pool_map(), root_key_in(two_tenants.folder / "root.key")
        wrapped = next(each.wrapped_key for each in before.tenants if each.name == "blue").encode()
        assert all(drive.count(wrapped) == 2 for drive in two_tenants.drives())
        counts = opened_with_what_is_left(before, root, two_tenants.drives())
        assert counts["blue"] == counts["red"] == len(KEYS)

        name = two_tenants.mount / "kv/blue" / KEYS[0].hex()
        with name.open("rb", buffering=0) as half_read:
            assert half_read.read(100)
            assert two_tenants.tenant("erase", "blue")[0] == 1, "not without --yes"
            code, said = two_tenants.tenant("erase", "blue", "--yes")
            assert code == 0, said
            wait_until(lambda: erased(pool), 20, "the agent to notice")
            with pytest.raises(OSError):
                half_read.read(100)
        assert [pool.volume("red").get(key) for key in KEYS] == [value_of("red", key) for key in KEYS]
        assert [each["name"] for each in pool.stats()["volumes"]] == ["red", "green"]
        assert sorted(os.listdir(two_tenants.mount / "kv")) == ["green", "red"]
        with pytest.raises(OSError):
            (two_tenants.mount / "kv/blue/new").write_bytes(b"x")

    after, media = two_tenants.pool_map(), two_tenants.drives()
    assert after.version == before.version + 1
    assert not any(
        wrapped[at : at + 40] in drive for drive in media for at in range(0, len(wrapped) - 40, 20)
    )
    counts = opened_with_what_is_left(after, root, media)
    assert (counts["blue"], counts["red"]) == (0, len(KEYS))
    assert counts["slots"] >= 2 * len(KEYS), "they are all there, and open for nobody"
    assert two_tenants.listed() == {"blue": "erased", "green": "its own", "red": "its own"}
    assert agent.stop(30) == 0
    assert "volume blue was erased" in agent.output

    # Back with a fresh key: the same place, nothing of what was. And somebody new.
    two_tenants.configure(more="violet")
    for name in ("blue", "violet"):
        code, said = two_tenants.tenant("add", name)
        assert code == 0, said
        assert "1 new volume(s)" in said
    agent = two_tenants.serve()
    with Pool(two_tenants.mount) as pool:
        assert [pool.volume("blue").get(key) for key in KEYS] == [None] * len(KEYS)
        assert pool.volume("blue").put(KEYS[0], b"new")
        assert pool.volume("blue").get(KEYS[0]) == b"new"
        assert pool.volume("violet").put(KEYS[0], b"violet's")
        assert pool.volume("red").get(KEYS[1]) == value_of("red", KEYS[1])
    assert agent.stop(30) == 0


def erased(pool: Pool) -> bool:
    try:
        pool.volume("blue").exists(KEYS[:1])
    except UnknownVolume:
        return True
    return False


def test_an_enclosure_that_is_away_is_named_and_the_mount_is_one_tenants(two_tenants: TwoTenants) -> None:
    away = two_tenants.enclosures[1]
    away.stop()
    code, said = two_tenants.tenant("erase", "blue", "--yes")
    assert code == 1
    assert "1 of 2 namespaces may still hold the key of tenant blue" in said
    assert "not reached" in said
    assert any(each.nguid in said for each in two_tenants.pool_map().namespaces)
    two_tenants.restart(1)
    code, said = two_tenants.tenant("erase", "blue", "--yes")
    assert code == 0, said
    assert two_tenants.tenant("erase", "nobody", "--yes")[0] == 1

    # The agent starts without the erased tenant, and shows the mount's own tenants and nothing else.
    two_tenants.configure('tenants = ["blue", "red"]')
    agent = two_tenants.serve()
    with Pool(two_tenants.mount) as pool:
        assert pool.volume("red").put(KEYS[0], b"of red")
        for name in ("blue", "green", "grey"):
            with pytest.raises(UnknownVolume):
                pool.volume(name).exists(KEYS[:1])
        found: dict[str, Any] = pool.stats()
        assert [each["name"] for each in found["volumes"]] == ["red"]
        assert found["memory"] is None
    assert os.listdir(two_tenants.mount / "kv") == ["red"]
    assert two_tenants.g35("status", "--mount", str(two_tenants.mount))[0] == 0
    assert agent.stop(30) == 0
