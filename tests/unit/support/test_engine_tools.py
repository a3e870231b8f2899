"""The commands that judge and measure engines: what they read, and what they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines.first_token_of_engines import HEAD, Row, line, main
from tests.support.engines.their_own_tests import read_report

REPORT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest">
<testcase classname="a" name="test_well"/>
<testcase classname="a" name="test_skipped"><skipped message="no extension"/></testcase>
<testcase classname="a" name="test_missed[1]"><failure message="assert False&#10; +">at</failure></testcase>
<testcase classname="a" name="test_no_folder"><error message="failed on setup">trace</error></testcase>
</testsuite></testsuites>
"""


def test_a_report_of_an_engines_tests(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    run = read_report(tmp_path / "report.xml")
    assert run.counts == {"passed": 1, "skipped": 1, "failure": 1, "error": 1}
    assert run.failures == ["test_missed[1]: assert False", "test_no_folder: failed on setup"]


def test_a_table_has_a_row_for_each_engine() -> None:
    said = line(Row("vllm", 512, (2.0, 3.0, 0.5), (4.0, 4.25, 0.125)))
    assert said == "| vllm | 512 tokens | 2.00 s | 3.00 s | 0.50 s | 4.00 s | 4.25 s | 0.12 s |"
    assert {each.count("|") for each in HEAD.splitlines()} == {said.count("|")}


@pytest.mark.parametrize("prefix", ["0", "200"])
def test_a_prefix_is_whole_chunks(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--prefix", prefix])
    assert "a multiple of 128" in capsys.readouterr().err
