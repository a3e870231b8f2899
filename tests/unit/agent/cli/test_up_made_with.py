"""What `g35 up` remembers of a state folder: it goes on with that, or says which option differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent.cli.up.layout import Layout
from agent.cli.up.made_with import Formatted, check_media, options_of_before
from agent.cli.up.ready_message import ready_message
from agent.cli.up.up_arguments import UpOptions
from agent.errors import G35Error, UserError

DEFAULTS: dict[str, Any] = {
    "enclosures": 2, "drives": 2, "drive_size": "1G", "value_size": "1M", "suite": "aes-256-gcm",
    "files": True,
}  # fmt: skip
MADE = {"enclosures": 1, "drives": 3, "drive_size": "256M", "value_size": "1028K", "suite": "plain+crc64",
        "files": False, "chunk_size": "4M"}  # fmt: skip


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A state folder with one enclosure of three drives in files."""
    found = Layout(tmp_path)
    found.drives(0).mkdir()
    for number in range(3):
        record = {"nguid": "00" * 16, "size": 256 << 20, "lba_bytes": 4096}
        (found.drives(0) / f"drive-{number:03d}.json").write_text(json.dumps(record))
    Formatted("1028K", "plain+crc64", False, "4M").write(found)
    return found


def test_an_empty_folder_takes_everything_as_asked(tmp_path: Path) -> None:
    assert options_of_before(Layout(tmp_path), DEFAULTS, lambda _: False) == DEFAULTS


def test_options_that_nobody_typed_are_those_of_the_pool(layout: Layout) -> None:
    assert options_of_before(layout, DEFAULTS, lambda _: False) == MADE


def test_a_pool_of_an_earlier_version_has_chunks_of_a_mib(layout: Layout) -> None:
    earlier = {name: MADE[name] for name in ("value_size", "suite", "files")}
    layout.made_with.write_text(json.dumps(earlier))
    assert options_of_before(layout, DEFAULTS, lambda _: False) == {**MADE, "chunk_size": "1M"}


def test_the_same_size_in_another_unit_is_no_difference(layout: Layout) -> None:
    asked = {**DEFAULTS, "drive_size": "0.25G"}
    assert options_of_before(layout, asked, lambda name: name == "drive_size")["drive_size"] == "0.25G"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("drive_size", "1G", "made with --drive-size 256M, not with --drive-size 1G"),
        ("value_size", "2M", "made with --value-size 1028K, not with --value-size 2M"),
        ("chunk_size", "1M", "made with --chunk-size 4M, not with --chunk-size 1M"),
        ("suite", "aes-256-gcm", "made with --suite plain+crc64, not with --suite aes-256-gcm"),
        ("files", True, "made with --no-files, not with --files"),
    ],
)
def test_an_option_that_differs_is_named(layout: Layout, name: str, value: object, said: str) -> None:
    with pytest.raises(UserError, match="was made with") as refused:
        options_of_before(layout, {**DEFAULTS, name: value}, lambda given: given == name)
    assert said in str(refused.value)
    assert "another --state" in refused.value.advice


def test_memory_does_not_hide_a_pool_in_files(layout: Layout, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="with --media files, not with --media memory") as refused:
        check_media(layout, "memory")
    assert "leave --media memory out" in refused.value.advice
    check_media(layout, "files")
    check_media(Layout(tmp_path / "empty"), "memory")


def test_another_number_of_drives_is_taken_as_typed(layout: Layout) -> None:
    assert options_of_before(layout, {**DEFAULTS, "drives": 4}, lambda name: name == "drives")["drives"] == 4


def test_a_pool_of_an_earlier_version_tells_of_its_drives(layout: Layout) -> None:
    layout.made_with.unlink()
    found = options_of_before(layout, DEFAULTS, lambda _: False)
    assert found == {**DEFAULTS, "enclosures": 1, "drives": 3, "drive_size": "256M"}


@pytest.mark.parametrize("text", ["", "[]", '{"suite": "x"}', '{"other": 1}'])
def test_a_damaged_note_is_an_error_with_advice(layout: Layout, text: str) -> None:
    layout.made_with.write_text(text)
    with pytest.raises(G35Error, match="damaged") as refused:
        options_of_before(layout, DEFAULTS, lambda _: False)
    assert "remove it" in refused.value.advice


def test_ready_says_the_mount_what_to_try_and_how_to_end(tmp_path: Path) -> None:
    lines = ready_message(Layout(tmp_path), tmp_path / "mnt", UpOptions()).splitlines()
    assert lines[0] == f"mounted at {tmp_path}/mnt; keys, logs and drives are in {tmp_path}"
    assert f"  g35 status --state {tmp_path}" in lines
    assert f"  g35 down --state {tmp_path}" in lines
    assert lines[-1] == "ready"


@pytest.mark.parametrize("there", [True, False])
def test_ready_says_the_folder_of_engines_where_the_pool_has_one(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "mnt/shared/shared"
    if there:
        folder.mkdir(parents=True)
    said = ready_message(Layout(tmp_path), tmp_path / "mnt", UpOptions())
    assert (f"the same on every host: {folder}\n" in said) is there


def test_ready_says_the_command_of_a_gpu_host_as_its_user_types_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("G35_UP_COMMAND", ".venv/bin/g35")
    said = ready_message(Layout(tmp_path), tmp_path / "mnt", UpOptions(virtiofs=True))
    assert f"mounts it: .venv/bin/g35 host --socket {tmp_path}/virtiofs.sock\n" in said


def test_ready_says_how_to_look_at_a_place_in_g4(tmp_path: Path) -> None:
    options = UpOptions(spill=tmp_path / "below")
    said = ready_message(Layout(tmp_path), tmp_path / "mnt", options)
    assert f"G4: folder {tmp_path}/below; look at it with: " in said
    assert f"g35 spill status --config {tmp_path}/agent.toml\n" in said
