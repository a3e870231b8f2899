"""A block device of this kernel as a server's own SSD: the agent beside it, verbs elsewhere, and the kernel's
own host on the agent's export. The SSD is a disk of nvmet, which this kernel reaches as /dev/nvmeXn1: so it
can be pulled, as long as it is in use, and put back with what lies on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent.local.device import read_label
from agent.local.export import subsystem_nqn
from agent.local.label import NAMESPACE_START, Label
from host_shim.pool import Pool
from tests.support.lab import kernel_host
from tests.support.lab.kernel_host import KernelController, run
from tests.support.lab.kernel_target import KernelTarget
from tests.support.lab.lab_enclosure import MEBIBYTE, read_directly, write_directly
from tests.support.local_rig import ENCLOSURE, value_of
from tests.support.processes import Processes, Started
from tests.support.verbs_here import status_of
from tests.support.waiting import wait_until

# Emulated, and beside other work, Python takes its time to start.
START_S = 480.0
WAIT_S = 240.0
PORT = 4431
KEYS = [random.Random(f"SSD {number}").randbytes(16) for number in range(4)]

AGENT = """
[agent]
mount = "{folder}/mount"
state = "{folder}/state-{name}"
key_file = "{folder}/key"
workers = 1
read_deadline_ms = 20000
write_deadline_ms = 60000
[[volumes]]
name = "kv"
value_size = "64K"
share = 0.5
"""
LOCAL = """
[[local]]
path = "{folder}/ssd"
export = "127.0.0.1:{port}"
"""


@dataclass(slots=True)
class Server:
    """A machine with an SSD, and the agent beside it."""

    folder: Path
    target: KernelTarget
    processes: Processes
    ssd: KernelController = field(init=False)
    agent: Started = field(init=False)

    def plug_in(self) -> None:
        """The kernel may give the SSD another name than before."""
        self.ssd = kernel_host.connect(self.target.nqn, self.target.port, queues=1)
        link = self.folder / "ssd"
        link.unlink(missing_ok=True)
        link.symlink_to(self.ssd.wait_for_namespace(1))

    @property
    def device(self) -> Path:
        return (self.folder / "ssd").resolve()

    @property
    def label(self) -> Label:
        return read_label(self.device)

    @property
    def nqn(self) -> str:
        host = uuid.UUID((self.folder / "state-here/host_id").read_text().strip())
        return subsystem_nqn(host.bytes, self.label.nguid)

    def verb(self, *words: str, name: str = "here") -> int:
        return status_of(*words, "--config", str(self.folder / f"{name}.toml"))

    def configure(self, name: str, table: str) -> None:
        path = self.folder / f"{name}.toml"
        path.write_text(AGENT.format(folder=self.folder, name=name) + table)

    def start(self) -> None:
        self.agent = self.processes.g35("agent", "--config", self.folder / "here.toml")
        self.agent.wait_for_line("ready", START_S)

    def unmount(self) -> None:
        with contextlib.suppress(AssertionError):  # none is there
            run("umount", "--lazy", self.folder / "mount")

    def get(self) -> list[bytes | None]:
        """All values. Never a wrong byte."""
        with Pool(self.folder / "mount") as pool:
            got = [pool.volume("kv").get(key) for key in KEYS]
        assert all(each in (None, value_of(key)) for each, key in zip(got, KEYS, strict=True))
        return got

    def serves_all(self) -> bool:
        return None not in self.get()

    def put(self) -> bool:
        with Pool(self.folder / "mount") as pool:
            return all([pool.volume("kv").put(key, value_of(key)) for key in KEYS])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    processes = Processes(folder)
    with KernelTarget() as target:
        target.add_namespace(1, mebibytes=64)
        server = Server(folder, target, processes)
        server.plug_in()
        server.configure("here", LOCAL.format(folder=folder, port=PORT))
        try:
            assert status_of("key", "new", str(folder / "key")) == 0
            assert server.verb("pool", "format") == 0
            server.start()
            wait_until(server.put, WAIT_S, "puts beside the SSD")
            yield server
            assert server.agent.stop(60) == 0, server.agent.output
            assert "Traceback" not in server.agent.output
        finally:
            processes.end_all()
            server.unmount()
            kernel_host.disconnect_all()


def test_the_agent_and_the_kernels_host_see_one_medium(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server.serves_all()
    assert "no direct I/O" not in server.agent.output
    label = server.label
    host = kernel_host.connect(server.nqn, PORT, queues=1)
    exported = host.wait_for_namespace(1)
    told = host.identify_namespace(1)
    assert (told["nguid"], told["nsze"]) == (label.nguid.hex(), label.size // 4096)
    start = NAMESPACE_START // 4096
    assert read_directly(exported, 2048) == read_directly(server.device, 2048, skip=start)
    # The volume has the first half. In the last mebibytes the kernel may write, on either side.
    last, payload = label.size // MEBIBYTE - 1, os.urandom(2 * MEBIBYTE)
    write_directly(exported, payload[:MEBIBYTE], seek=last)
    write_directly(server.device, payload[MEBIBYTE:], seek=last)  # its mebibyte before, for the label is one
    for device, skip in ((exported, 0), (server.device, start)):
        there = read_directly(device, 512, skip=(last - 1) * 256 + skip)
        assert there == payload[MEBIBYTE:] + payload[:MEBIBYTE]
    host.disconnect()
    # A verb of another server goes by the export, too.
    server.configure("elsewhere", ENCLOSURE.format(name="server", port=PORT, nqn=server.nqn))

    def shown() -> list[dict[str, Any]]:
        """Where the guest is slow, a verb may give up before the agent has answered."""
        capsys.readouterr()
        is_whole = server.verb("pool", "show", "--json", name="elsewhere") == 0
        rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["namespaces"] if is_whole else []
        return rows

    (row,) = wait_until(shown, WAIT_S, "the namespace by the export")
    assert row["nguid"] == label.nguid.hex()


def test_a_pulled_device_is_misses_until_it_is_back(server: Server) -> None:
    label = server.label
    host = kernel_host.connect(server.nqn, PORT, queues=1)
    host.wait_for_namespace(1)
    server.ssd.disconnect()
    assert server.get() == [None] * len(KEYS)
    host.wait_for_no_namespace(1)
    server.plug_in()
    assert server.label == label
    wait_until(server.serves_all, WAIT_S, "the values beside the SSD")
    host.wait_for_namespace(1)
    host.disconnect()


# A second start of the agent is most of what this file takes, and tests/system/local has one on a file.
@pytest.mark.nightly
def test_the_label_outlives_the_agent(server: Server) -> None:
    label = server.label
    server.agent.kill()
    server.unmount()
    server.start()
    assert server.label == label
    wait_until(server.serves_all, WAIT_S, "the values beside the SSD")
