"""Objects by RDMA: the kernel's rxe at one end and the emulated NIC at the other, either one the door's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.bench.s3_rdma_client import Refused, S3RdmaClient
from tests.support.engines.s3_served import EMULATED, KEY, served
from tests.support.lab.rdma_cable import KERNEL, OURS, Cable, far_device

DATA = os.urandom(150_001)
ROOM = 1 << 18
GUARD = b"\xa5" * 4096


@pytest.fixture(params=["door-on-rxe", "client-on-rxe"])
def client(request: pytest.FixtureRequest, cable: Cable, tmp_path: Path) -> Iterator[S3RdmaClient]:
    """Requests go over loopback, and bytes over the cable."""
    ends = [("pyverbs", KERNEL), (EMULATED, OURS)]
    door, own = ends if request.param == "door-on-rxe" else ends[::-1]
    with (
        far_device(),
        served(tmp_path, door[0], rdma=door[1], rdma_clients=("10.77.0.0/24",), transfers=2) as s3,
        S3RdmaClient("127.0.0.1", s3.port, KEY, *own, source="127.0.0.1") as made,
    ):
        made.connect()
        yield made


def test_an_object_goes_there_and_comes_back_and_a_wrong_key_is_refused(client: S3RdmaClient) -> None:
    out = client.register(memoryview(bytearray(DATA)))
    whole = memoryview(bytearray(GUARD + bytes(ROOM) + GUARD))
    into = client.register(whole[len(GUARD) : len(GUARD) + ROOM])
    client.put("/blocks/a", out, len(DATA))
    assert client.get("/blocks/a", into) == len(DATA)
    assert whole == GUARD + DATA + bytes(ROOM - len(DATA)) + GUARD
    for address, key in ((into.address, into.rkey ^ 0x100), (into.address + ROOM - 4096, into.rkey)):
        token = f"rc:{client.session}:{address:x}:{ROOM:x}:{key:x}"
        with pytest.raises(Refused, match="device refused"):
            client.request("GET", "/blocks/a", {"x-amz-rdma-token": token})
        assert whole[: len(GUARD)] == whole[-len(GUARD) :] == GUARD
        client.connect()
    assert client.get("/blocks/a", into) == len(DATA)
