"""A guest whose queues several processes of the agent serve: what it has, and what it has when one dies."""

from __future__ import annotations

import os
import signal
from typing import Any

from agent.bench.virtio_driver.front_end import PROTOCOL_FEATURES
from agent.bench.virtio_driver.machine import Machine
from agent.bench.virtiofs_files import VirtiofsFiles
from agent.virtio.vhost_user import ProtocolFeature
from host_shim.pool import Pool
from tests.support.halting import halt
from tests.support.pool_up import PoolUp, wait_each_served
from tests.support.waiting import wait_until
from tests.system.virtiofs.test_virtiofs_path import VALUE, Guest, content, key, killed_and_back

OPTIONS = (
    "--virtiofs", "--processes", "2", "--drive-size", "256M", "--read-deadline-ms", "5000", "--drives", "1",
)  # fmt: skip


def readers(pool_up: PoolUp) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pool_up.status()["processes"]
    return found


def wait_serving(pool_up: PoolUp, starts: int = 1) -> None:
    def serves() -> bool:
        return all(each["state"] == "serving" and each["starts"] >= starts for each in readers(pool_up))

    wait_until(serves, 60, "all processes to serve")


def wait_read_by_reader(pool_up: PoolUp, guest: Guest) -> None:
    """Until the reader has served some gets of the guest."""
    before = readers(pool_up)[0]["hits"]

    def has_read() -> bool:
        assert not guest.failures
        return bool(readers(pool_up)[0]["hits"] > before + 10)

    wait_until(has_read, 60, "gets by the other process")


def test_a_reader_serves_a_guest(pool_up: PoolUp, machine: Machine) -> None:
    wait_serving(pool_up)
    with Pool("", files=VirtiofsFiles(machine)) as pool:
        kv = pool.volume("kv")
        sizes = (1, 4095, 60_000, VALUE, 262_144, 1 << 20)
        stored = {key(100 + number): content(key(100 + number), size) for number, size in enumerate(sizes)}
        guest = Guest(machine, seed=7)
        try:
            wait_read_by_reader(pool_up, guest)
            for name, value in stored.items():
                assert kv.put(name, value)
            for _ in range(5):
                wait_each_served(kv, stored)
            assert kv.exists([key(101), key(99)]) == [True, False]
            for name, value in stored.items():
                assert kv.get(key(99)) is None
                assert kv.delete([name]) == [True]
                assert kv.get(name) is None
                assert kv.put(name, value[::-1])
                wait_each_served(kv, {name: value[::-1]})
        finally:
            guest.end()
    moved = pool_up.status()["doors"]["virtiofs-0"]
    assert moved["bytes_read"] > sum(sizes) * 5


def test_a_reader_is_killed_under_load(pool_up: PoolUp, machine: Machine) -> None:
    wait_serving(pool_up)
    guest = Guest(machine, seed=8)
    try:
        for turn in range(3):
            wait_read_by_reader(pool_up, guest)
            os.kill(readers(pool_up)[0]["pid"], signal.SIGKILL)
            guest.progressed()
            wait_serving(pool_up, starts=2 + turn)
        wait_read_by_reader(pool_up, guest)
    finally:
        guest.end()


def test_the_agent_is_killed_and_the_guest_goes_on(pool_up: PoolUp, machine: Machine) -> None:
    wait_serving(pool_up)
    guest = Guest(machine, seed=9)
    try:
        wait_read_by_reader(pool_up, guest)
        killed_and_back(pool_up, machine)
        guest.progressed()
        wait_serving(pool_up)
        # Its handles are of another epoch now.
        wait_read_by_reader(pool_up, guest)
    finally:
        guest.end()


def test_a_front_end_that_keeps_no_notes_has_a_reader_too(pool_up: PoolUp) -> None:
    wait_serving(pool_up)
    socket = pool_up.state / "virtiofs.sock"
    features = PROTOCOL_FEATURES & ~ProtocolFeature.INFLIGHT_SHMFD
    with Machine(
        socket, request_queues=2, memory_bytes=(32 << 20, 32 << 20), protocol_features=features, pages=False
    ) as machine:
        machine.start(patience=30)
        machine.client.init()
        guest = Guest(machine, seed=10)
        try:
            wait_read_by_reader(pool_up, guest)
            os.kill(readers(pool_up)[0]["pid"], signal.SIGKILL)
            guest.progressed()
            wait_serving(pool_up, starts=2)
            wait_read_by_reader(pool_up, guest)
        finally:
            guest.end()
        assert set(machine.stop()) == {0, 1, 2}


def test_a_reader_that_hangs_is_gone_round_once_it_is_killed(pool_up: PoolUp, machine: Machine) -> None:
    wait_serving(pool_up)
    guest = Guest(machine, seed=11)
    try:
        wait_read_by_reader(pool_up, guest)
        halt(readers(pool_up)[0]["pid"])
        wait_serving(pool_up, starts=2)
        wait_read_by_reader(pool_up, guest)
    finally:
        guest.end()
