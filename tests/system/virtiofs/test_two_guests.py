"""Two guests of one agent, each with volumes and a folder of its own: neither sees the other's.

The agent has no mount and is two processes, of which each serves one guest's queue.
"""

from __future__ import annotations

import contextlib
import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.bench.virtio_driver.machine import Machine
from agent.bench.virtiofs_files import VirtiofsFiles
from host_shim.pool import Pool, UnknownVolume
from tests.support.fs.guest_requests import attributes_of, create, entries, forget, unlink
from tests.support.local_rig import free_port
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes
from tests.support.waiting import wait_until

KEY = bytes(range(16))
TENANTS = ("blue", "red")
METRICS_PORT = free_port()


@pytest.fixture
def guests(processes: Processes, tmp_path: Path) -> Iterator[list[Machine]]:
    """A machine for each tenant, in their order."""
    pool_up = PoolUp(
        processes, tmp_path / "state", "--drives", "1", "--enclosures", "1", "--drive-size", "512M",
        "--no-restart", "--read-deadline-ms", "5000", "--processes", "2",
    )  # fmt: skip
    try:
        config = tmp_path / "tenants.toml"
        config.write_text(tenants_of(pool_up, tmp_path))
        old = pool_up.kill("agent-process")
        wait_until(lambda: not os.path.exists(f"/proc/{old}") or not pool_up.answers(), 60, "its end")
        formatted = processes.g35("pool", "format", "--force", "--config", config)
        assert formatted.process.wait(60) == 0, formatted.output
        agent = processes.g35("agent", "--config", config)
        agent.wait_for_line("ready", 60)
        with contextlib.ExitStack() as stack:
            machines = [stack.enter_context(Machine(tmp_path / name)) for name in TENANTS]
            for machine in machines:
                machine.start(patience=30)
                machine.client.init()
            yield machines
        assert agent.stop() == 0
    finally:
        pool_up.down()


def tenants_of(pool_up: PoolUp, folder: Path) -> str:
    """A configuration of the same enclosures without a mount, with a device for each tenant."""
    text = (pool_up.state / "agent.toml").read_text()
    text = text.replace(f'state = "{pool_up.state / "agent"}"', f'state = "{folder / "agent"}"')
    text = text.replace(f'mount = "{pool_up.mount}"\n', "").replace("share = 0.55", "share = 0.05")
    text = re.sub("(?m)^metrics = .*", f'metrics = "127.0.0.1:{METRICS_PORT}"', text)
    for name in TENANTS:
        text += f'\n[[volumes]]\nname = "{name}"\ntenant = "{name}"\nshare = 0.24\nvalue_size = "256K"\n'
        text += f'\n[[virtiofs]]\nsocket = "{folder / name}"\nsubtree = "/{name}"\nvolumes = ["{name}"]\n'
    return text


def process_metric(name: str) -> float:
    """Of the process of the agent beside the first."""
    with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(rf'^{name}\{{process="1"\}} ([0-9.e+]+)$', text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


def test_each_process_serves_a_guest(guests: list[Machine]) -> None:
    wait_until(lambda: process_metric("g35_process_up") == 1, 60, "the other process to serve")
    blue, red = guests
    for machine, name in ((blue, "blue"), (red, "red")):
        with Pool("", files=VirtiofsFiles(machine)) as pool:
            volume, into = pool.volume(name), memoryview(bytearray(200_000))
            for size in (1000, 200_000):
                key = size.to_bytes(16, "big")
                value = name.encode() * size
                assert volume.put(key, value[:size])
                assert volume.get_into(key, into[:size]) == size
                assert into[:size] == value[:size]
    wait_until(lambda: process_metric("g35_process_hits_total") == 2, 10, "red's gets, and nobody else's")


def test_neither_sees_the_other(guests: list[Machine]) -> None:
    blue, red = guests
    with Pool("", files=VirtiofsFiles(blue)) as blues, Pool("", files=VirtiofsFiles(red)) as reds:
        assert blues.volume("blue").put(KEY, b"of blue")
        assert reds.volume("red").get(KEY) is None
        assert reds.volume("red").put(KEY, b"of red")
        assert blues.volume("blue").get(KEY) == b"of blue"
        for pool, foreign in ((blues, "red"), (reds, "blue"), (reds, "kv")):
            with pytest.raises(UnknownVolume):
                pool.volume(foreign).exists([KEY])
        for pool, own in ((blues, "blue"), (reds, "red")):
            assert [each["name"] for each in pool.stats()["volumes"]] == [own]
    for machine, own, foreign in ((blue, "blue", "red"), (red, "red", "blue")):
        machine.client.walk(f"kv/{own}")
        with pytest.raises(FileNotFoundError):
            machine.client.walk(f"kv/{foreign}")
    room = blue.memory.room(4096)
    room.view[:] = b"b" * 4096
    folder = blue.client.walk("fs").number
    node, handle = create(blue.client, folder, b"of blue")
    assert blue.client.write_from(node.number, handle, 0, room) == 4096
    theirs = red.client.walk("fs").number
    assert {each.name for each in entries(red.client, theirs)} <= {b".", b".."}
    for name in (b"of blue", b"blue", b"..", b"../blue"):
        with pytest.raises(OSError):
            red.client.lookup(theirs, name)
    # And by guessing: numbers of nodes and handles that blue was told of.
    other = red.memory.room(4096)
    for wrong in (
        lambda: attributes_of(red.client, node.number),
        lambda: red.client.open(node.number),
        lambda: red.client.lookup(folder, b"of blue") if folder != theirs else red.client.open(node.number),
        lambda: red.client.read_into(node.number, handle, 0, other),
        lambda: red.client.write_from(node.number, handle, 0, other),
        lambda: unlink(red.client, folder if folder != theirs else node.number, b"of blue"),
    ):
        with pytest.raises(OSError):
            wrong()
    assert other.view == bytes(4096)
    forget(red.client, node.number, 100)
    assert blue.client.read_into(node.number, handle, 0, room) == 4096
    assert room.view == b"b" * 4096
    blue.client.release(node.number, handle)
