"""The whole path: `g35 up --s3`, an agent killed in the middle of a PUT, flash that returns wrong bits."""

from __future__ import annotations

import configparser
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from agent.s3.credentials import read_credentials_file
from tests.support.engines.s3_served import boto_client, signed_head
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes
from tests.support.waiting import wait_until

DATA = random.Random(8).randbytes(3_500_000)


@pytest.fixture
def up(processes: Processes, tmp_path: Path) -> Iterator[PoolUp]:
    made = PoolUp(processes, tmp_path / "state", "--s3", "--drive-size", "256M", "--enclosures", "1")
    yield made
    made.down()


def client_of(up: PoolUp) -> Any:
    found = configparser.ConfigParser()
    found.read(up.state / "s3.credentials")
    port = (up.state / "s3.port").read_text().strip()
    keys = found["default"]
    return boto_client(f"http://127.0.0.1:{port}", keys["aws_access_key_id"], keys["aws_secret_access_key"])


def serves(client: Any) -> bool:
    try:
        client.head_bucket(Bucket="kvcache")
    except (BotoCoreError, ClientError):
        return False
    return True


def test_an_object_is_whole_or_not_there_whatever_happens_to_agent_and_flash(up: PoolUp) -> None:
    client = client_of(up)
    assert (up.state / "s3.credentials").stat().st_mode & 0o777 == 0o600
    assert str(up.state / "s3.credentials") in up.process.output
    client.put_object(Bucket="kvcache", Key="kept", Body=DATA)
    client.put_object(Bucket="kvcache", Key="replaced", Body=DATA[::-1])
    [key] = read_credentials_file(up.state / "s3.credentials", "default")
    port = int((up.state / "s3.port").read_text())
    half = []
    for name in ("new", "replaced"):
        connection = socket.create_connection(("127.0.0.1", port), timeout=10)
        head, _ = signed_head("PUT", f"/kvcache/{name}", {"content-length": str(len(DATA))}, key=key)
        connection.sendall(head + DATA[: 2 << 20])
        half.append(connection)
    wait_until(lambda: up.status()["s3"]["connections"] >= 3)
    pid = up.kill("agent-process")
    for connection in half:
        connection.close()
    up.wait_restarted("agent-process", pid)
    client = client_of(up)
    wait_until(lambda: serves(client), 60, "the S3 door to answer again")
    assert [each["Key"] for each in client.list_objects_v2(Bucket="kvcache")["Contents"]] == [
        "kept",
        "replaced",
    ]
    assert client.get_object(Bucket="kvcache", Key="kept")["Body"].read() == DATA
    assert client.get_object(Bucket="kvcache", Key="replaced")["Body"].read() == DATA[::-1]
    status = up.status()["s3"]
    assert (status["objects"], status["tls"]) == (2, False)
    for drive in (0, 1):
        up.fault(0, "flip", drive=drive, bits=4096, on_read=True)
    for name in ("kept", "replaced"):
        with pytest.raises((ClientError, BotoCoreError)):
            client.get_object(Bucket="kvcache", Key=name)["Body"].read()
