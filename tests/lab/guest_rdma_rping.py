"""librdmacm's rping on the kernel's rxe against the emulator, both ways: connections, SEND, READ, WRITE."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulator.roce.runtime.device import Device
from tests.support.lab.kernel_host import run
from tests.support.lab.rdma_cable import KERNEL, OURS
from tests.support.processes import Processes
from tests.support.roce.rping_peer import RpingServer, rping_client
from tests.support.waiting import wait_until

PORT = 7174
ROUNDS = 10
SIZE = 5000
"""Several packets of the RoCE MTU, and no multiple of it."""

SECONDS = 240.0


@pytest.fixture
def server(far_nic: Device) -> Iterator[RpingServer]:
    listening = RpingServer(OURS, PORT)
    yield listening
    listening.close()


def test_the_kernels_client(server: RpingServer, processes: Processes) -> None:
    client = processes.start(
        ["rping", "-c", "-V", "-a", OURS, "-p", str(PORT), "-C", str(ROUNDS), "-S", str(SIZE)]
    )
    texts = server.serve(SIZE, ROUNDS, lambda: client.process.wait(SECONDS))
    assert client.process.returncode == 0, client.output
    assert len(texts) == ROUNDS
    assert texts[0].startswith(b"rdma-ping-0: ABCDEFGHIJ")
    assert texts[-1].startswith(f"rdma-ping-{ROUNDS - 1}: ".encode())
    assert {len(text) for text in texts} == {SIZE}


def test_the_kernels_server(far_nic: Device, processes: Processes) -> None:
    server = processes.start(
        ["rping", "-s", "-v", "-a", KERNEL, "-p", str(PORT), "-C", str(ROUNDS), "-S", str(SIZE)]
    )
    listening = f"{KERNEL}:{PORT}"
    wait_until(lambda: listening in run("rdma", "resource", "show", "cm_id"), SECONDS, listening)
    texts = [f"from user space {number}: ".encode() + bytes(SIZE - 20) for number in range(ROUNDS)]
    assert rping_client(OURS, KERNEL, PORT, texts) == texts
    assert server.process.wait(SECONDS) == 0, server.output
    said = [f"server ping data: from user space {number}: " for number in range(ROUNDS)]
    assert [line for line in server.output.splitlines() if "ping data" in line] == said
