"""`g35 bench` over real sockets, mounts and processes: the shape of what it says, never a time.

Names of tests are short, because the path of a Unix socket is, and theirs lie in folders of these names.
"""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from agent.bench import fault_probes, start_probes, tenant_probes
from agent.bench.bench_verb import MEASURE_SECONDS, REQUESTS
from agent.bench.names_and_units import chosen
from agent.bench.records import write
from agent.bench.run_bench import Wishes, run
from tests.support.needs import needs_mount
from tests.support.processes import Processes
from tests.support.waiting import wait_until

pytestmark = needs_mount


def test_cheapest(processes: Processes, tmp_path: Path) -> None:
    """The names that cost least, measured for a moment."""
    target = tmp_path / "bench.json"
    names = ["kv_get_64k", "kv_put_64k", "aes_1m", "fuse_memory_1m", "agent_rss_mib"]
    bench = processes.g35(
        "bench", *names, "--seconds", "0.1", "--json", target, environment={"TMPDIR": str(tmp_path)}
    )
    assert bench.process.wait(180) == 0, bench.output
    found = {record["name"]: record for record in json.loads(target.read_text())}
    assert set(found) == {*names, "raw_tcp_64k"}
    for record in found.values():
        assert record["value"] > 0
        assert record["unit"] == ("MiB" if record["name"] == "agent_rss_mib" else "GiB/s")
    for name in ("kv_get_64k", "kv_put_64k"):
        record = found[name]
        assert record["floor"] == "raw_tcp_64k"
        assert record["ratio"] == pytest.approx(record["value"] / found["raw_tcp_64k"]["value"], rel=1e-4)
        assert record["bytes"] % (64 << 10) == 0
        assert record["bytes"] >= record["operations"] * (64 << 10)
    assert not list(tmp_path.glob("g35-bench-*"))


def test_busy_loops_end_with_the_bench(processes: Processes, tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    bench = processes.g35("bench", "aes_1m", "--seconds", "0.1", "--beside", "2", "--json", target)
    children: set[int] = set()

    def loops() -> bool:
        with suppress(OSError):
            found = Path(f"/proc/{bench.process.pid}/task/{bench.process.pid}/children").read_text()
            children.update(map(int, found.split()))
        return len(children) >= 2 or bench.process.poll() is not None

    wait_until(loops, 60, "busy loops")
    assert bench.process.wait(180) == 0, bench.output
    assert [record["busy_loops"] for record in json.loads(target.read_text())] == [2]
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.nightly  # what is copied on the way is counted each time by test_request_buffers.py
def test_virtiofs(processes: Processes, tmp_path: Path) -> None:
    """Both ways bring the same values; by the device nothing is copied on the way."""
    target = tmp_path / "bench.json"
    names = ["virtiofs_get_1m", "host_cpu_s_per_gib_virtiofs", "copies_per_byte_fuse"]
    names.append("copies_per_byte_virtiofs")
    bench = processes.g35(
        "bench", *names, "--seconds", "0.1", "--json", target, environment={"TMPDIR": str(tmp_path)}
    )
    assert bench.process.wait(180) == 0, bench.output
    found = {record["name"]: record for record in json.loads(target.read_text())}
    assert set(found) == {*names, "kv_get_1m", "host_cpu_s_per_gib_file"}
    assert found["virtiofs_get_1m"]["floor"] == "kv_get_1m"
    assert found["copies_per_byte_fuse"]["value"] >= 1
    assert found["copies_per_byte_virtiofs"]["value"] < 0.01
    assert all(found[name]["value"] > 0 for name in found if not name.startswith("copies"))


def test_floors(processes: Processes, tmp_path: Path) -> None:
    """Processor time of each process, and of each part of the floor, add up to what the value is made of."""
    target = tmp_path / "bench.json"
    through_mount = ["get_1m_over_floor", "put_1m_over_floor"]
    names = [*through_mount, "get_1m_registered_over_floor", "put_1m_registered_over_floor"]
    bench = processes.g35(
        "bench", *names, "--seconds", "0.5", "--json", target, environment={"TMPDIR": str(tmp_path)}
    )
    assert bench.process.wait(180) == 0, bench.output
    found = {record["name"]: record for record in json.loads(target.read_text())}
    assert set(found) == set(names)
    path, floor = ("client", "agent", "enclosure"), ("send", "receive", "cipher")
    for name, record in found.items():
        assert record["value"] > 0
        taken = {key.removesuffix("_us"): value for key, value in record.items() if key.endswith("_us")}
        crossed = ("copy", "mount") if name in through_mount else ()
        assert set(taken) == {*path, "path", *floor, "floor", *crossed}
        assert ("times_with_mount" in record) == bool(crossed)
        assert all(value > 0 for value in taken.values())


def test_load(processes: Processes, tmp_path: Path) -> None:
    """Requests that arrive by a clock: all of them are served, and more of their times are told."""
    target = tmp_path / "bench.json"
    names = ["kv_get_64k_load_60_p99_ms", "redis_get_64k_load_60_p99_ms"]
    bench = processes.g35(
        "bench", *names, "--seconds", "1", "--json", target, environment={"TMPDIR": str(tmp_path)}
    )
    assert bench.process.wait(180) == 0, bench.output
    found = {record["name"]: record for record in json.loads(target.read_text())}
    left_out = {name for name in names if f"skipped {name}" in bench.output}
    assert set(found) == set(names) - left_out
    assert names[0] in found
    assert "under a fixed load" in bench.output
    for record in found.values():
        assert record["bytes"] == record["operations"] * (64 << 10)
        assert 0 < record["p50_ms"] <= record["p99_ms"] <= record["p999_ms"]
        assert record["offered_per_s"] > 0
        assert record["done_per_s"] > 0


def test_profile(processes: Processes, tmp_path: Path) -> None:
    """Each process works, the agent's workers are known by their name, and the cipher is a part of theirs."""
    target = tmp_path / "profile.json"
    bench = processes.g35(
        # So long that the scheduler's ticks tell user from kernel on a machine that does something else.
        "bench", "--profile", "kv_get_64k", "--seconds", "2", "--json", target,
        environment={"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert bench.process.wait(180) == 0, bench.output
    assert "kv_get_64k: " in bench.output
    (record,) = json.loads(target.read_text())
    assert record["name"] == "kv_get_64k"
    assert record["values"] > 0
    assert [process["process"] for process in record["processes"]] == ["client", "agent", "enclosure"]
    assert all(process["processor_us"] > 0 for process in record["processes"])
    (workers,) = [kind for kind in record["processes"][1]["kinds"] if kind["kind"] == "fuse"]
    assert 0 < workers["cipher_us"] <= workers["processor_us"]
    assert record["processor_us"] == pytest.approx(
        sum(process["processor_us"] for process in record["processes"]), abs=0.01
    )


def test_written_once(processes: Processes, tmp_path: Path) -> None:
    """Every byte of the values is."""
    target = tmp_path / "bench.json"
    bench = processes.g35(
        "bench", "write_amplification", "--json", target, environment={"TMPDIR": str(tmp_path)}
    )
    assert bench.process.wait(180) == 0, bench.output
    (record,) = json.loads(target.read_text())
    assert 1.0 <= record["value"] < 1.02
    assert record["bytes_of_values"] == record["puts"] << 20


def test_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names with pools of their own, with fewer values and faults that last less long than in a bench."""
    monkeypatch.setattr(tenant_probes, "STORED", 200)
    monkeypatch.setattr(fault_probes, "WARM_SECONDS", 0.5)
    monkeypatch.setattr(fault_probes, "STOPPED_SECONDS", 1.0)
    monkeypatch.setattr(fault_probes, "SWITCHES", 2)
    monkeypatch.setattr(start_probes, "STARTS", 1)
    names = [
        "tenant_erase_ms",
        "tenant_timing_auc",
        "notice_stopped_s",
        "get_p99_ms_while_stopped",
        "failover_get_p99_ms",
        "up_ready_s",
        "restart_first_hit_s",
    ]
    results = run(Wishes(chosen(names), MEASURE_SECONDS, None, REQUESTS), tmp_path, lambda _what, _part: None)
    assert not results.troubles
    target = tmp_path / "bench.json"
    write(target, results.in_order())
    erase, timing, notice, p99, failover, ready, restart = records = json.loads(target.read_text())
    assert [record["name"] for record in records] == names
    assert erase["value"] > 0
    assert erase["slots"] >= 100_000
    assert 0 <= timing["value"] <= 1
    assert notice["value"] > 0
    assert p99["gets"] > p99["misses"] > 0
    assert failover["gets"] > 0
    assert failover["value"] > 0
    assert [ready["value"]] == pytest.approx(ready["all_s"], abs=1e-3)
    assert restart["value"] > 0


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_interrupted(processes: Processes, tmp_path: Path, how: signal.Signals) -> None:
    """It leaves nothing behind."""
    bench = processes.g35("bench", "kv_get_64k", "--seconds", "600", environment={"TMPDIR": str(tmp_path)})
    bench.wait_for_line("warming up: kv_get_64k", 120)
    assert bench.stop(how=how, seconds=60) == 130
    wait_until(lambda: not list(tmp_path.glob("g35-bench-*")), what="its folder to go")
