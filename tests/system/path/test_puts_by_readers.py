"""Puts through the processes of an agent that write no directory, and what may happen amid them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from agent.config.configuration import CORES_OF_PROCESS
from host_shim.block_key import key_of
from host_shim.pool import Pool
from tests.support.pool.reader_pool import MIB, SHORT, each_mount, rows, value, wait_serving
from tests.support.pool_up import PoolUp
from tests.support.waiting import wait_until


@pytest.fixture
def pool(make_pool: Callable[..., PoolUp]) -> PoolUp:
    made = make_pool("--drives", "1", "--processes", "3")
    wait_serving(made)
    return made


def test_what_one_process_stores_all_serve(pool: PoolUp) -> None:
    """Directly at each process, which refuses what it does not serve."""
    before = pool.status()["totals"]["puts"]
    for number, mount in enumerate(each_mount(pool)):
        with Pool(mount) as own:
            volume = own.volume("kv")
            keys = [key_of(f"{number} {each}") for each in range(40)]
            values = [value(number * 100 + each) for each in range(40)]
            assert volume.put_many(keys, values) == [True] * 40
            assert volume.put_many(keys, values) == [True] * 40, "they are there"
        # One value alone is a reader's where there are cores for several processes.
        with Pool(mount if not number or takes_single() else pool.mount) as own:
            long = own.memory(MIB)
            long[:] = value(number, MIB)
            assert own.volume("kv").put(key_of(f"long {number}"), long)
        for other in each_mount(pool):
            with Pool(other) as own:
                volume, buffers = own.volume("kv"), [bytearray(SHORT) for _ in keys]
                assert volume.get_many(keys, buffers) == [SHORT] * 40
                assert [bytes(each) for each in buffers] == values
                buffer = bytearray(MIB)
                assert volume.get_into(key_of(f"long {number}"), buffer) == MIB
                assert buffer == value(number, MIB)
    assert pool.status()["totals"]["puts"] - before == 3 * 41


def takes_single() -> bool:
    return len(os.sched_getaffinity(0)) >= 2 * CORES_OF_PROCESS


@pytest.mark.skipif(
    takes_single(),
    reason=f"{2 * CORES_OF_PROCESS} or more processors: readers take single values (fewer: taskset -c 0,1)",
)
def test_on_few_cores_single_values_go_to_the_first(pool: PoolUp) -> None:
    refused = pytest.raises(OSError, match=os.strerror(errno.EREMOTE))
    with Pool(each_mount(pool)[1]) as own, refused:
        own.volume("kv").put(key_of("at the reader"), own.memory(MIB))
    with pool.pool() as own:
        volume, long = own.volume("kv"), own.memory(MIB)
        for number in range(20):
            long[:] = value(number, MIB)
            assert volume.put(key_of(f"single {number}"), long)
            buffer = own.memory(MIB)
            # Once through each process, which may read its first directories late.
            for _ in range(3):
                wait_until(
                    lambda number=number, buffer=buffer: (  # type: ignore[misc]
                        volume.get_into(key_of(f"single {number}"), buffer) == MIB
                    ),
                    30,
                )
                assert buffer == value(number, MIB)
        keys = [key_of(f"batch {number}") for number in range(8)]
        assert volume.put_many(keys, list(map(value, range(8)))) == [True] * 8


def test_one_key_through_all_processes_at_once_has_one_value(pool: PoolUp) -> None:
    keys = [key_of(f"contended {number}") for number in range(32)]
    wrong: list[str] = []

    def client(number: int) -> None:
        with Pool(each_mount(pool)[1 + number % 2] if number < 4 else pool.mount) as own:
            if not all(own.volume("kv").put_many(keys, [value(number * 1000 + at) for at in range(32)])):
                # A process that does not serve a key now says so, and its client asks the first.
                wrong.append(f"{number} was refused")

    clients = [threading.Thread(target=client, args=(4 + number,)) for number in range(4)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    assert not wrong
    served = []
    for mount in each_mount(pool):
        with Pool(mount) as own:
            buffers = [bytearray(SHORT) for _ in keys]
            assert own.volume("kv").get_many(keys, buffers) == [SHORT] * 32
            served.append([bytes(each) for each in buffers])
    assert served[0] == served[1] == served[2]
    for at, found in enumerate(served[0]):
        assert found in [value((4 + number) * 1000 + at) for number in range(4)]


def test_a_process_that_is_killed_while_a_drive_keeps_its_writes(make_pool: Callable[..., PoolUp]) -> None:
    """What the enclosure has of its writes may land at any time after that."""
    pool = make_pool("--drives", "1", "--processes", "2")
    wait_serving(pool)
    keys = [key_of(f"kept {number}") for number in range(32)]
    with pool.pool() as own:
        # From here on the directories are remembered.
        assert all(own.volume("kv").put_many(keys[:16], [value(n) for n in range(16)]))
        own.volume("kv").delete(keys[:16])

    def put() -> None:
        with Pool(each_mount(pool)[1]) as other:
            try:
                other.volume("kv").put_many(keys, [value(1000 + n) for n in range(32)])
            except OSError:
                return  # it has died, or refuses what it has not done

    before = hung(pool)
    for enclosure in range(2):
        pool.fault(enclosure, "hang", drive=0)
    putting = threading.Thread(target=put)
    putting.start()
    victim = rows(pool)[0]
    wait_until(lambda: hung(pool) > before, 20, "its writes to be under way")
    os.kill(victim["pid"], signal.SIGKILL)
    putting.join()
    for enclosure in range(2):
        pool.fault(enclosure, "heal", drive=0)
    wait_until(lambda: rows(pool)[0]["starts"] == 2, 30)
    wait_serving(pool)
    with pool.pool() as own:
        volume = own.volume("kv")
        wait_until(lambda: all(volume.put_many(keys, [value(n) for n in range(32)])), 30, "all to be stored")
        buffers = [own.memory(SHORT) for _ in keys]
        for _ in range(20):
            # A worker whose queue kept writes connects anew, and what it asks there first may miss.
            wait_until(lambda: volume.get_many(keys, buffers) == [SHORT] * 32, 30, "all to be served")
            for at, buffer in enumerate(buffers):
                assert bytes(buffer) in (value(at), value(1000 + at))


def hung(pool: PoolUp) -> int:
    """Commands that drives have kept."""
    drives = [pool.fault(enclosure, "stats")["drives"][0] for enclosure in range(2)]
    return sum(drive["faults_injected"].get("hang", 0) for drive in drives)


def test_puts_amid_a_rotation_of_keys(make_pool: Callable[..., PoolUp]) -> None:
    """What was put long ago is deleted: of a full pool a client may evict what the other has just put."""
    pool = make_pool("--drives", "1", "--processes", "3", "--value-size", "64K")
    wait_serving(pool)
    stop, wrong, done = threading.Event(), list[str](), [0] * 2

    def client(number: int) -> None:
        with pool.pool() as own:
            volume, buffers = own.volume("kv"), [own.memory(SHORT) for _ in range(16)]
            while not stop.is_set():
                turn = done[number]
                keys = [key_of(f"{number} {turn} {at}") for at in range(16)]
                values = [value(turn * 16 + at) for at in range(16)]
                stored = volume.put_many(keys, values)
                lengths = volume.get_many(keys, buffers)
                for at in range(16):
                    if stored[at] and (lengths[at] != SHORT or bytes(buffers[at]) != values[at]):
                        wrong.append(f"{number} {turn} {at}: {lengths[at]}")
                volume.delete([key_of(f"{number} {turn - 40} {at}") for at in range(16)])
                done[number] += 1

    clients = [threading.Thread(target=client, args=(number,)) for number in range(2)]
    for each in clients:
        each.start()
    try:
        command = [sys.executable, "-P", "-m", "agent.cli", "tenant", "rotate", "default", "--wait", "60"]
        configuration = pool.state / "agent.toml"
        subprocess.run(
            [*command, "--config", str(configuration)], check=True, capture_output=True, timeout=90
        )
        before = list(done)
        wait_until(lambda: all(now > was + 2 for now, was in zip(done, before, strict=True)), 60)
    finally:
        stop.set()
        for each in clients:
            each.join()
    assert not wrong


def test_the_first_process_is_killed_amid_puts(make_pool: Callable[..., PoolUp]) -> None:
    """Its readers die with it. What was acknowledged is there, and nothing is there that nobody has put."""
    pool = make_pool("--drives", "1", "--processes", "3", "--value-size", "64K")
    wait_serving(pool)
    stop, acknowledged, tried = threading.Event(), dict[bytes, int](), dict[bytes, int]()

    def client(number: int) -> None:
        with pool.pool() as own:
            volume, turn = own.volume("kv"), 0
            while not stop.is_set():
                turn += 1
                numbers = [number * 1000 + turn % 40 * 16 + at for at in range(16)]
                keys = [key_of(f"first {each}") for each in numbers]
                tried.update(zip(keys, numbers, strict=True))
                stored = volume.put_many(keys, [value(each) for each in numbers])
                for key, each, is_stored in zip(keys, numbers, stored, strict=True):
                    if is_stored:
                        acknowledged[key] = each

    clients = [threading.Thread(target=client, args=(number,)) for number in range(3)]
    for each in clients:
        each.start()
    try:
        wait_until(lambda: len(acknowledged) > 100, 60)
        agent = pool.kill("agent-process")
        pool.wait_restarted("agent-process", agent)
        wait_serving(pool)
        before = len(acknowledged)
        wait_until(lambda: len(acknowledged) > before + 50 or len(acknowledged) == 3 * 640, 60)
    finally:
        stop.set()
        for each in clients:
            each.join()
    with pool.pool() as own:
        volume, buffer = own.volume("kv"), bytearray(SHORT)

        def is_served(key: bytes) -> bool:
            (found,) = volume.fetch([key], [buffer])
            assert found.length is None or bytes(buffer) == value(tried[key]), "a wrong byte"
            return found.length == SHORT

        for key, number in tried.items():
            if key in acknowledged:
                wait_until(lambda key=key: is_served(key), 30, f"value {number}")  # type: ignore[misc]
            else:
                is_served(key)
        assert not pool.status()["totals"]["evictions"], "the pool is too small to tell"
