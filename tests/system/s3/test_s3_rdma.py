"""Objects by RDMA: a door and a client, each with an emulated NIC."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.bench.s3_rdma_client import S3RdmaClient
from agent.s3.credentials import AccessKey
from nvmeof.transport.verbs_provider import free_loopback_address
from tests.support.engines.s3_served import EMULATED, KEY, Served, served

DATA = random.Random(20).randbytes(2_500_001)


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[Served]:
    address = free_loopback_address()
    with served(tmp_path, rdma=address, rdma_connections=8, transfers=4) as made:
        yield made


@pytest.fixture
def client(s3: Served) -> Iterator[S3RdmaClient]:
    with client_of(s3) as made:
        made.connect()
        yield made


def client_of(s3: Served, key: AccessKey = KEY) -> S3RdmaClient:
    return S3RdmaClient("127.0.0.1", s3.port, key, EMULATED, free_loopback_address())


def test_an_object_goes_there_and_comes_back(s3: Served, client: S3RdmaClient) -> None:
    out, back = client.register(memoryview(bytearray(DATA))), client.register(memoryview(bytearray(3 << 20)))
    client.put("/blocks/a", out, len(DATA))
    assert client.get("/blocks/a", back) == len(DATA)
    assert back.view[: len(DATA)] == DATA
    assert not any(back.view[len(DATA) :])
    assert s3.client().get_object(Bucket="blocks", Key="a")["Body"].read() == DATA
