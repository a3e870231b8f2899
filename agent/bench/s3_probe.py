"""How fast four clients get objects of 1 MiB by the S3 door, over HTTP and by RDMA, and at what cost."""

import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from agent.bench.client_process import LineClient, speed
from agent.bench.contents import Contents
from agent.bench.fault_probes import small_pool
from agent.bench.processor_time import process_seconds
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


WAYS = {"s3_get_1m": "s3_client", "s3_rdma_get_1m": "s3_rdma_load"}


def measure(folder: Path) -> dict[str, Counted]:
    """`s3_get_1m` and `s3_rdma_get_1m`, in turn on a pool of their own below `folder`."""
    options = ("--s3", "--s3-rdma", "--files", "--drive-size", "512M")
    with (
        small_pool(folder, 1, *options) as layout,
        ExitStack() as undo,
        ThreadPoolExecutor(CLIENTS) as threads,
    ):
        port, agent = int(layout.s3_port.read_text()), int(layout.agent_process.read_text())
        _put(layout, port)
        crowds = {}
        for name, module in WAYS.items():
            logs = [folder / f"{module}-{number}.log" for number in range(CLIENTS)]
            crowds[name] = crowd = Crowd([_started(undo, layout, module, port, log) for log in logs], threads)
            crowd.clients[0].ask("compare")
            crowd.round(WARM_SECONDS)
        for _ in range(ROUNDS):
            for crowd in crowds.values():
                before = process_seconds(agent)
                crowd.rounds.append(crowd.round(ROUND_SECONDS))
                crowd.agent_seconds += process_seconds(agent) - before
    return {name: crowd.counted() for name, crowd in crowds.items()}


class Crowd:
    """Clients that get objects by one way, all at once."""

    def __init__(self, clients: list[LineClient], threads: ThreadPoolExecutor) -> None:
        self.clients, self._threads = clients, threads
        self.rounds: list[tuple[float, int]] = []
        self.agent_seconds = 0.0

    def round(self, seconds: float) -> tuple[float, int]:
        """GiB/s of all clients, and their gets."""
        answers = self._threads.map(lambda each: each.ask("get", seconds), self.clients)
        samples = [speed(answer) for answer in answers]
        return sum(sample.value for sample in samples), sum(sample.operations for sample in samples)

    def counted(self) -> Counted:
        value, gets = (
            statistics.median(each for each, _ in self.rounds),
            sum(count for _, count in self.rounds),
        )
        details = {
            "clients": CLIENTS,
            "gets": gets,
            "gets_per_second": value * (1 << 30) / VALUE_BYTES,
            "agent_cpu_ms_per_get": self.agent_seconds * 1e3 / gets,
        }
        return Counted(value, details)


def _put(layout: Layout, port: int) -> None:
    contents = Contents(VALUE_BYTES)
    client = S3Client(port, read_credentials_file(layout.s3_credentials, "default")[0], S3_BUCKET)
    try:
        for number in range(OBJECTS):
            client.put(str(number), contents.value(number))
    finally:
        client.close()


def _started(undo: ExitStack, layout: Layout, module: str, port: int, log: Path) -> LineClient:
    words = [str(port), str(layout.s3_credentials), S3_BUCKET, str(OBJECTS)]
    client = LineClient(
        f"a client of S3 ({module})", [sys.executable, "-P", "-m", f"agent.bench.{module}", *words], log
    )
    undo.callback(client.stop)
    return client
