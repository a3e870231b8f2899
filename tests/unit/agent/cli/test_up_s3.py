"""What `g35 up --s3` says of its door: where it is, and that it is not where clients look for it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import typer

from agent.cli.up.agent_toml import agent_toml
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
    assert "RDMA" not in printed


def test_the_address_of_rdma_is_said_and_configured(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.s3_port.write_text("9036\n")
    layout.s3_address.write_text("127.1.2.3\n")
    options = UpOptions(s3=True, s3_rdma=True)
    assert "RDMA at 127.1.2.3" in ready_message(layout, tmp_path / "mnt", options)
    text = agent_toml(layout, tmp_path / "mnt", [], options, 9036, s3_address="127.1.2.3")
    assert tomllib.loads(text)["s3"]["rdma"] == "127.1.2.3"
    assert (
        "rdma" not in tomllib.loads(agent_toml(layout, tmp_path / "mnt", [], UpOptions(s3=True), 9036))["s3"]
    )


def test_rdma_of_no_s3_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="it wants --s3"):
        UpOptions(s3_rdma=True).check()
