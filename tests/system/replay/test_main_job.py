"""The main job as a user does it: `g35 up`, `g35 replay`, things that die meanwhile, `g35 down`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.replay.trace_generator import encode_line, made_trace
from host_shim.block_key import key_of
from host_shim.pool import BufferTooSmall, Pool, UnknownVolume, ValueTooLong
from tests.support.leaks import mounts_below, unmount_below
from tests.support.needs import needs_mount
from tests.support.pool_up import wait_each_served
from tests.support.processes import Processes, Started
from tests.support.waiting import wait_until

UP = ("--drive-size", "512M", "--value-size", "64K", "--media", "files", "--read-deadline-ms", "5000")
"""With a deadline that no busy machine reaches."""
QUICK = ("--media", "memory", "--drives", "1", "--drive-size", "512M", "--value-size", "64K")
"""For a pool that only has to come up: nothing that is stored there matters."""
REPLAY = ("--bytes-per-token", "128", "--json")

pytestmark = [
    needs_mount,
    pytest.mark.timeout(180),
]


class Bench:
    """A pool that is up, and what one types about it."""

    def __init__(self, state: Path, processes: Processes, up: Started) -> None:
        self.state = state
        self.mount = state / "mnt"
        self.processes = processes
        self.up = up

    def replay(self, trace: Path, *options: str) -> Started:
        return self.processes.g35("replay", trace, "--mount", self.mount, *REPLAY, *options)

    def kill(self, pid_file: str) -> int:
        """SIGKILL to one of the children of `g35 up`; its process id."""
        pid = self.pid(pid_file)
        os.kill(pid, signal.SIGKILL)
        return pid

    def pid(self, pid_file: str) -> int:
        return int((self.state / pid_file).read_text())


def finished(started: Started, seconds: float = 120.0) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a replay that runs to its end."""
    code = started.process.wait(seconds)
    output = started.output
    assert "{" in output, output
    record: dict[str, Any] = json.loads(output[output.index("{") : output.rindex("}") + 1])
    assert sum(record["miss_causes"].values()) == record["misses"] == record["blocks"] - record["hits"]
    return code, record


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One pool for all tests here; each plays with a seed of its own, so they share no block."""
    folder = tmp_path_factory.mktemp("bench")
    processes = Processes(folder)
    try:
        up = processes.g35("up", "--state", folder / "state", *UP)
        up.wait_for_line("ready", 60)
        yield Bench(folder / "state", processes, up)
        assert up.stop(60) == 0
        assert mounts_below(folder) == []
    finally:
        processes.end_all()
        unmount_below(folder)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """150 requests; at `--time-scale 20` they take some six seconds."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(encode_line(request) + "\n" for request in made_trace(5, 150)))
    return path


def test_a_replay_verifies_and_a_second_one_finds_what_the_first_has_stored(
    bench: Bench, trace: Path
) -> None:
    code, first = finished(bench.replay(trace, "--seed", "1", "--plot", str(trace.with_suffix(".svg"))))
    assert code == 0
    assert first["requests"] == 150
    assert first["wrong_bytes"] == 0
    assert first["hit_ratio"] > 0.5
    assert first["get_p50_ms"] > 0
    assert trace.with_suffix(".svg").stat().st_size > 1000
    code, second = finished(bench.replay(trace, "--seed", "1"))
    assert code == 0
    # What is stored and late is not lost: a busy machine takes an enclosure for a slow one at times.
    causes = second["miss_causes"]
    late = causes["late"] + causes["enclosure_down"] + causes["behind_a_hole"]
    assert (second["hits"] + late) / second["blocks"] > 0.97, causes
    assert second["wrong_bytes"] == 0


def test_broken_lines_are_skipped_and_strict_stops(bench: Bench, trace: Path) -> None:
    with trace.open("a") as file:
        file.write('{"timestamp": 1}\n')
    code, record = finished(bench.replay(trace))
    assert (code, record["requests"], record["broken_lines"]) == (0, 150, 1)
    strict = bench.replay(trace, "--strict")
    assert strict.process.wait(60) == 1
    assert "line 151" in strict.output
    assert "Traceback" not in strict.output


def _runs(pid: int) -> bool:
    """A zombie that nobody has waited for does not run any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _gets(bench: Bench) -> int:
    status = json.loads((bench.mount / ".g35/status.json").read_text())
    return int(status["totals"]["gets"])


def _connected(bench: Bench) -> bool:
    status = json.loads((bench.mount / ".g35/status.json").read_text())
    return all(enclosure["connected"] for enclosure in status["enclosures"])


def test_the_client_against_the_real_agent(bench: Bench) -> None:
    with Pool(bench.mount) as pool:
        volume = pool.volume("kv")
        keys = [key_of(f"block {number}") for number in range(300)]
        values = [os.urandom(1 + 211 * number) for number in range(300)]
        assert volume.put_many(keys, values) == [True] * 300
        assert volume.exists([*keys, key_of("never")]) == [True] * 300 + [False]
        buffers = [bytearray(65536) for _ in keys]
        assert volume.get_many(keys, buffers) == [len(value) for value in values]
        assert [bytes(buffer[: len(value)]) for buffer, value in zip(buffers, values, strict=True)] == values
        assert volume.get(keys[299]) == values[299]
        assert volume.get_into(keys[299], bytearray(len(values[299]))) == len(values[299])
        for room in (1, 4096, len(values[299]) - 1):
            with pytest.raises(BufferTooSmall):
                volume.get_into(keys[299], bytearray(room))
        assert volume.stats()["value_bytes"] == 65536
        assert (bench.mount / "kv" / "kv" / "block 7").read_bytes() == values[7]
        assert volume.delete([keys[0], key_of("never")]) == [True, False]
        assert volume.get_into(keys[0], bytearray(10)) is None
        assert volume.fetch([keys[0]], [bytearray(10)])[0].outcome is not None
        assert volume.prestage(keys[1:9]) == [True] * 8
        with pytest.raises(UnknownVolume):
            pool.volume("nowhere").get(keys[0])
        with pytest.raises(ValueTooLong):
            volume.put(keys[0], bytes(65537))
        assert volume.put(keys[0], b"and it goes on")
        assert volume.put(key_of("short-lived"), b"v", ttl=1)
        wait_until(lambda: volume.get(key_of("short-lived")) is None, 10, "the value to expire")


def test_an_enclosure_killed_during_a_replay_costs_hits_and_no_byte(bench: Bench, trace: Path) -> None:
    finished(bench.replay(trace, "--seed", "2"))
    before = _gets(bench)
    playing = bench.replay(trace, "--seed", "2", "--time-scale", "20")
    wait_until(lambda: _gets(bench) > before + 50, 30, "the replay to be under way")
    dead = bench.kill("jbof-0.pid")
    wait_until(lambda: bench.pid("jbof-0.pid") != dead, 30, "g35 up to start the enclosure again")
    code, record = finished(playing)
    assert code == 0, playing.output
    assert record["requests"] == 150
    assert record["wrong_bytes"] == 0
    wait_until(lambda: _connected(bench), 60, "the agent to be connected to both again")
    code, after = finished(bench.replay(trace, "--seed", "2"))
    assert (code, after["wrong_bytes"]) == (0, 0)
    wait_until(
        lambda: finished(bench.replay(trace, "--seed", "2"))[1]["hit_ratio"] > 0.95, 90, "it to be as before"
    )


def test_the_agent_killed_during_a_replay_comes_back_with_what_was_stored(bench: Bench, trace: Path) -> None:
    pool = Pool(bench.mount)
    volume = pool.volume("kv")
    keys = [key_of(f"before the crash {number}") for number in range(50)]
    acknowledged = [key for number, key in enumerate(keys) if volume.put(key, f"value {number}".encode())]
    assert len(acknowledged) > 25, "a busy machine may refuse some"
    before = _gets(bench)
    playing = bench.replay(trace, "--seed", "3", "--time-scale", "20")
    wait_until(lambda: _gets(bench) > before + 50, 30, "the replay to be under way")
    dead = bench.kill("agent-process.pid")
    wait_until(lambda: bench.pid("agent-process.pid") != dead, 30, "g35 up to start the agent again")
    wait_until(pool.alive, 30, "the mount to be served again")
    code, record = finished(playing)
    assert code == 0, playing.output
    assert record["wrong_bytes"] == 0
    assert record["requests"] == 150
    assert record["agent_waits"] >= 1
    assert "the agent answers again" in playing.output
    wait_each_served(volume, {key: f"value {keys.index(key)}".encode() for key in acknowledged})
    pool.close()


def test_an_agent_that_stays_dead_ends_a_replay_with_1(
    tmp_path: Path, trace: Path, processes: Processes
) -> None:
    up = processes.g35("up", "--state", tmp_path / "state", *QUICK, "--no-restart")
    up.wait_for_line("ready", 60)
    bench = Bench(tmp_path / "state", processes, up)
    playing = bench.replay(trace, "--time-scale", "20", "--agent-wait", "0.5")
    wait_until(lambda: _gets(bench) > 50, 30, "the replay to be under way")
    bench.kill("agent-process.pid")
    code, record = finished(playing, 30)
    assert code == 1
    assert record["wrong_bytes"] == 0
    assert 0 < record["requests"] < 150
    assert record["agent_waits"] == 1
    assert "no agent answers; waiting up to 0.5 s" in playing.output
    assert "error: the agent did not come back within 0.5 s; the replay ended after" in playing.output
    assert up.stop(60) == 0


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, processes: Processes) -> None:
    up = processes.g35("up", "--state", tmp_path / "state", *QUICK)
    up.wait_for_line("ready", 60)
    assert mounts_below(tmp_path)
    assert up.stop(60, signal.SIGINT) == 0
    assert mounts_below(tmp_path) == []
    # That no process is left is what the guard of tests/system looks after.


def test_detached_and_down(tmp_path: Path) -> None:
    def g35(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "agent.cli", *words, "--state", str(tmp_path / "state")],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    up = g35("up", "--detach", *QUICK)
    assert (up.returncode, up.stdout.splitlines()[-1:]) == (0, ["ready"]), up.stderr
    assert mounts_below(tmp_path)
    status = g35("status", "--json")
    assert status.returncode == 0
    assert {volume["name"] for volume in json.loads(status.stdout)["volumes"]} >= {"kv"}
    down = g35("down")
    assert down.returncode == 0, down.stderr
    assert mounts_below(tmp_path) == []


def test_make_run_in_small(processes: Processes) -> None:
    run = processes.g35("run", "--requests", "40", "--bytes-per-token", "128", "--drive-size", "512M")
    assert run.process.wait(120) == 0, run.output
    assert "wrong bytes" in run.output
    assert "nothing is left" in run.output


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_process(
    how: signal.Signals, tmp_path: Path, processes: Processes
) -> None:
    """The signal comes to `g35 run` alone. After SIGKILL folder and dead mount stay for the next run."""
    run = processes.g35("run", "--drive-size", "512M", environment={"TMPDIR": str(tmp_path)})
    run.wait_for_line("every byte read", 120)
    (state,) = tmp_path.glob("g35-run-*")
    children = [int((state / file).read_text()) for file in ("agent.pid", "jbof-0.pid", "jbof-1.pid")]
    assert run.stop(120, how) != 0
    wait_until(lambda: not any(map(_runs, children)), 60, "the end of all processes")
    if how == signal.SIGKILL:
        unmount_below(tmp_path)
    else:
        assert not state.exists()
        assert "Traceback" not in run.output


def test_a_mount_that_is_a_file_is_named(tmp_path: Path, processes: Processes) -> None:
    file = tmp_path / "file"
    file.touch()
    up = processes.g35("up", "--state", tmp_path / "state", "--mount", file, *QUICK)
    assert up.process.wait(120) == 1
    assert f"error: --mount {file}: is a file, not a folder\nhint: name a folder\n" in up.output


def test_without_a_mount_a_replay_says_what_to_do(tmp_path: Path, trace: Path, processes: Processes) -> None:
    replay = processes.g35("replay", trace, "--mount", tmp_path)
    assert replay.process.wait(60) == 1
    assert "error: no g35 agent answers" in replay.output
    assert "hint: start one with `g35 up`" in replay.output
    assert "Traceback" not in replay.output
