"""G4 in a bucket: a stranger's S3 server (moto) and our own door, well and spoilt."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from agent.pool.counters import MissCause
from agent.spill.names import bundle_name, volume_prefix
from agent.spill.s3_target import S3Target
from agent.spill.target import Gone, Taken, TargetError
from tests.support.engines.faulty_http import FaultyHttp
from tests.support.engines.s3_served import KEY, boto_client, served
from tests.support.pool.memory_pool import MemoryPool, key_of
from tests.support.pool.spill_pool import POOL_ID, SpillingAgent
from tests.support.waiting import wait_until

VOLUME = bytes(range(16))
SLOTS = 64
DEADLINE = 10.0
"""Of a fetch by real sockets, on a busy machine too."""


def value_of(number: int) -> bytes:
    return bytes(((number * 7 + at) & 0xFF) for at in range(256)) * 40


def credentials_in(folder: Path, key_id: str, secret: str) -> Path:
    file = folder / "credentials"
    file.write_text(f"[default]\naws_access_key_id = {key_id}\naws_secret_access_key = {secret}\n")
    file.chmod(0o600)
    return file


@pytest.fixture
def moto() -> Iterator[int]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    client = boto_client(f"http://127.0.0.1:{port}", "AKIATESTONE", "the secret of the first tenant")
    client.create_bucket(Bucket="blocks")
    client.close()
    yield port
    server.stop()


@pytest.fixture(params=["moto", "g35"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "moto":
        yield f"http://127.0.0.1:{request.getfixturevalue('moto')}"
        return
    with served(tmp_path) as door:
        yield f"http://127.0.0.1:{door.port}"


@pytest.fixture
def faulty(endpoint: str) -> Iterator[FaultyHttp]:
    relay = FaultyHttp(int(endpoint.rpartition(":")[2]))
    yield relay
    relay.close()


@pytest.fixture
def target(faulty: FaultyHttp, tmp_path: Path) -> Iterator[S3Target]:
    credentials = credentials_in(tmp_path, KEY.key_id, KEY.secret.reveal().decode())
    made = S3Target(faulty.endpoint, "blocks", "us-east-1", credentials)
    yield made
    made.close()


def test_a_bucket_stores_once_and_gives_ranges(target: S3Target) -> None:
    name, data = bundle_name(POOL_ID, VOLUME, 77), bytes(range(256)) * 40_000
    target.put(name, memoryview(data))
    with pytest.raises(Taken):
        target.put(name, memoryview(b"another"))
    assert target.fetch(name, 1000, 5000).result(20) == data[1000:6000]
    assert target.fetch(name, len(data) - 10, 100).result(20) == data[-10:]
    assert target.fetch(name, len(data) + 10, 100).result(20) == b""
    with pytest.raises(Gone):
        target.fetch(name + "0", 0, 1).result(20)
    prefix = volume_prefix(POOL_ID, VOLUME)
    target.put(prefix + "00/second", memoryview(b"12345"))
    assert {(each.name, each.size) for each in target.names(prefix)} == {
        (name, len(data)),
        (prefix + "00/second", 5),
    }
    target.delete(name)
    target.delete(name)
    assert [each.size for each in target.names(prefix)] == [5]


def spilled(target: S3Target) -> SpillingAgent:
    """Eight values lie in G4 alone."""
    spilling = SpillingAgent(MemoryPool((1,)).agent(), target, deadline=DEADLINE)
    for number in range(SLOTS):
        spilling.agent.channel.clock += 1.0
        spilling.agent.put(key_of(number), value_of(number))
    for number in range(8):
        assert spilling.agent.get(key_of(number)) == value_of(number)
    for number in range(1000, 1000 + 4 * SLOTS):
        spilling.agent.channel.clock += 1.0
        spilling.agent.put(key_of(number), value_of(number))
        spilling.spill(store=len(spilling.spiller._copied) >= 4)
    assert spilling.spiller.counts.bundles_dropped == 0
    assert spilling.spiller.counts.values == 8
    return spilling


def test_what_is_evicted_comes_up_and_faults_are_misses_with_their_causes(
    target: S3Target, faulty: FaultyHttp
) -> None:
    spilling = spilled(target)

    def get(number: int) -> bytes | MissCause:
        spilling.agent.channel.clock += 20.0  # Longer than a place is left alone.
        return spilling.agent.get(key_of(number))

    assert [get(number) for number in range(8)] == [value_of(number) for number in range(8)]
    for fault, cause in (
        ("flip", MissCause.G4_CORRUPT),
        ("503", MissCause.G4_LATE),
        ("403", MissCause.G4_LATE),
        ("cut", MissCause.G4_LATE),
        ("gone", MissCause.G4_LATE),
    ):
        faulty.fault = fault
        assert get(1) is cause, fault
        faulty.fault = ""
        wait_until(lambda: get(2) == value_of(2), 60)
    spilling.health.deadline = 0.2
    faulty.fault = "slow"
    assert get(3) is MissCause.G4_LATE
    assert get(4) is MissCause.G4_LATE
    asked = spilling.health.counts.asked
    assert spilling.agent.get(key_of(5)) is MissCause.G4_LATE
    assert spilling.health.counts.asked == asked, "a place that does not answer is left alone"
    faulty.fault, spilling.health.deadline = "", DEADLINE
    for stored in list(target.names("g35-spill/")):
        target.delete(stored.name)
    wait_until(lambda: get(6) is MissCause.G4_LOST, 60)


def test_a_bundle_that_was_cut_short_is_a_miss(target: S3Target) -> None:
    spilling = spilled(target)
    for stored in list(target.names("g35-spill/")):
        half = target.fetch(stored.name, 0, 6000).result(20)
        target.delete(stored.name)
        target.put(stored.name, memoryview(half))
    for number in range(8):
        assert spilling.agent.get(key_of(number)) is MissCause.G4_CORRUPT


def test_credentials_that_expire_are_read_anew(tmp_path: Path) -> None:
    with served(tmp_path) as door:
        file = credentials_in(tmp_path, KEY.key_id, "a secret that is no longer good")
        target = S3Target(f"http://127.0.0.1:{door.port}", "blocks", "us-east-1", file)
        with pytest.raises(TargetError) as refused:
            target.put("g35-spill/one", memoryview(b"1"))
        assert "403" in str(refused.value)
        credentials_in(tmp_path, KEY.key_id, KEY.secret.reveal().decode())
        target._credentials_read -= 60.0
        with pytest.raises(TargetError):
            target.put("g35-spill/one", memoryview(b"1"))
        target.put("g35-spill/one", memoryview(b"1"))
        target.close()
