"""Other stores' clients and servers as processes, and the loop whose hold-ups are measured."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent.bench import loop_probe
from agent.bench.client_process import LineClient, speed
from agent.bench.loop_client import Ticker, Ticks
from agent.bench.redis_site import NotHere
from agent.bench.rounds import Sample
from agent.bench.sites import interpreter, linked_packages
from agent.errors import G35Error
from tests.support.needs import NO_NETWORK, needs_mount
from tests.support.processes import Processes
from tests.support.waiting import wait_until

SCRIPTED_PEER = """
import os
from agent.bench.peers.lines import talk

class Lane:
    def __init__(self, values):
        self.values = values
    def get(self, name):
        return memoryview(self.values[name])
    def put(self, name, value):
        self.values[name] = value
    def remove(self, name):
        del self.values[name]

class Store:
    def __init__(self):
        self.values = {}
        os.write(1, b"what an engine's library prints\\n")
    def new_buffer(self, size):
        return memoryview(bytearray(size))
    def made_ready(self, value):
        return bytes(value)
    def done_with(self, ready):
        pass
    def lane(self, value_bytes):
        return Lane(self.values)
    def close(self):
        open(os.environ["CLOSED"], "w").close()

talk(Store)
"""


def test_a_client_answers_line_by_line_and_ends_with_its_input(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, log = tmp_path / "closed", tmp_path / "log"
    monkeypatch.setenv("CLOSED", str(closed))
    monkeypatch.setenv("PYTHONPATH", str(repository))
    client = LineClient("the scripted peer", [sys.executable, "-P", "-c", SCRIPTED_PEER], log)
    try:
        client.ask("prepare", bytes=4096, values=16, puts=8)
        for verb in ("get", "put"):

            def measured(verb: str = verb) -> Sample | None:
                """On a busy machine the time may be over before the first operation."""
                sample = speed(client.ask(verb, 0.02, bytes=4096, in_flight=4))
                return sample if sample.operations else None

            sample = wait_until(measured, what="an operation")
            assert sample is not None
            assert sample.bytes == sample.operations * 4096 == len(sample.latencies) * 4096 > 0
        with pytest.raises(G35Error, match="the scripted peer: KeyError: 65536"):
            client.ask("get", 0.02, bytes=65536, in_flight=4)
        client.ask("get", 0.02, bytes=4096, in_flight=1)  # a question too many has cost it nothing
    finally:
        client.stop()
    assert closed.exists()
    assert log.read_text() == "what an engine's library prints\n"


def test_a_client_that_cannot_be_had_here_says_so(tmp_path: Path) -> None:
    said = 'print(\'{"not_here": "no such thing"}\')'
    with pytest.raises(NotHere, match="no such thing"):
        LineClient("the scripted peer", [sys.executable, "-c", said], tmp_path / "log")
    with pytest.raises(G35Error, match="the scripted peer ended: it is full"):
        LineClient("the scripted peer", [sys.executable, "-c", "exit('it is full')"], tmp_path / "log")


def test_a_network_of_its_own_has_a_loopback_and_nothing_else() -> None:
    told = subprocess.run(
        [
            sys.executable, "-P", "-c",
            "import socket\n"
            "from agent.bench.peers.servers import enter_own_network\n"
            "enter_own_network()\n"
            "server = socket.create_server(('0.0.0.0', 0))\n"
            "socket.create_connection(('127.0.0.1', server.getsockname()[1])).close()\n"
            "print([name for _, name in socket.if_nameindex()])",
        ],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    if "no network of its own" in told.stderr:
        pytest.skip(NO_NETWORK)
    assert told.returncode == 0, told.stderr
    assert "lo" in told.stdout
    assert "eth0" not in told.stdout


def test_an_engines_interpreter_finds_our_packages(tmp_path: Path) -> None:
    """Asked twice, as for two figures of one store; with nothing that is installed beside us."""
    path = linked_packages(tmp_path)
    assert linked_packages(tmp_path) == path
    subprocess.run(
        [sys.executable, "-S", "-P", "-c", "import agent.bench.peers, agent.errors"],
        check=True, cwd="/", env={"PYTHONPATH": str(path)}, timeout=60,
    )  # fmt: skip


async def five_more(ticks: Ticks) -> None:
    enough = len(ticks.late) + 5
    while len(ticks.late) < enough:  # noqa: ASYNC110 - the ticker is not to know of events
        await asyncio.sleep(0)


def test_a_ticker_sees_what_holds_up_its_loop() -> None:
    async def held_up() -> Ticks:
        ticks, loop = Ticks(), asyncio.get_running_loop()
        ticker = Ticker(ticks)
        ticker.start(loop)
        try:
            await five_more(ticks)
            end = time.monotonic() + 0.05
            while time.monotonic() < end:
                pass  # what a call that blocks does to a loop
            await five_more(ticks)
        finally:
            ticker.stop(loop)
        return ticks

    said = asyncio.run(held_up()).said()
    assert max(late_ms for _, late_ms in said["late"]) >= 45
    assert said["ticks"] >= 10


@needs_mount
def test_a_loop_that_calls_host_shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That it is measured; how long it takes is for a quiet machine to say."""
    for name, value in (("MEASURE_SECONDS", 1.0), ("VALUE_BYTES", 64 << 10), ("DRIVE_BYTES", 64 << 20)):
        monkeypatch.setattr(loop_probe, name, value)
    counted = loop_probe.measure(tmp_path / "loop")["shim_loop_block_ms"]
    assert counted.details["calls"] > 0
    assert counted.details["ticks"] > 0
    # 0 where the machine did something else whenever a tick was late.
    assert 0 <= counted.value <= counted.details["with_the_machine_ms"]
    assert counted.details["watching_ticks"] > 0
    assert counted.details["watching_ms"] >= 0, "0 where no tick was late"


@pytest.mark.parametrize("peer", ["mooncake", "lm"])
def test_a_real_peer(peer: str, processes: Processes, tmp_path: Path) -> None:
    try:
        interpreter(peer)
    except NotHere as why:
        pytest.skip(f"{peer}: {why}")
    target, names = tmp_path / "bench.json", [f"{peer}_get_64k_x4", f"{peer}_put_64k_x1"]
    bench = processes.g35(
        "bench", *names, "--seconds", "0.2", "--json", target, environment={"TMPDIR": str(tmp_path)}
    )
    assert bench.process.wait(180) == 0, bench.output
    if "no network of its own" in bench.output:
        pytest.skip(NO_NETWORK)
    found = {record["name"]: record for record in json.loads(target.read_text())}
    assert set(found) == {*names, "raw_tcp_64k"}
    for name in names:
        assert found[name]["value"] > 0
        assert found[name]["bytes"] == found[name]["operations"] * (64 << 10)
        assert 0 < found[name]["p50_ms"] <= found[name]["p99_ms"]
    assert not list(tmp_path.glob("g35-bench-*"))
