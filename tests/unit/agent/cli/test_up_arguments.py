"""What `g35 up` refuses before anything is made: the option is named, and what it takes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from agent.cli import main as command_line
from agent.cli.up.agent_toml import agent_toml, check_room
from agent.cli.up.layout import Layout
from agent.cli.up.up_arguments import UpOptions
from agent.config.configuration import parse_configuration
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.sizes import parse_size
from agent.spill.bundle import bytes_wanted


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
        ("--write", "sometimes", "second-use"),
        ("--prefill-tokens-per-s", "nan", "1000000000"),
        ("--prefill-tokens-per-s", "4000", "go together"),
        ("--bytes-per-token", "4G", "0 to 16M"),
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


def test_the_least_size_that_is_said_is_enough() -> None:
    from typer import BadParameter

    with pytest.raises(BadParameter, match="the least is") as refused:
        check_room(UpOptions(enclosures=1, drives=1, drive_size="16M"))
    least = str(refused.value).rpartition(" ")[2]
    check_room(UpOptions(enclosures=1, drives=1, drive_size=least))
    check_room(UpOptions(enclosures=1, drives=1, value_size="64K", files=False))


@pytest.mark.parametrize(("chunk_size", "drive_size"), [("16M", "1G"), ("4M", "256M"), ("4M", "300M")])
def test_chunks_that_the_drives_have_no_room_for_are_refused(chunk_size: str, drive_size: str) -> None:
    from typer import BadParameter

    with pytest.raises(BadParameter, match="no room for /shared in chunks"):
        check_room(UpOptions(chunk_size=chunk_size, drive_size=drive_size))
    check_room(UpOptions(chunk_size="4M", drive_size="1G"))
    check_room(UpOptions(chunk_size=chunk_size, drive_size=drive_size, files=False))


def test_more_namespaces_than_a_pool_can_have() -> None:
    from typer import BadParameter

    with pytest.raises(BadParameter, match="4096 is the most"):
        check_room(UpOptions(enclosures=64, drives=256))


def test_the_policy_and_the_s3_door_that_are_asked_for_are_configured(tmp_path: Path) -> None:
    chosen = UpOptions(s3=True, write="second-use", prefill_tokens_per_s=4000.0, bytes_per_token="70272")
    nowhere = {"address": "127.0.0.1", "port": 4420, "nqn": "nqn.2014-08.org.nvmexpress:one"}
    text = agent_toml(Layout(tmp_path), tmp_path / "mnt", [nowhere], chosen, 9036)
    found = parse_configuration(tomllib.loads(text), "the configuration")
    [policy] = found.policies
    assert (policy.volume, policy.write, policy.bytes_per_token) == ("kv", "second-use", 70_272)
    assert found.s3.listen == ("127.0.0.1:9036", "127.0.0.2:9036")
    assert found.s3.bucket_of_host == {"127.0.0.2": "kvcache"}
    assert found.s3.tenants[0].credentials == tmp_path / "s3.credentials"
    bare = parse_configuration(
        tomllib.loads(agent_toml(Layout(tmp_path), tmp_path, [nowhere], UpOptions())), ""
    )
    assert (bare.policies, bare.s3.listen) == ((), ())


def test_a_folder_for_what_is_evicted_is_configured_for_kv_alone(tmp_path: Path) -> None:
    from typer import BadParameter

    nowhere = {"address": "127.0.0.1", "port": 4420, "nqn": "nqn.2014-08.org.nvmexpress:one"}
    for value_size in ("64K", "16M"):
        chosen = UpOptions(spill=tmp_path, value_size=value_size)
        chosen.check()
        text = agent_toml(Layout(tmp_path), tmp_path / "mnt", [nowhere], chosen)
        parsed = parse_configuration(tomllib.loads(text), "the configuration")
        [section] = parsed.spill
        assert (section.folder, section.volumes, section.max_bytes) == (tmp_path, ("kv",), 64 << 30)
        assert {each.name: each.marks for each in parsed.volumes}["kv"] == 340
        assert section.bundle >= bytes_wanted(parse_size(value_size) + HEADER_BYTES)
    with pytest.raises(BadParameter, match="there is no folder"):
        UpOptions(spill=tmp_path / "missing").check()
