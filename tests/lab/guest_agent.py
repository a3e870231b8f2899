"""The agent on the kernel's nvmet: the whole path with somebody else's enclosure under it, over TCP, by RDMA
on an emulated NIC at the far end of a cable, and by RDMA on the kernel's rxe.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from host_shim.pool import Pool
from tests.support.lab.kernel_host import drop_caches, run
from tests.support.lab.kernel_target import ADDRESS, KernelTarget
from tests.support.lab.rdma_cable import KERNEL, OURS, far_device, inside
from tests.support.processes import Processes, Started
from tests.support.verbs_here import status_of
from tests.support.waiting import wait_until

# Emulated, Python takes its time to start.
START_S = 480.0
REACHED_AGAIN_S = 240.0
"""Beside other work the emulated machine loses its sessions at times. That is a miss, or EIO, until they are
back; wrong bytes are never right."""
VALUE_BYTES = 200_000
WORKERS = 2

CONFIGURATION = """
[agent]
mount = "{folder}/mount"
state = "{folder}/state"
key_file = "{folder}/key"
workers = {workers}
read_deadline_ms = 20000
write_deadline_ms = 60000

[fabric]
verbs_provider = "{provider}"
local_address = "{local_address}"

[[enclosures]]
name = "kernel"
transport = "{transport}"
address = "{address}"
port = {port}
nqn = "{nqn}"

[[volumes]]
name = "kv"
value_size = "256K"
share = 0.5

[[volumes]]
name = "files"
kind = "files"
value_size = "256K"
share = 0.4
"""


@dataclass(frozen=True, slots=True)
class RunningAgent:
    process: Started
    mount: Path
    target: KernelTarget


@dataclass(frozen=True, slots=True)
class Fabric:
    """How the agent reaches the kernel."""

    transport: str = "tcp"
    target_address: str = ADDRESS
    provider: str = "pyverbs"
    local_address: str = ""


OVER_EMULATOR = Fabric("rdma", KERNEL, "emulator.roce.pyverbs", OURS)
FABRICS = {"tcp": Fabric(), "emulator": OVER_EMULATOR, "rxe": Fabric("rdma", KERNEL, "pyverbs", KERNEL)}


def all_workers_reach(mount: Path) -> bool:
    """Whether puts come through, as many at a time as there are workers, so that each worker has had some.
    One at a time may all be had by the same one.

    A worker connects its queue beside its work, and what would use it before is a miss. Emulated, and beside
    other work, that takes seconds.
    """
    value = bytes(VALUE_BYTES)
    with Pool(mount) as pool, ThreadPoolExecutor(WORKERS) as clients:
        volume = pool.volume("kv")
        return all(clients.map(lambda at: volume.put(b"is it connected%d" % at, value), range(10)))


def start_agent(processes: Processes, configuration: Path, far: bool) -> Started:
    """As a service manager does: started again where it ends, for it waits five seconds for an enclosure,
    two for the answer to an RDMA connect, and one for a queue.

    Emulated, and beside other work, these take as long at times: a slow machine needs many starts in a row.
    """
    give_up = time.monotonic() + START_S
    while True:
        with inside() if far else contextlib.nullcontext():
            process = processes.g35("agent", "--config", configuration)
        try:
            process.wait_for_line("ready", START_S)
        except AssertionError:
            if process.running or time.monotonic() > give_up:
                raise
        else:
            return process


def format_pool(configuration: Path, far: bool) -> None:
    """Again where it does not get through, as above: it waits no longer, and has changed nothing then."""
    give_up = time.monotonic() + START_S
    while True:
        said = io.StringIO()
        with far_device() if far else contextlib.nullcontext(), contextlib.redirect_stderr(said):
            status = status_of("pool", "format", "--config", str(configuration))
        if status == 0:
            return
        assert re.search("not connected|cannot be read", said.getvalue()), said.getvalue()
        assert time.monotonic() < give_up, said.getvalue()


# What is particular to rxe is below the host role, and guest_our_host.py has that on rxe each time.
EACH_FABRIC = [pytest.param(name, marks=pytest.mark.nightly if name == "rxe" else ()) for name in FABRICS]


@pytest.fixture(scope="module", params=EACH_FABRIC)
def agent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """One agent for all tests of a fabric, on two namespaces of the kernel's target."""
    fabric = FABRICS[request.param]
    if fabric.transport == "rdma":
        request.getfixturevalue("cable")
    folder = tmp_path_factory.mktemp("agent")
    configuration, mount = folder / "g35.toml", folder / "mount"
    processes = Processes(folder)
    far = fabric is OVER_EMULATOR
    with KernelTarget(address=fabric.target_address, transport=fabric.transport) as target:
        for nsid in (1, 2):
            target.add_namespace(nsid, mebibytes=128)  # taken from the guest's memory as it is written
        configuration.write_text(
            CONFIGURATION.format(
                folder=folder,
                workers=WORKERS,
                provider=fabric.provider,
                local_address=fabric.local_address,
                transport=fabric.transport,
                address=target.address,
                port=target.port,
                nqn=target.nqn,
            )
        )
        try:
            assert status_of("key", "new", str(folder / "key")) == 0
            format_pool(configuration, far)
            process = start_agent(processes, configuration, far)
            wait_until(lambda: all_workers_reach(mount), START_S, "the workers' queues to be connected")
            yield RunningAgent(process, mount, target)
            assert process.stop(60) == 0, process.output
            assert not mount.is_mount()
        finally:
            processes.end_all()
            if mount.is_mount():
                run("umount", "--lazy", mount)


def test_values_come_back(agent: RunningAgent) -> None:
    keys = [number.to_bytes(16, "big") for number in range(8)]
    contents = [os.urandom(VALUE_BYTES) for _ in keys]
    with Pool(agent.mount) as pool:
        volume = pool.volume("kv")

        def come_back() -> bool:
            if not all(volume.put(key, content) for key, content in zip(keys, contents, strict=True)):
                return False
            found = [volume.get(key) for key in keys]
            assert all(each in (None, content) for each, content in zip(found, contents, strict=True)), (
                "wrong bytes"
            )
            return None not in found

        wait_until(come_back, REACHED_AGAIN_S, "all values to be served")
        assert volume.exists([*keys, b"never stored 0000"[:16]]) == [True] * len(keys) + [False]


def test_files_come_back(agent: RunningAgent) -> None:
    content = os.urandom(1_500_000)
    (agent.mount / "fs" / "folder").mkdir()
    file = agent.mount / "fs" / "folder" / "file"

    def comes_back() -> bool:
        try:
            file.write_bytes(content)
            with file.open("rb") as written:
                os.fsync(written.fileno())
            drop_caches()
            found = file.read_bytes()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False
        assert found == content
        return True

    wait_until(comes_back, REACHED_AGAIN_S, "the file to be served")


def test_an_enclosure_that_goes_and_comes_back(agent: RunningAgent) -> None:
    key, content = b"survives an hour", os.urandom(VALUE_BYTES)
    with Pool(agent.mount) as pool:
        volume = pool.volume("kv")
        wait_until(lambda: volume.put(key, content), REACHED_AGAIN_S, "the value to be stored")
        agent.target.withdraw()
        try:
            assert volume.get(key) is None, "down is a miss"
        finally:
            agent.target.offer()
        wait_until(lambda: volume.get(key) == content, REACHED_AGAIN_S, "the value to be served again")
