"""One agent of several processes: all serve gets, one does everything else, and any may die."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agent.fs.doors import mounting
from host_shim.block_key import key_of
from host_shim.control_wire import Outcome
from host_shim.pool import Pool
from tests.support.pool.reader_pool import MIB, SHORT, each_mount, rows, value, wait_serving
from tests.support.pool_up import PoolUp
from tests.support.waiting import wait_until


@pytest.fixture(scope="module", params=[2, 3])
def options(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return ("--processes", str(request.param))


@pytest.fixture
def pool(whole_pool: PoolUp) -> PoolUp:
    wait_serving(whole_pool)
    return whole_pool


def test_a_value_that_was_stored_is_seen_at_once_through_every_process(pool: PoolUp) -> None:
    mounts = each_mount(pool)
    assert len(mounts) == len(rows(pool)) + 1
    for number in range(20):
        name = f"kv/kv/seen-{len(mounts)}-{number}"
        for mount in mounts:
            assert not (mount / name).exists()  # from here on each remembers that it is absent
        (pool.mount / name).write_bytes(value(number))
        for mount in mounts:
            assert (mount / name).read_bytes() == value(number)
        (pool.mount / name).unlink()
        for mount in mounts:
            assert not (mount / name).exists()
        (pool.mount / name).write_bytes(value(number + 1000))
        for mount in mounts:
            assert (mount / name).read_bytes() == value(number + 1000)


def test_batches_of_several_clients_at_once_are_right_and_seen_at_once(pool: PoolUp) -> None:
    wrong: list[str] = []

    def client(number: int) -> None:
        with Pool(pool.mount) as own:
            volume, buffers = own.volume("kv"), [own.memory(SHORT) for _ in range(16)]
            for turn in range(2):
                names = [f"batch-{number}-{turn}-{at}" for at in range(16)]
                keys = [key_of(name) for name in names]
                values = [value(hash((number, turn, at))) for at in range(16)]
                if volume.get_many(keys, buffers) != [None] * 16:
                    wrong.append(f"{number} {turn}: there before they were stored")
                if not all(volume.put_many(keys, values)):
                    wrong.append(f"{number} {turn}: a put was refused")
                for _ in range(6):  # by each process
                    if volume.get_many(keys, buffers) != [SHORT] * 16:
                        wrong.append(f"{number} {turn}: not seen at once")
                    if [bytes(each) for each in buffers] != values:
                        wrong.append(f"{number} {turn}: a wrong byte")
                    if not all(volume.exists(keys)):
                        wrong.append(f"{number} {turn}: does not exist")

    before = [row["gets"] for row in rows(pool)]
    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    assert not wrong
    wait_until(
        lambda: all(row["gets"] > was for row, was in zip(rows(pool), before, strict=True)),
        30,
        "every process to have served gets",
    )


def test_long_values_and_values_without_registered_memory(pool: PoolUp) -> None:
    with pool.pool() as own:
        volume = own.volume("kv")
        keys = [key_of(f"long-{number}") for number in range(8)]
        values = [value(number, MIB) for number in range(8)]
        assert volume.put_many(keys, values) == [True] * 8
        ordinary, registered = bytearray(MIB), own.memory(MIB)
        for _ in range(4):
            for key, expected in zip(keys, values, strict=True):
                for buffer in (ordinary, registered):
                    buffer[:8] = bytes(8)
                    assert volume.get_into(key, buffer) == MIB
                    assert buffer == expected
            many = [bytearray(MIB) for _ in keys]
            fetched = volume.fetch([*keys, key_of("none")], [*many, bytearray(MIB)])
            assert [each.length for each in fetched] == [MIB] * 8 + [None]
            assert fetched[-1].outcome is Outcome.NEVER_STORED
            assert many == [bytearray(each) for each in values]


def test_a_process_that_serves_gets_alone_refuses_all_else(pool: PoolUp) -> None:
    other = each_mount(pool)[1]
    (pool.mount / "kv/kv/kept").write_bytes(value(1))
    for refused in (
        lambda: (other / "kv/kv/new").write_bytes(b"new"),
        lambda: (other / "kv/kv/kept").unlink(),
    ):
        with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
            refused()
    with Pool(other) as own:
        volume = own.volume("kv")
        for ask in (
            lambda: volume.put(key_of("new"), bytes(SHORT)),
            lambda: volume.put(key_of("new"), own.memory(2 * MIB)),
            lambda: volume.put_many([key_of("new")] * 2, [bytes(MIB), bytes(MIB)]),
            lambda: volume.delete([key_of("kept")]),
            lambda: volume.pin([key_of("kept")]),
        ):
            with pytest.raises(OSError, match=os.strerror(errno.EREMOTE)):
                ask()
    assert (other / "kv/kv/kept").read_bytes() == value(1)
    assert not (pool.mount / "kv/kv/new").exists()


def test_counters_of_all_processes_add_up(make_pool: Callable[..., PoolUp]) -> None:
    pool = make_pool("--drives", "1", "--processes", "2")
    wait_serving(pool)
    with pool.pool() as own:
        volume, buffer = own.volume("kv"), own.memory(SHORT)
        assert volume.put(key_of("counted"), value(1))
        assert volume.get_into(key_of("counted"), buffer) == SHORT  # from here on processes are asked in turn
        for _ in range(40):
            assert volume.get_into(key_of("counted"), buffer) == SHORT
            assert volume.get_into(key_of("absent"), buffer) is None
    wait_until(lambda: pool.status()["totals"]["gets"] == 81, 30, "the other process to have told its counts")
    status = pool.status()
    totals, row = status["totals"], status["processes"][0]
    assert (totals["hits"], totals["misses"], totals["miss_causes"]["never_stored"]) == (41, 40, 40)
    assert totals["bytes_read"] == 41 * SHORT
    assert 30 <= row["gets"] <= 50
    # The other process has gone, and what it has counted stays.
    os.kill(row["pid"], signal.SIGKILL)
    wait_until(lambda: rows(pool)[0]["starts"] == 2, 30, "it to be started again")
    wait_serving(pool)
    assert pool.status()["totals"]["gets"] == 81


def test_a_process_that_is_killed_amid_gets_and_puts(make_pool: Callable[..., PoolUp]) -> None:
    pool = make_pool("--drives", "1", "--processes", "3", "--value-size", "64K")
    wait_serving(pool)
    stop, wrong, done = threading.Event(), list[str](), [0] * 4

    def client(number: int) -> None:
        with Pool(pool.mount) as own:
            volume, buffers = own.volume("kv"), [own.memory(SHORT) for _ in range(8)]
            turn = 0
            while not stop.is_set():
                turn += 1
                keys = [key_of(f"{number}-{turn % 16}-{at}") for at in range(8)]
                values = [value(number * 1000 + (turn % 16) * 8 + at) for at in range(8)]
                stored = volume.put_many(keys, values)
                if not all(stored):
                    wrong.append("a put was refused")
                for _ in range(3):
                    lengths = volume.get_many(keys, buffers)
                    if lengths != [SHORT] * 8:
                        wrong.append(f"lost: {lengths}")
                    if [bytes(each) for each in buffers] != values:
                        wrong.append("a wrong byte")
                    done[number] += 1

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for each in clients:
        each.start()
    try:
        mounted = os.stat(pool.mount).st_dev
        agent = pool.pid("agent-process")
        for kill in range(4):
            victim = rows(pool)[kill % 2]
            before = list(done)
            wait_until(lambda: all(now > was for now, was in zip(done, before, strict=True)), 60)  # noqa: B023
            os.kill(victim["pid"], signal.SIGKILL)
            wait_until(lambda: rows(pool)[kill % 2]["starts"] > victim["starts"], 60)  # noqa: B023
            wait_serving(pool)
    finally:
        stop.set()
        for each in clients:
            each.join()
    assert not wrong
    assert os.stat(pool.mount).st_dev == mounted
    assert pool.pid("agent-process") == agent
    assert [row["starts"] for row in rows(pool)] == [3, 3]


def test_a_file_that_is_open_since_before_is_nobody_elses(make_pool: Callable[..., PoolUp]) -> None:
    pool = make_pool("--drives", "1", "--processes", "2")
    wait_serving(pool)
    (pool.mount / "kv/kv/mine").write_bytes(value(1))
    mount = each_mount(pool)[1]
    with (
        (mount / "kv/kv/mine").open("rb", buffering=0) as file,
        (mount / ".g35/session").open("rb+") as session,
    ):
        assert file.read(16) == value(1)[:16]
        os.kill(rows(pool)[0]["pid"], signal.SIGKILL)
        wait_until(lambda: rows(pool)[0]["starts"] == 2, 30)
        wait_serving(pool)
        with (mount / "kv/kv/mine").open("rb", buffering=0) as other:
            for stale in (file.fileno(), session.fileno()):
                with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
                    os.pread(stale, 16, 0)
            assert other.read(16) == value(1)[:16]


def test_the_processes_end_with_the_agent_and_leave_no_mount(make_pool: Callable[..., PoolUp]) -> None:
    pool = make_pool("--drives", "1", "--processes", "3")
    wait_serving(pool)
    old = [row["pid"] for row in rows(pool)]
    agent = pool.kill("agent-process")
    pool.wait_restarted("agent-process", agent)
    for pid in old:
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), 30, "a process to end with its agent")  # noqa: B023
    wait_serving(pool)
    assert pool.down() == 0
    assert str(pool.mount) not in Path("/proc/self/mountinfo").read_text()


def test_one_that_is_unmounted_stays_so_and_is_not_missed(make_pool: Callable[..., PoolUp]) -> None:
    pool = make_pool("--drives", "1", "--processes", "2")
    wait_serving(pool)
    with pool.pool() as own:
        volume, buffer = own.volume("kv"), own.memory(SHORT)
        assert volume.put(key_of("kept"), value(1))
        assert volume.get_into(key_of("kept"), buffer) == SHORT
        mounting.unmount(each_mount(pool)[1], lazy=True)
        for _ in range(8):
            assert volume.get_into(key_of("kept"), buffer) == SHORT
    wait_until(lambda: rows(pool)[0]["state"] == "unmounted", 30)


def test_readers_follow_a_rotation_and_serve_nothing_deleted(make_pool: Callable[..., PoolUp]) -> None:
    pool = make_pool("--drives", "1", "--processes", "2")
    wait_serving(pool)
    keys = [key_of(f"rotated {number}") for number in range(40)]
    with pool.pool() as own, Pool(each_mount(pool)[1]) as reader:
        volume, by_reader = own.volume("kv"), reader.volume("kv")

        def served(asked: Sequence[bytes]) -> int:
            """How many of the keys the reader serves; -1 while it knows an older pool map, and refuses."""
            try:
                found = by_reader.fetch(asked, [bytearray(SHORT) for _ in asked])
            except OSError as refused:
                if refused.errno != errno.EREMOTE:
                    raise
                return -1
            return sum(each.length is not None for each in found)

        for number, key in enumerate(keys):
            assert volume.put(key, value(number))
        assert served(keys) == len(keys)
        tenant(pool, "rotate", "default", "--wait", "60")
        keys.append(key_of("sealed by the new key"))
        assert volume.put(keys[-1], value(0))
        wait_until(lambda: served(keys) == len(keys), 30, "the reader to follow the rotation")
        # Values go for the quota, and stay whole in their slots.
        tenant(pool, "set", "default", "--quota-slots", "20", "--yes")
        wait_until(lambda: sum(volume.exists(keys)) <= 20, 30, "values to go")
        gone = [key for key, there in zip(keys, volume.exists(keys), strict=True) if not there]
        volume.delete(gone)
        wait_until(lambda: served(gone) >= 0, 30, "the reader to follow the quota")
        assert served(gone) == 0
    assert pool.down() == 0


def tenant(pool: PoolUp, *words: str) -> None:
    configuration = pool.state / "agent.toml"
    command = [sys.executable, "-P", "-m", "agent.cli", "tenant", *words, "--config", str(configuration)]
    subprocess.run(command, check=True, capture_output=True, timeout=90)


def test_the_curve_over_processes_is_one_command() -> None:
    """That of docs/processes.md, on small drives and for a short time."""
    command = [sys.executable, "-P", "-m", "agent.bench.process_curve", "--processes", "1,2"]
    done = subprocess.run(
        [*command, "--seconds", "0.1", "--drive-mib", "512"], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    measured = [(row["name"], row["processes"]) for row in found["rows"]]
    names = ("get_64k_b32", "put_64k_b32", "get_1m", "put_1m")
    assert measured == [(name, count) for count in (1, 2) for name in names]
    for row in found["rows"]:
        assert row["gib_per_s"] > 0
        assert row["misses"] == 0
        assert len(row["agent_cpus_busy"]) == row["processes"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_curve_that_is_ended_by_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-P", "-m", "agent.bench.process_curve", "--processes", "1"]
    with subprocess.Popen(
        [*command, "--seconds", "60", "--drive-mib", "512"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as curve:
        assert curve.stderr is not None
        try:
            wait_until(lambda: list(tmp_path.glob("g35-curve-*/pool-0/client-1.log")))
            curve.send_signal(number)
            assert curve.wait(60) == 130, curve.stderr.read()
        finally:
            curve.kill()
        assert not curve.stderr.read()
    assert not list(tmp_path.iterdir())
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
