"""A mistyped word is answered by the nearest known one."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent.config.configuration import parse_configuration
from agent.enclosure_control.description import parse_description
from agent.errors import ConfigError, UserError, did_you_mean
from agent.replay.run_replay import _check_volume
from emulator.jbof.cli import app
from tests.support.verbs_here import status_of


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"agent": {"wrokers": 2}}, "agent.wrokers: unknown key (did you mean workers?)"),
        ({"agnt": {}}, "agnt: unknown key (did you mean agent?)"),
        ({"enclosures": [{"adress": "::1"}]}, "enclosures.0.adress: unknown key (did you mean address?)"),
        ({"s3": {"tenants": [{"bucket": []}]}}, "s3.tenants.0.bucket: unknown key (did you mean buckets?)"),
        ({"agent": {"zzz": 1}}, "agent.zzz: unknown key"),
        ({"agent": {"door": "fuze"}}, "agent.door: should be 'fuse' or 'pyfuse3' (did you mean fuse?)"),
        (
            {"volumes": [{"value_size": "32M"}]},
            "value_size: should be less than or equal to 16 MiB",
        ),
        ({"agent": {"directory_cache": "1K"}}, "should be greater than or equal to 1024 KiB"),
    ],
)
def test_an_unknown_word_or_a_wrong_size_of_the_configuration(document: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_configuration(document, "agent.toml")
    problems = refused.value.message.partition("configuration: ")[2].split("; ")
    assert any(each.endswith(said) for each in problems)


def test_an_unknown_word_of_an_enclosures_description() -> None:
    document = {"subsystems": [{"nqn": "nqn.2026-01.io.g35:a", "listners": []}], "lvols": [{"transprot": 1}]}
    with pytest.raises(ConfigError, match=r"subsystems.0.listners: unknown key \(did you mean listeners\?\)"):
        parse_description(document, "enclosure.toml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sttaus"], "Did you mean 'status'?"),
        (["STATUS"], "Did you mean 'status'?"),
        (["tenant", "lst"], "Did you mean 'list'"),
        (["config", "CHECK"], "Did you mean 'check'?"),
        (["config", "prnt"], "No such command 'prnt'. g35 config has: check, reference, unit."),
        (["trace", "mke"], "g35 trace has: generate."),
        (["up", "--enclosrues", "2"], "--enclosures"),
        (["up", "--transport", "rmda"], "'rmda' is not one of 'tcp', 'rdma' (did you mean rdma?)."),
        (["config", "unit", "openrc"], "'openrc' is not one of"),
        (["bench", "kv_get_1mm"], "(did you mean kv_get_1m?)"),
    ],
)
def test_a_verb_an_option_and_a_name_of_the_bench(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert status_of(*words) == 2
    assert said in capsys.readouterr().err


def test_a_volume_that_the_pool_does_not_have() -> None:
    stats = {"volumes": [{"name": "kv-large"}, {"name": "files"}]}
    with pytest.raises(UserError, match=r"no volume 'kv-lagre' \(did you mean kv-large\?\)"):
        _check_volume("kv-lagre", stats)
    _check_volume("files", stats)
    _check_volume("anything", {})


def test_nothing_near_is_nothing_said() -> None:
    assert did_you_mean("zzz", ["workers", "mount"]) == ""
    assert did_you_mean("write", ["suite", "share"]) == "", "a word that rhymes"
    assert did_you_mean("tpc", ["tcp", "rdma"]) == " (did you mean tcp?)"


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--media", "files"], "--folder"), (["--media", "memory", "--folder", "drives"], "have no --folder")],
)
def test_an_enclosure_says_where_its_media_and_its_folder_do_not_fit(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert said in done.output
    assert not list(tmp_path.iterdir())
