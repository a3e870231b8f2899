"""What `g35 up --s3` says of its door: where it is, and that it is not where clients look for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.cli.up.layout import Layout
from agent.cli.up.ready_message import ready_message
from agent.cli.up.up_arguments import UpOptions


@pytest.mark.parametrize(("was", "said"), [("", False), ("9036", False), ("9037", True)])
def test_a_port_that_another_program_took_is_said(tmp_path: Path, was: str, said: bool) -> None:
    layout = Layout(tmp_path)
    layout.s3_port.write_text("9036\n")
    printed = ready_message(layout, tmp_path / "mnt", UpOptions(s3=True), was)
    assert "http://127.0.0.1:9036," in printed
    assert ("9037 is another program's" in printed) is said
