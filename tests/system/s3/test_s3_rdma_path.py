"""The whole path of objects by RDMA: `g35 up --s3 --s3-rdma`, its status, an agent that is killed."""

from __future__ import annotations

import http.client
import random
from pathlib import Path

from agent.bench.s3_rdma_client import Refused, S3RdmaClient
from agent.s3.credentials import read_credentials_file
from nvmeof.transport.verbs_provider import free_loopback_address
from tests.support.engines.s3_served import EMULATED
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes
from tests.support.waiting import wait_until

DATA = random.Random(58).randbytes(2_300_007)


def client_of(up: PoolUp) -> S3RdmaClient:
    [key] = read_credentials_file(up.state / "s3.credentials", "default")
    port = int((up.state / "s3.port").read_text())
    return S3RdmaClient("127.0.0.1", port, key, EMULATED, free_loopback_address())


def connects(client: S3RdmaClient) -> bool:
    try:
        client.connect()
    except (Refused, OSError, http.client.HTTPException):
        return False
    return True


def test_objects_go_by_rdma_and_clients_connect_again_after_an_agent_was_killed(
    processes: Processes, tmp_path: Path
) -> None:
    up = PoolUp(
        processes, tmp_path / "state", "--s3", "--s3-rdma", "--drive-size", "256M", "--enclosures", "1"
    )
    try:
        address = (up.state / "s3.address").read_text().strip()
        assert f"RDMA at {address}" in up.process.output
        with client_of(up) as client:
            client.connect()
            out = client.register(memoryview(bytearray(DATA)))
            into = client.register(memoryview(bytearray(len(DATA))))
            client.put("/kvcache/a", out, len(DATA))
            assert client.get("/kvcache/a", into) == len(DATA)
            assert into.view == out.view
            status = up.status()["s3"]
            assert (status["rdma"], status["rdma_connections"]) == (address, 1)
            assert status["rdma_bytes_read"] == status["rdma_bytes_written"] == len(DATA)
            pid = up.kill("agent-process")
            up.wait_restarted("agent-process", pid)
        with client_of(up) as client:
            wait_until(lambda: connects(client), 60, "the S3 door to answer again")
            into = client.register(memoryview(bytearray(len(DATA))))
            assert client.get("/kvcache/a", into) == len(DATA)
            assert into.view == DATA
    finally:
        up.down()
