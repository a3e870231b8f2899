"""Which namespace a path of [[local]] led to is remembered over restarts, within bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.errors import G35Error
from agent.local.remembered_labels import FILE, ROWS_MAX, RememberedLabels

ONE, OTHER = b"g35l" + b"1" * 12, b"g35l" + b"2" * 12


def test_what_was_noted_is_there_after_a_restart(tmp_path: Path) -> None:
    labels = RememberedLabels(tmp_path)
    assert labels.of(Path("/x/ssd")) == ""
    labels.note(Path("/x/ssd"), ONE)
    assert RememberedLabels(tmp_path).of(Path("/x/ssd")) == ONE.hex()
    labels.note(Path("/x/ssd"), OTHER)
    assert RememberedLabels(tmp_path).of(Path("/x/ssd")) == OTHER.hex()


def test_the_earliest_go_first(tmp_path: Path) -> None:
    labels = RememberedLabels(tmp_path)
    for number in range(ROWS_MAX + 3):
        labels.note(Path(f"/x/{number}"), ONE)
    rows = json.loads((tmp_path / FILE).read_text())
    assert (len(rows), next(iter(rows))) == (ROWS_MAX, "/x/3")


@pytest.mark.parametrize("text", ["", "[]", '{"/x": 1}', "\x00"])
def test_a_damaged_file_is_no_licence_for_a_new_label(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(G35Error, match="is damaged"):
        RememberedLabels(tmp_path)


@pytest.mark.expects_log("cannot note local namespaces")
def test_a_folder_that_takes_no_note_is_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    labels = RememberedLabels(tmp_path / "gone")
    labels.note(Path("/x/ssd"), ONE)
    assert "cannot note local namespaces" in caplog.text
    caplog.clear()
