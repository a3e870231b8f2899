"""The GPU host: Debian's kernel mounts the agent's virtio-fs device, and reads and writes the pool by it.

Outside: enclosures, RDMA over emulated NICs, the agent, its device. Inside: the kernel's virtiofs driver,
files, host_shim, `g35 replay`. Then faults of every part: the guest resets, QEMU is killed, a reader is
killed, the agent is killed and started again.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.cli.run_demo import SAMPLE
from emulator.lab.accelerator import choose_accelerator
from emulator.lab.gpu_host import GpuHostShape, gpu_host
from emulator.lab.image import LabImage
from tests.lab.gpu_host_steps import content_of, key_of
from tests.support.lab.gpu_host_up import BOOT_S, GpuHostUp, gpu_host_of, pool_of, processes_in
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes
from tests.support.waiting import wait_until

KIB, MIB = 1 << 10, 1 << 20
DEADLINE_MS = "20000"
"""Of a read: beside an emulated guest everything takes its time, and here a miss is a failure."""
OPTIONS = (
    *("--virtiofs", "--transport", "rdma", "--media", "memory", "--drive-size", "256M"),
    *("--enclosures", "1", "--read-deadline-ms", DEADLINE_MS),
)

RESETS_ITSELF = f"""
set -e
cd /mnt/g35/fs
if [ ! -e /run/g35/second ]; then
    touch /run/g35/second
    dd if=/dev/urandom of=/run/g35/content bs=64K count=8 2>/dev/null
    cp /run/g35/content before-the-reset
    sync -f .
    dd if=/dev/zero of=unfinished bs=64K 2>/dev/null &
    sleep 0.2
    echo b > /proc/sysrq-trigger
    sleep 1000
fi
cmp /run/g35/content before-the-reset
touch /run/g35/verified
while dd if=/dev/urandom of=written-when-killed bs={MIB} count=4 2>/dev/null; do touch /run/g35/writing; done
"""


@pytest.fixture(scope="module")
def processes_of_the_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes_in(tmp_path_factory.mktemp("processes")) as processes:
        yield processes


@pytest.fixture(scope="module")
def pool(
    lab_image: LabImage, processes_of_the_pool: Processes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PoolUp]:
    """One `g35 up --virtiofs` for all tests here."""
    with pool_of(processes_of_the_pool, tmp_path_factory.mktemp("state"), *OPTIONS) as up:
        yield up


@pytest.fixture(scope="module")
def gpu(
    pool: PoolUp, processes_of_the_pool: Processes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GpuHostUp]:
    """One `g35 host` for all tests that ask for it."""
    with gpu_host_of(pool, processes_of_the_pool, tmp_path_factory.mktemp("gpu-host")) as up:
        yield up


def socket_of(pool: PoolUp) -> Path:
    return pool.state / "virtiofs.sock"


@pytest.mark.nightly  # test_door.py of system/virtiofs has front-ends that are killed each time
def test_a_guest_that_resets_itself_and_one_that_is_killed_while_it_writes(
    pool: PoolUp, lab_image: LabImage
) -> None:
    agent = pool.pid("agent-process")
    with gpu_host(
        RESETS_ITSELF,
        socket_of(pool),
        image=lab_image,
        accelerator=choose_accelerator(lab_image),
        shape=GpuHostShape(memory_mib=1024, reboots=True),
    ) as guest:
        files = guest.exchange

        def reached(name: str) -> bool:
            assert guest.running(), guest.output() + guest.console()
            return (files / name).exists()

        wait_until(lambda: reached("writing"), BOOT_S, "the second life of the guest to write")
        assert (files / "second").exists()
        assert (files / "verified").exists(), guest.output()
        content = (files / "content").read_bytes()
    assert pool.pid("agent-process") == agent, "the agent has lived through both"
    assert (pool.mount / "fs/before-the-reset").read_bytes() == content


def test_g35_host_without_an_agent(processes_of_the_pool: Processes, tmp_path: Path) -> None:
    stale = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(stale))
    for place, why in ((stale, "its agent has ended"), (tmp_path / "none", "no such socket")):
        host = processes_of_the_pool.g35(
            "host", "--socket", place, "--", "true", environment={"TMPDIR": str(tmp_path)}
        )
        assert host.process.wait(60) == 1
        assert f"no virtio-fs device at {place}: " in host.output
        assert why in host.output
        assert "g35 up --virtiofs" in host.output
    assert list(tmp_path.iterdir()) == [stale], "nothing of a guest is left"


def test_the_next_kernel_mounts_the_device(gpu: GpuHostUp) -> None:
    assert f"g35 host --socket {socket_of(gpu.pool)}\n" in gpu.pool.process.output
    found = gpu.call("mounted")
    assert (found["device"], found["kind"]) == ("g35", "virtiofs")
    assert {"fs", "kv"} <= set(found["names"])


def test_one_guest_at_a_time(gpu: GpuHostUp, processes_of_the_pool: Processes, tmp_path: Path) -> None:
    second = processes_of_the_pool.g35(
        "host", "--socket", socket_of(gpu.pool), "--", "true", environment={"TMPDIR": str(tmp_path)}
    )
    assert second.process.wait(60) == 1
    assert "another guest has the device" in second.output
    assert gpu.call("mounted")["kind"] == "virtiofs", "the first has not noticed"


def test_files(gpu: GpuHostUp) -> None:
    names = [f"name {number:04}" for number in range(1000)]
    place = gpu.pool.mount / "fs/names"
    place.mkdir()
    for name in names:
        (place / name).touch()
    assert gpu.call("listed", folder="names") == names
    gpu.call("file_calls")
    assert (gpu.pool.mount / "fs/calls/direct").stat().st_size == 2 * MIB, "the other door shows the same"


def test_shared_files_cross_both_doors(gpu: GpuHostUp) -> None:
    outside, size = gpu.pool.mount / "shared/shared", 3 * MIB + 777
    gpu.call("write_shared", folder="models/inside", count=4, size=size)
    for number in range(4):
        content = content_of(f"models/inside/{number}", size)
        assert (outside / f"models/inside/{number}").read_bytes() == content
    assert (outside / "models/inside/direct").stat().st_size == 2 * MIB
    (outside / "models/outside").mkdir(parents=True)
    for number in range(4):
        (outside / f"models/outside/{number}.tmp").write_bytes(content_of(f"models/outside/{number}", size))
        (outside / f"models/outside/{number}.tmp").replace(outside / f"models/outside/{number}")
    found = gpu.call("read_shared", folder="models/outside", count=4, size=size)
    assert found == {"right": 4, "listed": ["0", "1", "2", "3"]}


def test_values_by_host_shim_cross_both_doors(gpu: GpuHostUp) -> None:
    assert gpu.call("put_values", name="inside", count=8, size=200 * KIB) == 8
    assert gpu.call("get_values", name="inside", count=8, size=200 * KIB) == {
        "hits": 8,
        "misses": 0,
        "wrong": 0,
    }
    assert gpu.call("get_values", name="nobody's", count=2, size=1)["misses"] == 2
    with gpu.pool.pool() as outside:
        assert outside.volume("kv").get(key_of("inside 3")) == content_of("inside 3", 200 * KIB)


def test_a_trace_is_replayed_inside(gpu: GpuHostUp) -> None:
    report = gpu.call("replay", trace=str(SAMPLE), requests=12)
    assert report["good"]
    assert report["requests"] == 12
    assert report["bytes_read"] > 0
    assert report["bytes_written"] > 0
    assert (report["wrong_bytes"], report["wrong_blocks"]) == (0, 0)


def test_a_reader_that_is_killed_while_it_waits(gpu: GpuHostUp) -> None:
    gpu.call("write_files", folder="slow", count=1, size=256 * KIB)
    for drive in range(2):
        gpu.pool.fault(0, "hang", drive=drive)
    killed = gpu.call.exchange / "killed"
    try:
        waiting = gpu.call.begin("kill_a_reader", path="slow/0", grace=0.0)
        wait_until(killed.exists, 240, "the reader to be killed")
    finally:
        for drive in range(2):
            gpu.pool.fault(0, "heal", drive=drive)
    assert waiting()
    assert gpu.call("verify_files", folder="slow", count=1, size=256 * KIB)["wrong"] == []


@pytest.mark.nightly  # it asserts no figure
def test_what_a_read_costs_the_host(gpu: GpuHostUp) -> None:
    """Reports, and asserts no figure: an emulated guest's CPU compares with itself alone."""
    rows = gpu.call("host_cpu", mebibytes=4, seconds=0.3)
    for row in rows:
        print(f"{row['way']}: {row['cpu_s_per_gib']:.2f} s of CPU per GiB")
    assert len(rows) == 6
    assert all(row["gib"] > 0 for row in rows)


def test_the_agent_is_killed_while_the_guest_verifies_and_the_next_one_goes_on(gpu: GpuHostUp) -> None:
    shared = gpu.call.exchange
    kept = {"folder": "kept", "count": 6, "size": 1500 * KIB}
    gpu.call("write_files", **kept)
    assert gpu.call("put_values", name="kept", count=6, size=200 * KIB) == 6

    verified = gpu.call.begin("verify_files", **kept, until_stopped=True)
    written = gpu.call.begin("write_on", folder="during", names=8, size=300 * KIB)
    held = gpu.call.begin("hold_open", path="kept/0", size=1500 * KIB)

    def passes() -> int:
        return int((shared / "passes").read_text() or 0) if (shared / "passes").exists() else 0

    wait_until(lambda: passes() >= 1 and (shared / "holding").exists(), 240, "a first pass")
    old = gpu.pool.kill("agent-process")
    gpu.pool.wait_restarted("agent-process", old)
    after = passes()
    wait_until(lambda: passes() >= after + 2, 240, f"the guest to go on; {gpu.process.output}")
    (shared / "stop").touch()

    found = verified()
    assert (found["wrong"], found["errors"]) == ([], [])
    assert held(), "a file that was open all the time"
    new = written()
    assert new["wrong"] == []
    assert len(new["refused"]) <= 1, "what the agent had in memory alone when it was killed"
    values = gpu.call("get_values", name="kept", count=6, size=200 * KIB)
    assert values == {"hits": 6, "misses": 0, "wrong": 0}
    assert "the agent is back; the guest goes on" in gpu.process.output
