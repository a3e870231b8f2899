"""`g35 sim`: what it prints, and how it answers what cannot be simulated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent.cli.main import main
from agent.errors import UserError
from agent.replay.trace_lines import TraceFile
from agent.sim.pod_plan import FAULTS
from tests.support.verbs_here import status_of

SHORT = [
    "sim",
    "--requests",
    "30",
    "--gpus",
    "8",
    "--enclosures",
    "1",
    "--rows",
    "g35,recompute",
    "--g1",
    "0",
    "--g2",
    "0",
]


def _printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert status_of(*words) == 0
    return capsys.readouterr().out


def _trace(folder: Path, requests: int, block_size: int = 512) -> Path:
    file = folder / "trace.jsonl"
    with file.open("w") as out:
        for number in range(requests):
            line: dict[str, Any] = {
                "timestamp": 300 * number, "input_length": 6 * block_size, "output_length": 20,
                "hash_ids": [*range(4), 10 + number % 5, 20 + number % 5], "block_size": block_size,
            }  # fmt: skip
            print(json.dumps(line), file=out)
    return file


def test_json_has_the_digest_and_what_it_stands_for(capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(_printed(capsys, *SHORT, "--json"))
    assert record["requests"] == 30
    assert len(record["digest"]) == 32
    assert 0 < record["hit_ratio"] < 1
    assert record["bytes"]["host_nics_in"] == record["bytes"]["enclosures_out"] > 0
    assert set(record["misses"]) >= {"never_stored", "evicted", "late", "behind_a_hole"}
    for row in record["rows"]:
        had = row["blocks_in_gpu"] + row["blocks_in_host"] + row["blocks_loaded"]
        assert row["hit_ratio"] == had / row["blocks"]
    pool = record["rows"][0]
    assert sum(pool["misses"].values()) == round((1 - pool["hit_ratio"]) * pool["blocks"]) > 0
    assert [row["name"] for row in record["rows"]] == ["g35", "recompute"]
    assert record["rows"][1]["speed_up"] == 1.0
    assert record["pod"]["enclosures"] == 1
    assert any(note.startswith("Sampled") for note in record["notes"])
    assert record["cpu_seconds"] > 0
    assert record["memory_bytes"] > 0


def test_the_digest_is_that_of_any_process() -> None:
    """Whatever the order of sets is: another process has another one."""
    told = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-P", "-m", "agent.cli", *SHORT, "--faults", "slow,agent", "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        told.add(json.loads(done.stdout)["digest"])
    assert len(told) == 1


def test_the_recompute_gate_is_off_unless_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """As in the product. One refused block costs all blocks of its prompt behind it."""
    words = [*SHORT, "--pod", "one", "--requests", "60", "--workers", "16", "--json"]
    plain, gated = (json.loads(_printed(capsys, *words, *more)) for more in ([], ["--gate"]))
    assert (plain["pod"]["gate"], gated["pod"]["gate"]) == (False, True)
    assert plain["counts"]["gets_gated"] == 0 < gated["counts"]["gets_gated"]
    assert plain["hit_ratio"] > gated["hit_ratio"]


def test_hosts_of_other_makers_are_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        "[hosts.slow]\n"
        + "".join(
            f'{name} = {{ value = {value}, source = "a test", date = "2026-11" }}\n'
            for name, value in (("gpus_per_host", 8), ("host_nic_gb_s", 0.5), ("gpu_pcie_gb_s", 64))
        )
    )
    rows = ["--rows", "g35,g35@amd,g35@slow,recompute", "--data", str(own)]
    record = json.loads(_printed(capsys, *SHORT, "--json", *rows))
    found = {row["name"]: row for row in record["rows"]}
    assert found["g35@amd"]["what"] == "the pool, and hosts of the kind amd"
    assert found["g35@slow"]["ttft_seconds"]["p95"] > 2 * found["g35@amd"]["ttft_seconds"]["p95"]
    assert status_of(*SHORT, "--rows", "g35@amdd") == 2
    assert "did you mean g35@amd?" in capsys.readouterr().err
    assert status_of(*SHORT, "--gpus", "4", "--rows", "g35@amd") == 2
    assert "4 GPUs are no whole hosts of 8" in " ".join(capsys.readouterr().err.split())


def test_people_read_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    printed = _printed(capsys, *SHORT)
    for word in ("digest", "hit_ratio", "bytes, host_nics_in", "recompute", "1.00x", "Sampled", "Left out"):
        assert word in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--g2", "64G"], "row g35: the memory of GPUs and hosts had all that was found. Use --g1 0 --g2 0"),
        (["--requests", "1"], "row g35: none was found anywhere."),
        (["--g2", "64G", "--rows", "g3,recompute"], "row g3: the memory of GPUs and hosts had all"),
        ([], ""),
        (["--g2", "64G", "--rows", "recompute"], ""),
    ],
)
def test_it_says_why_all_stores_look_alike(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """Every row had 1.00x, and nothing said why."""
    notes = json.loads(_printed(capsys, *SHORT, "--json", *words))["notes"]
    found = [note for note in notes if note.startswith("No block was loaded from a store")]
    assert len(found) == bool(said)
    assert said in "".join(found)
    assert not said or notes[0] == found[0]


def test_all_among_the_faults_is_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SHORT, "--requests", "4", "--rows", "recompute", "--json", "--faults"]
    plans = [json.loads(_printed(capsys, *words, faults))["pod"] for faults in ("all", "slow, all")]
    assert plans[0]["faults"] == plans[1]["faults"] == list(FAULTS)


def test_the_cursor_is_shown_again_where_a_run_is_terminated() -> None:
    """And what plays the rows has ended with it."""
    ours, theirs = os.openpty()
    words = [
        sys.executable,
        "-P",
        "-m",
        "agent.cli",
        "sim",
        "--requests",
        "1000000",
        "--rows",
        "g35,recompute",
    ]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=theirs, env=environment, start_new_session=True
    ) as run:
        os.close(theirs)
        shown = b""
        while b"\x1b[?25l" not in shown or b"recompute" not in shown:
            shown += os.read(ours, 4096)
        run.terminate()
        with suppress(OSError):  # EIO: nobody has the other end any more
            while more := os.read(ours, 4096):
                shown += more
        os.close(ours)
    assert run.returncode == 130
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")
    assert b"Traceback" not in shown


def test_rows_stand_below_each_other_on_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts and rows alike: a block for each row cannot be compared."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = _printed(capsys, *SHORT[:-6], *SHORT[-4:], "--rows", "g35,recompute,lustre-dpu").splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line for line in lines if line.endswith("%") and "x" in line}
    assert list(rows) == ["g35", "recompute", "lustre-dpu"]
    assert len({len(row) for row in rows.values()}) == 1
    assert len({len(line) for line in lines if line.startswith(("digest", "hit_ratio", "drive w"))}) == 1


def test_a_trace_is_played_with_its_own_blocks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = _trace(tmp_path, 40, block_size=64)
    record = json.loads(_printed(capsys, *SHORT, "--requests", "35", "--trace", str(file), "--json"))
    assert (record["requests"], record["block_tokens"], record["load"]) == (35, 64, 0.0)
    assert record["hit_ratio"] > 0.5


def test_players_play_it_as_a_replay_does(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["sim", "--pod", "one", "--trace", str(_trace(tmp_path, 30)), "--players", "1"]
    record = json.loads(_printed(capsys, *words, "--json"))
    # 4 blocks are common, 2 are those of a fifth of the requests: 14 are not found, and stored.
    assert (record["requests"], record["blocks"], record["hit_ratio"]) == (30, 180, (180 - 14) / 180)
    assert [row["name"] for row in record["rows"]] == ["g35"]
    assert record["read_mib_per_s"] * record["seconds"] == pytest.approx(
        record["bytes_read"] / (1 << 20), rel=0.05
    )
    assert record["bytes_read"] / 166 == record["bytes_written"] / 14
    # Without GPUs no weights have to fit.
    text = _printed(capsys, *words, "--gpus", "1", "--gpus-per-host", "1")
    assert "1 player: " in text
    assert "Left out: processors." in text


def test_a_trace_is_read_as_it_is_played(tmp_path: Path) -> None:
    """Not ahead: a trace may be larger than memory."""
    from agent.sim.experiment import Experiment
    from agent.sim.pod_plan import PodPlan

    requests = iter(Experiment(PodPlan(), trace=_trace(tmp_path, 5000), load=0.0, requests=4).source()())
    assert [next(requests).number for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(StopIteration):
        next(requests)


def test_a_trace_may_come_at_another_pace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(_trace(tmp_path, 40))
    slow, fast = (
        json.loads(_printed(capsys, *SHORT, "--trace", file, "--load", load, "--json"))["rows"][0]
        for load in ("0.01", "0.5")
    )
    assert slow["virtual_seconds"] > 10 * fast["virtual_seconds"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pod", "superpd"], "did you mean superpod?"),
        (["--gpu", "gb20"], "did you mean gb200?"),
        (["--fault-every", "1e-9"], "faults cannot come every 1e-09 s; give 0.01 s or more"),
        (["--fault-every", "0"], "faults cannot come every 0 s"),
        (["--fault-every", "nan"], "--fault-every: nan is no number"),
        (["--load", "nan"], "--load: nan is no number"),
        (["--load", "-1"], "--load: -1 is not from 0 to 100"),
        (["--prefill-rate", "nan"], "--prefill-rate: nan is no number"),
        (["--trace", "trace.jsonl", "--workload", "chat"], "a trace is its own workload"),
        (["--enclosures", "0"], "1 to 1,024 enclosures, not 0"),
        (["--prefill-rate", "0"], "--prefill-rate of 0 carries nothing"),
        (["--model", "deepseek-v33"], "did you mean deepseek-v3"),
        (["--model", "qwen3-32b"], "no prefill rate of qwen3-32b on gb200"),
        (["--model", "kimi-k2.6", "--gpu", "h100", "--pod", "one"], "1,040 GB of weights in FP8, and 8 h100"),
        (["--rows", "recompte"], "did you mean recompute?"),
        (["--rows", "g4"], "needs the rate of shared storage"),
        (["--workload", "chats"], "did you mean chat?"),
        (["--faults", "stap"], "did you mean stop?"),
        (["--players", "2", "--load", "0.7"], "players take requests as fast as they can"),
        (["--players", "2", "--rows", "g35,g3"], "players play the pool alone"),
        (["--read-deadline-ms", "nan"], "should be less than or equal to 60000"),
        (["--load", "1e-300"], "--load: 1e-300 is less than 1e-06"),
        (["--prefill-rate", "inf"], "--prefill-rate: inf is not from 1e-06 to 1e+15"),
        (["--decode-rate", "1e-300"], "--decode-rate: 1e-300 is not from 1e-06 to 1e+15"),
        (["--spines", "5"], "--spines and --oversubscription are matters of a fabric"),
        (["--oversubscription", "2"], "--spines and --oversubscription are matters of a fabric"),
        (["--fault-every", "3"], "--fault-every is a matter of faults"),
        (["--g4", "1TB/s"], "--g4 is a matter of the rows g4 and g35+g4; add one to --rows"),
        (["--prestage-memory", "1G"], "is a matter of the rows g35-prestages and g35-learns"),
        (["--g3", "1T"], "--g3 is a matter of the row g3;"),
        (["--g3-rate", "1GB/s"], "--g3-rate is a matter of the row g3;"),
        (["--faults", "ALL"], "(did you mean all?); there are stop, slow"),
        (["--drive-size", "1"], "a drive of 1 B has no room for a set of"),
        (["--drive-size", "0"], "a drive of 0 B has no room for a set of"),
        (["--data", ""], "the path is empty"),
        (["--trace", ""], "the path is empty"),
        (["--trace", "trace.jsonl", "--block-tokens", "64"], "a trace has blocks of its own size"),
    ],
)
def test_what_cannot_be_simulated_is_explained(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """As wrong usage, and in the words of the error."""
    assert status_of(*SHORT, *words) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (None, "cannot read the trace"),
        (b"", "no request was played"),
        (b'{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}\n', "blocks and tokens"),
        (b"\0\0\n\0\n", "the first of 2 broken lines: line 1: a NUL byte at column 1"),
        (
            b'{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}',
            "line 1: 3 blocks of 512 tokens are more than a prompt of 40",
        ),
    ],
)
def test_a_trace_without_a_prompt_is_explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, lines: bytes | None, said: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    if lines is not None:
        trace.write_bytes(lines)
    assert main([*SHORT, "--trace", str(trace)]) == 1
    assert said in capsys.readouterr().err


def test_a_trace_may_have_the_time_of_day(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In milliseconds or microseconds since 1970: a run begins with the first request."""
    trace, digests = _trace(tmp_path, 30), set()
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    for begins in (0, 1_795_000_000_000, 1_795_000_000_000_000):
        for line in lines:
            line["timestamp"] %= 1_000_000
            line["timestamp"] += begins
        trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        words = [*SHORT, "--trace", str(trace), "--faults", "slow", "--json"]
        digests.add(json.loads(_printed(capsys, *words))["digest"])
    assert len(digests) == 1


@pytest.mark.parametrize("rows", ["g35", "g35,recompute"])
def test_a_run_of_more_than_a_lifetime_is_explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, rows: str
) -> None:
    """A prompt of 2**52 tokens, as a broken recorder writes it, takes thousands of years."""
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1 << 52, "output_length": 1, "hash_ids": [1, 2]}
    trace.write_text(f"{json.dumps(line)}\n")
    assert main([*SHORT, "--rows", rows, "--trace", str(trace)]) == 1
    told = capsys.readouterr().err
    assert "the run takes more than 3,000,000,000 s of virtual time" in told
    assert "bug" not in told


def test_a_trace_that_is_no_regular_file_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A device has no end, and a FIFO cannot be read once for each row."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for trace in ("/dev/zero", str(fifo)):
        assert main([*SHORT, "--trace", trace]) == 1
        assert "is no regular file" in capsys.readouterr().err


def test_no_reader_of_traces_takes_a_device() -> None:
    with pytest.raises(UserError, match="is a device and no trace"):
        list(TraceFile(Path("/dev/zero")))


def test_broken_lines_are_counted_and_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = _trace(tmp_path, 20)
    trace.write_text("nonsense\n" + trace.read_text())
    words = [*SHORT, "--trace", str(trace)]
    assert "1 broken line of the trace; the first: line 1: no JSON" in " ".join(
        _printed(capsys, *words).split()
    )
    assert json.loads(_printed(capsys, *words, "--json"))["broken_lines"] == 1


def test_the_report_says_what_was_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SHORT, "--kv", "bf16", "--g4", "1TB/s", "--drive-size", "15.36T", "--g1", "1G"]
    words += ["--rows", "g35,recompute,g4"]
    record = json.loads(_printed(capsys, *words, "--json"))
    assert [record[name] for name in ("preset", "model", "kv", "gpu")] == [
        "rack", "deepseek-v3", "bf16", "gb200",
    ]  # fmt: skip
    assert record["pod"]["drive_bytes"] == 15_360_000_000_000
    printed = _printed(capsys, *words)
    for said in (
        "deepseek-v3, KV in bf16, on gb200", "computes 26,156 in prompts of 2,000",
        "generates 13,386 tokens/s",
        "1 GiB a GPU, 0 B a host", "16 TB a host", "1 TB/s for the pod", "of the GPUs' time, all computed",
    ):  # fmt: skip
        assert said in printed


@pytest.mark.parametrize("rate", ["0GB/s", "fast", "400", "400 GiB"])
def test_a_rate_that_is_none_is_a_wrong_argument(capsys: pytest.CaptureFixture[str], rate: str) -> None:
    assert status_of(*SHORT, "--host-nic", rate) == 2
    assert "a rate is" in capsys.readouterr().err


def test_blocks_of_a_workload_may_be_larger(capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(_printed(capsys, *SHORT, "--block-tokens", "2048", "--json"))
    assert record["block_tokens"] == 2048
    assert record["bytes"]["host_nics_out"] > 2048 * 35_136


def test_rates_are_decimal_and_a_small_b_is_bits() -> None:
    from agent.sizes import parse_rate, readable_rate

    assert parse_rate("800Gb/s") == parse_rate("100 GB/s") == 100e9
    assert parse_rate("2.5TB/s") == 2.5e12
    assert readable_rate(400e9) == "400 GB/s"
    assert readable_rate(2.5e12) == "2.5 TB/s"


def test_drives_are_decimal_as_they_are_sold() -> None:
    from agent.sizes import parse_drive_size

    assert parse_drive_size("15.36T") == parse_drive_size("15.36 TB") == 15_360_000_000_000
    assert parse_drive_size("14TiB") == 14 << 40
    for wrong in ("much", "0.1", "99999999T"):
        with pytest.raises(ValueError, match="a size is"):
            parse_drive_size(wrong)


def _documented(repository: Path) -> list[list[str]]:
    page = (repository / "docs" / "pod.md").read_text()
    lines = [line.split() for line in page.splitlines() if line.startswith(".venv/bin/g35 sim")]
    return [words[1:] for words in lines]


def test_the_commands_of_the_page_run(
    capsys: pytest.CaptureFixture[str], repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a few requests and a small pod: how long they take as they stand is the page's to say."""
    monkeypatch.chdir(repository)
    commands = _documented(repository)
    assert len(commands) >= 6
    for words in commands:
        small = ["--requests", "12", "--gpus", "8", "--drives", "4"]
        printed = _printed(capsys, *words, *small)
        assert "digest" in printed
