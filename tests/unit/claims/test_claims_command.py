"""`g35 claims` as it is typed: its JSON, its tables, its plots, and what it refuses."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from agent.claims.verdicts import CHANGES
from agent.cli.main import main
from agent.replay.trace_generator import encode_line, made_trace
from tests.support.verbs_here import status_of

Capture = pytest.CaptureFixture[str]


def _json(capsys: Capture, *words: str) -> dict[str, Any]:
    assert status_of("claims", "--json", *words) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def _claim(found: dict[str, Any], start: str) -> dict[str, Any]:
    (claim,) = [each for each in found["claims"] if each["claim"].startswith(start)]
    return dict(claim)


def test_the_json_has_all_of_it(capsys: Capture) -> None:
    found = _json(capsys, "--model", "llama-3.1-405b", "--kv", "fp8", "--gpu", "gb200", "--pod", "superpod")
    assert found["break_even_gb_s"] == pytest.approx(0.334, rel=0.01)
    assert found["supply"] == pytest.approx(12.5 / found["break_even_gb_s"], rel=1e-4)
    assert {claim["holds"] for claim in found["claims"]} <= {True, False, None}
    assert all(claim["where"] for claim in found["claims"])
    assert all(row["source"] and row["date"] for row in found["inputs"])
    assert len(found["sensitivity"]) == 2 * len(CHANGES)
    assert found["trace"] is None
    for way in found["energy_j"].values():
        assert way["total"] == pytest.approx(
            sum(part for name, part in way.items() if name != "total"), rel=1e-4
        )
    said = {row["stated"]: row["enclosure_tb"] for row in found["capacities"]}
    assert said["drives times their size"] == pytest.approx(491.52)
    assert said["a 36th of 18.4 PB"] == pytest.approx(511.1, rel=1e-3)
    assert said["the keynote"] == 600


def test_a_slower_g4_makes_the_claim_hold(capsys: Capture) -> None:
    words = ("--model", "llama-3.1-405b", "--hits", "0.98")
    assert not _claim(_json(capsys, *words, "--g4", "2.5TB/s"), "5x tokens a second over shared")["holds"]
    assert _claim(_json(capsys, *words, "--g4", "300 GB/s"), "5x tokens a second over shared")["holds"]


def test_the_power_over_g4_names_the_watts_that_it_rests_on(capsys: Capture) -> None:
    """4.96 times the tokens a second, and 5.38 times the power: by the watts of a G4 that nobody measured."""
    claim = _claim(
        _json(capsys, "--model", "llama-3.1-405b", "--hits", "0.98"), "5x power efficiency over sh"
    )
    assert claim["holds"] is True
    assert "4.69x over a G4 that draws nothing; it holds by these watts alone: 118 W" in claim["where"]
    assert "17.6 kW of supplies" in claim["where"]
    assert "2,000 W an enclosure (assumed" in claim["where"]


def test_a_g4_that_no_host_can_take_draws_no_watts(capsys: Capture) -> None:
    """At 100 TB/s the claim of power held, at the same tokens a second, by watts for what nobody can load."""
    start, taken = "5x power efficiency over sh", "this G4 gives 100.00 TB/s, of which the hosts take 28.80"
    most, more = (_json(capsys, "--g4", rate) for rate in ("28.8TB/s", "100TB/s"))
    assert more["energy_j"] == most["energy_j"]
    assert _claim(more, start)["holds"] is _claim(most, start)["holds"] is False
    assert taken in _claim(more, "5x tokens a second over sh")["where"]
    assert "which gives 100.00 TB/s, of which the hosts take 28.80" in _claim(more, start)["where"]
    assert "of which" not in _claim(most, start)["where"]


def test_a_verdict_says_what_loads_first_would_give(capsys: Capture) -> None:
    found = _json(capsys, "--model", "llama-3.1-405b", "--hits", "0.98")
    for start in ("5x tokens a second over computing", "5x tokens a second over shared"):
        assert "x by perfect prestaging, " in _claim(found, start)["where"]
    assert set(found["ttft_s"]) == {
        "computed again", "G4, load first", "G4, prestaged", "G3.5, load first", "G3.5, prestaged",
    }  # fmt: skip
    assert "4,096 to 262,144 tokens whatever --context is" in found["ttft_prompts"]


def test_each_input_has_a_name_of_its_own(capsys: Capture) -> None:
    found = _json(capsys)
    names = [row["what"] for row in found["inputs"]]
    assert len(set(names)) == len(names)
    assert {"GPU: watts", "enclosure: watts", "pod: G4, GB/s", "prefill's share of GPU time"} <= set(names)


def test_what_was_said_of_one_pod_is_not_judged_for_another(capsys: Capture) -> None:
    found = _json(capsys, "--pod", "one", "--model", "llama-3.1-8b")
    assert _claim(found, "16 TB a GPU")["holds"] is None
    assert _claim(_json(capsys), "16 TB a GPU")["holds"] is False


def test_cards_of_a_narrow_terminal_are_headed_by_their_first_column(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["claims"])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "hits" not in lines
    assert "95.0%" in lines
    assert "  limit: hits" in lines


def test_a_small_b_is_bits_as_in_the_simulation(capsys: Capture) -> None:
    assert _json(capsys, "--g4", "8Tb/s")["g4_gb_s"] == _json(capsys, "--g4", "1TB/s")["g4_gb_s"]


def test_small_dense_models_never_get_five_over_g4(capsys: Capture) -> None:
    found = _json(capsys, "--model", "llama-3.1-8b", "--kv", "bf16", "--context", "32768", "--g4", "1TB/s")
    row = next(each for each in found["models"] if each["model"] == "llama-3.1-8b")
    assert row["g4_threshold_tb_s"] == 0
    assert "llama-3.1-8b" in _claim(found, "5x tokens a second over shared")["where"].partition("not for")[2]


def test_with_a_trace_hits_and_context_are_the_traces(tmp_path: Path, capsys: Capture) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(encode_line(request) for request in made_trace(35, 60)))
    found = _json(capsys, "--trace", str(trace))
    curve = found["trace"]["hit_curve"]
    assert found["hit_share"] == curve[-1]["pool"] == found["trace"]["unbounded_hit_ratio"]
    assert 512 < found["context"] < 40_000
    assert _claim(found, "The capacity finds")["holds"] is True
    assert found["limit"] == "GPU"
    assert 0.5 < found["trace"]["prefill_share"] < 1
    assert "as the trace has it" in _claim(found, "5x tokens a second of whole")["where"]
    other = _json(capsys, "--trace", str(trace), "--hits", "0.25", "--context", "999")
    assert other["context"] == 999
    assert other["hit_share_asked"] == 0.25 < other["hit_share"]
    with pytest.raises(SystemExit):
        main(["claims", "--trace", str(trace), "--hits", "0.25"])
    assert "25.0%, less than the servers find in their own memory" in capsys.readouterr().out


def test_a_trace_that_is_all_found_is_judged(tmp_path: Path, capsys: Capture) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1000, "output_length": 10, "hash_ids": [1, 2]}
    trace.write_text("\n".join([json.dumps(line)] * 20))
    found = _json(capsys, "--trace", str(trace))
    assert found["hit_share"] == found["local_share"] == 0.999
    assert found["retention_hours"] > 0


def test_square_brackets_of_a_users_file_are_shown(tmp_path: Path, capsys: Capture) -> None:
    figures = tmp_path / "mine.toml"
    figures.write_text(
        '[models."[bold]x[/bold] [/z]"]\nkv_heads = 1\nhead_dim = 64\nlayers = [[2, 1]]\nheads = 2\n'
        'parameters = { total = 1, active = 1 }\nsource = "[bold]x[/bold] [/z]"\ndate = "2026-11"\n'
    )
    assert status_of("claims", "--data", str(figures), "--model", "[bold]x[/bold] [/z]") == 0
    out = capsys.readouterr().out
    assert "inputs: [bold]x[/bold] [/z], KV in fp8" in out
    assert out.count("[bold]x[/bold] [/z]") > 4


def test_the_tables_say_the_same(capsys: Capture) -> None:
    assert status_of("claims", "--pod", "rack") == 0
    out = capsys.readouterr().out
    for words in (
        "break-even bandwidth B*", "what limits", "secondary pages", "not reproducible", "verdicts",
        "each input at half and at double", "loses", "16 TB a GPU", "not judged",
    ):  # fmt: skip
        assert words in out


def test_six_plots_are_drawn(tmp_path: Path, capsys: Capture) -> None:
    _json(capsys, "--plot", str(tmp_path / "new"))
    drawn = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert drawn == [
        "energy.png", "first_token.png", "g4_threshold.png", "hit_ratio.png", "phases.png", "speed_up.png",
    ]  # fmt: skip


def test_what_was_computed_is_told_where_a_plot_cannot_be_written(tmp_path: Path, capsys: Capture) -> None:
    """And a folder that cannot be made is told before a trace is read."""
    (tmp_path / "speed_up.png").mkdir()
    assert main(["claims", "--json", "--plot", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert f"cannot draw into {tmp_path}: Is a directory" in told.err
    assert json.loads(told.out)["claims"]
    file = tmp_path / "a file"
    file.touch()
    assert main(["claims", "--trace", "/nowhere", "--plot", str(file)]) == 1
    assert f"cannot draw into {file}: File exists" in capsys.readouterr().err


def test_a_plot_without_room_leaves_the_earlier_one(tmp_path: Path, capsys: Capture) -> None:
    """And nothing of its own: a PNG was cut off where the disk was full."""
    earlier = tmp_path / "speed_up.png"
    earlier.write_bytes(b"earlier")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        assert main(["claims", "--json", "--plot", str(tmp_path)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"cannot draw into {tmp_path}: File too large" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [earlier]
    assert earlier.read_bytes() == b"earlier"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--model", "lama-3.3-70b"), 2, "did you mean llama-3.3-70b?"),
        (("--gpu", "gb20"), 2, "did you mean gb200?"),
        (("--pod", "superpot"), 2, "did you mean superpod?"),
        (("--g4", "0TB/s"), 2, "more than 0"),
        (("--g4", "2.5"), 2, "TB/s or Gb/s behind it"),
        (("--plot", ""), 2, "--plot': the path is empty"),
        (("--trace", ""), 2, "--trace': the path is empty"),
        (("--data", ""), 2, "--data': the path is empty"),
        (("--context", "0"), 2, "should be greater than or equal to 1"),
        (("--hits", "nan"), 2, "should be less than or equal to 1"),
        (("--hits", "1.5"), 2, "should be less than or equal to 1"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_is_near(
    words: tuple[str, ...], code: int, said: str, capsys: Capture
) -> None:
    assert status_of("claims", *words) == code
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--model", "kimi-k2.6", "--gpu", "h100", "--pod", "one"),
            "1,040 GB of weights in FP8, and 8 h100 have 640",
        ),
        (("--model", "kimi-k3"), "no parameters of kimi-k3 were published"),
        (("--trace", "/nowhere"), "cannot read the trace /nowhere"),
        (("--data", "/nowhere"), "cannot read /nowhere"),
        (("--plot", "/dev/null/x"), "cannot draw into /dev/null/x"),
    ],
)
def test_what_cannot_be_judged_is_refused_with_the_reason(
    words: tuple[str, ...], said: str, capsys: Capture
) -> None:
    assert main(["claims", *words]) == 1
    assert said in capsys.readouterr().err
