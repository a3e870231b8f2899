"""What `g35 up` refuses before anything is made: the option is named, and what it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.cli import main as command_line
from agent.cli.up.layout import AgentOptions
from agent.cli.up.up_arguments import check_room


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--drive-size", "nonsense", "1M to 1024T"),
        ("--drive-size", "0", "1M to 1024T"),
        ("--drive-size", "-1G", "1M to 1024T"),
        ("--drive-size", "9" * 400, "1M to 1024T"),
        ("--drive-size", "1048577", "multiple of 4K"),
        ("--drive-size", "64M", "the least is"),
        ("--value-size", "big", "64K to 16M"),
        ("--value-size", "32K", "64K to 16M"),
        ("--value-size", "17M", "64K to 16M"),
        ("--value-size", "65537", "multiple of 4K"),
        ("--suite", "rot13", "aes-256-xts+crc64"),
        ("--door", "front", "pyfuse3"),
        ("--media", "tape", "memory"),
        ("--metrics", "9035", "127.0.0.1:9035"),
        ("--metrics", "127.0.0.1:", "127.0.0.1:9035"),
        ("--metrics", "127.0.0.1:0", "127.0.0.1:9035"),
        ("--metrics", "127.0.0.1:99999", "127.0.0.1:9035"),
        ("--metrics", "10.0.0.1:9035", "use 127.0.0.1 or [::1]"),
        ("--read-deadline-ms", "0", "0.1"),
        ("--read-deadline-ms", "nan", "60000"),
        ("--drives", "257", "256"),
    ],
)
def test_a_wrong_word_is_2_and_nothing_is_made(
    option: str, value: str, allowed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as ended:
        command_line.main(["up", "--state", str(tmp_path / "state"), option, value])
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert option in said
    assert allowed in said
    assert "Traceback" not in said
    assert not (tmp_path / "state").exists()


def options(**changed: object) -> AgentOptions:
    standard: dict[str, object] = {
        "transport": "tcp", "door": "fuse", "workers": 4, "value_size": "1M", "suite": "aes-256-gcm",
        "read_deadline_ms": 50.0, "metrics": "", "files": True,
    }  # fmt: skip
    return AgentOptions(**{**standard, **changed})  # type: ignore[arg-type]


def test_the_least_size_that_is_said_is_enough() -> None:
    from typer import BadParameter

    with pytest.raises(BadParameter, match="the least is") as refused:
        check_room(1, 1, "16M", options())
    least = str(refused.value).rpartition(" ")[2]
    check_room(1, 1, least, options())
    check_room(1, 1, "1G", options(value_size="64K", files=False))


def test_more_namespaces_than_a_pool_can_have() -> None:
    from typer import BadParameter

    with pytest.raises(BadParameter, match="4096 is the most"):
        check_room(64, 256, "1G", options())
