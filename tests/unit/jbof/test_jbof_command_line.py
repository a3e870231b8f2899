"""`g35 jbof` refuses what cannot be as all verbs of g35 do: `error:` and `hint:`, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from emulator.command_line import run_program, tell_error, words_of
from emulator.jbof.cli import app
from emulator.jbof.control_client import ControlError, ask
from emulator.jbof.enclosure import EnclosureError, EnclosureSettings


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ports", "3", "--port", "65535"], "of 3 ports the first is 65533 at the most, not 65535"),
        (["--drive-size", "9" * 400], "too large: a size is less than 8 EiB"),
        (["--drive-size", "5Q"], "not a size: '5Q'"),
        (["--read-latency-ms", "inf"], "must be a number of 0 or more"),
    ],
)
def test_numbers_that_are_too_large(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert said in done.output


def test_the_last_port_may_be_the_last_there_is() -> None:
    assert EnclosureSettings(port=65533, ports=3).ports == 3
    for port in (-1, 65536):
        with pytest.raises(EnclosureError, match="a port is between 0 and 65535"):
            EnclosureSettings(port=port)


def test_an_enclosure_that_does_not_answer(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["stats", "--control", str(tmp_path / "none")])
    assert done.exit_code == 1
    error, hint = done.stderr.splitlines()
    assert error == f"error: no enclosure answers at {tmp_path / 'none'}: No such file or directory"
    assert hint.startswith("hint: is an enclosure up")
    with pytest.raises(ControlError) as lost:
        ask(tmp_path / "none", "stats")
    assert not lost.value.was_answered


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (
            FileNotFoundError(2, "No such file or directory", "/x"),
            1,
            "error: /x: No such file or directory\n",
        ),
        (OverflowError("too far"), 1, "error: OverflowError: too far\nhint: this is a bug of g35; run it "),
        (MemoryError(), 1, "error: there is not enough memory"),
    ],
)
def test_what_nobody_expects(
    raised: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def application(**_names: str) -> None:
        raise raised

    with pytest.raises(SystemExit) as ended:
        run_program(application, "g35 jbof")
    assert ended.value.code == status
    assert capsys.readouterr().err.startswith(said)


def test_each_line_of_a_hint_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    tell_error("no device", "start one\nor name it")
    assert capsys.readouterr().err == "error: no device\nhint: start one\nhint: or name it\n"
    assert words_of(ValueError()) == "ValueError"
