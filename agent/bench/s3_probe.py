"""How fast four clients get objects of 1 MiB by the S3 door, and what a get costs the agent's processors."""

import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from agent.bench.client_process import LineClient, speed
from agent.bench.contents import Contents
from agent.bench.fault_probes import pool_up
from agent.bench.s3_client import VALUE_BYTES, S3Client
from agent.bench.single_probes import Counted
from agent.cli.up.agent_toml import S3_BUCKET
from agent.cli.up.layout import Layout
from agent.s3.credentials import read_credentials_file

CLIENTS = 4
"""Processes, so that the clients share no interpreter."""
OBJECTS = 48
ROUNDS = 5
ROUND_SECONDS = 1.0
WARM_SECONDS = 0.3


def measure(folder: Path) -> dict[str, Counted]:
    """`s3_get_1m`, on a pool of its own below `folder`."""
    with pool_up(folder, 1, "--s3", "--files", "--drive-size", "512M") as layout, ExitStack() as undo:
        port = int(layout.s3_port.read_text())
        _put(layout, port)
        clients = [_started(undo, layout, port, folder / f"client-{number}.log") for number in range(CLIENTS)]
        clients[0].ask("compare")
        with ThreadPoolExecutor(CLIENTS) as threads:

            def round_of(seconds: float) -> tuple[float, int]:
                """GiB/s of all clients, and their gets."""
                samples = [
                    speed(answer) for answer in threads.map(lambda each: each.ask("get", seconds), clients)
                ]
                return sum(sample.value for sample in samples), sum(sample.operations for sample in samples)

            round_of(WARM_SECONDS)
            before = _agent_seconds(layout)
            rounds = [round_of(ROUND_SECONDS) for _ in range(ROUNDS)]
            taken = _agent_seconds(layout) - before
    value, gets = statistics.median(each for each, _ in rounds), sum(count for _, count in rounds)
    details = {
        "clients": CLIENTS,
        "gets": gets,
        "gets_per_second": value * (1 << 30) / VALUE_BYTES,
        "agent_cpu_ms_per_get": taken * 1e3 / gets,
    }
    return {"s3_get_1m": Counted(value, details)}


def _put(layout: Layout, port: int) -> None:
    contents = Contents(VALUE_BYTES)
    client = S3Client(port, read_credentials_file(layout.s3_credentials, "default")[0], S3_BUCKET)
    try:
        for number in range(OBJECTS):
            client.put(str(number), contents.value(number))
    finally:
        client.close()


def _started(undo: ExitStack, layout: Layout, port: int, log: Path) -> LineClient:
    words = [str(port), str(layout.s3_credentials), S3_BUCKET, str(OBJECTS)]
    client = LineClient("a client of S3", [sys.executable, "-P", "-m", "agent.bench.s3_client", *words], log)
    undo.callback(client.stop)
    return client


def _agent_seconds(layout: Layout) -> float:
    """Processor time of the agent so far, all its threads together."""
    process = int((layout.state / "agent-process.pid").read_text())
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
