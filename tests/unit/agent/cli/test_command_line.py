"""The command line's manners: exit codes, errors without tracebacks, and a quick `--help`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent.cli import main as command_line
from agent.errors import ConfigError, Fault, G35Error, PeerError, UserError
from host_shim.session_files import Refusal
from tests.support.rungs import cli_reference
from tests.support.verbs_here import status_of


def _failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let the verb `replay` end with `error`."""

    def replay() -> None:
        raise error

    import agent.cli.replay_verb

    monkeypatch.setattr(agent.cli.replay_verb, "replay", replay)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["replay"],
        ["replay", "t", "--mount", ".", "--bogus"],
        ["replay", "t", "--mount", ".", "--concurrency", "0"],
        ["replay", "t", "--mount", ".", "--plot", "x.doc"],
        ["replay", "t", "--mount", ".", "--lru-bytes", "much"],
        ["trace", "generate", "--requests", "many"],
    ],
)
def test_wrong_arguments_are_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(*words) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("verb", sorted(command_line.VERBS))
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(verb, "--help") == 0
    assert "Usage: g35" in capsys.readouterr().out


def test_no_line_of_any_help_is_cut_off_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words, command in [("", None), *cli_reference.verbs()]:
        if command is None or words.split()[0] in command_line.VERBS:
            assert status_of(*words.split(), "--help") == 0
        else:
            with pytest.raises(SystemExit):
                command.main(["--help"])
        _, _, shown = capsys.readouterr().out.partition("Options:\n")
        assert shown
        assert not [line for line in shown.splitlines() if "…" in line or line.endswith("...")], words


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (UserError("no such pool", "make one"), "error: no such pool\nhint: make one\n"),
        (ConfigError("unknown key"), "error: unknown key\n"),
        (FileNotFoundError(2, "No such file", "a.toml"), "error: a.toml: No such file\nhint: name one "),
        (OSError(28, "No space left", "/x"), "error: /x: No space left\nhint: make room there"),
        (OSError(71, "Protocol error"), "error: Protocol error\nhint: G35_DEBUG=1 "),
        # An agent's refusal is neither a PermissionError nor a BlockingIOError, by which forks are known.
        (Refusal(13, "Permission denied", "/m/s"), "error: /m/s: Permission denied\nhint: run "),
        (Refusal(11, "Try again"), "error: Try again\nhint: G35_DEBUG=1 "),
        (BlockingIOError(11, "Try again"), "error: Linux refuses another process\nhint: raise "),
        (KeyError("slot"), "error: KeyError: 'slot'\nhint: this is a bug of g35; "),
    ],
)  # fmt: skip
def test_errors_are_sentences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, shown: str
) -> None:
    monkeypatch.delenv("G35_DEBUG", raising=False)
    _failing(monkeypatch, error)
    assert status_of("replay") == 1
    assert capsys.readouterr().err.startswith(shown)


def test_the_traceback_is_there_for_who_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("G35_DEBUG", "1")
    _failing(monkeypatch, UserError("no such pool"))
    assert status_of("replay") == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    _failing(monkeypatch, KeyboardInterrupt())  # type: ignore[arg-type]
    assert status_of("replay") == 130


def test_errors_say_whose_fault_they_are() -> None:
    assert G35Error("x").fault is Fault.WORLD
    assert UserError("x").fault is ConfigError("x").fault is Fault.OURS
    assert PeerError("x").fault is Fault.PEER
    assert G35Error("x", fault=Fault.PEER).fault is Fault.PEER


def test_help_imports_nothing_heavy(repository: Path) -> None:
    began = time.monotonic()
    shown = subprocess.run(
        [
            sys.executable, "-P", "-c",
            "import sys; from agent.cli.main import main\n"
            "try: main(['--help'])\n"
            "except SystemExit: pass\n"
            "print([name for name in ('numpy', 'cryptography', 'trio', 'pydantic') if name in sys.modules])",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=repository,
    )  # fmt: skip
    assert shown.stdout.splitlines()[-1] == "[]"
    assert time.monotonic() - began < 10


def test_a_generated_trace_goes_to_a_file_or_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["trace", "generate", "--requests", "5", "--seed", "3"]
    assert status_of(*words) == 0
    printed = capsys.readouterr().out
    assert status_of(*words, "--output", str(tmp_path / "t.jsonl")) == 0
    assert (tmp_path / "t.jsonl").read_text() == printed
    assert printed.count("\n") == 5
