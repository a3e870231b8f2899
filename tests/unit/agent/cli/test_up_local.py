"""`g35 up --local`: what a start that is cut short leaves, and what the next one makes of it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from agent.cli.up.agent_toml import agent_toml
from agent.cli.up.layout import Layout
from agent.cli.up.up_arguments import UpOptions
from agent.cli.up.up_verb import _Pool
from agent.config.local_section import LocalSection
from agent.local.device import open_device


@pytest.mark.parametrize("was_labelled", [True, False])
def test_the_key_of_a_pool_on_a_local_file_stays(tmp_path: Path, was_labelled: bool) -> None:
    layout = Layout(tmp_path / "state")
    layout.make_folder()
    ssd = tmp_path / "ssd"
    pool = _Pool(layout, tmp_path / "mnt", UpOptions(local=ssd, enclosures=0))
    before = layout.files()
    layout.key.write_text("key")
    pool._formatted = True
    if was_labelled:
        open_device(LocalSection.model_validate({"path": ssd, "size": "8M"})).close()
    pool.remove_what_it_made(before)
    assert layout.key.exists() is was_labelled


@pytest.mark.parametrize(("content", "size"), [(None, "320M"), (b"", "320M"), (b"x", "0")])
def test_a_file_without_a_byte_is_made_anew(tmp_path: Path, content: bytes | None, size: str) -> None:
    ssd = tmp_path / "ssd"
    if content is not None:
        ssd.write_bytes(content)
    options = UpOptions(local=ssd, enclosures=0, drive_size="320M")
    text = agent_toml(Layout(tmp_path), tmp_path / "mnt", [], options, local_port=4421)
    assert tomllib.loads(text)["local"][0]["size"] == size
