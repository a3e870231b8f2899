"""Local namespaces of one configuration: their names, and copies of one device."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agent.config.local_section import LocalSection
from agent.errors import UserError
from agent.local.namespaces import LocalNamespaces

HOST = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000001"
MIB = 1 << 20


def nqn_of(path: Path, host_id: bytes) -> str:
    sections = [LocalSection(path=path, size=8 * MIB)]
    with LocalNamespaces(sections, HOST, host_id, path.parent, make=True) as local:
        (only,) = local.opened
        return only.nqn


def test_the_name_stays_and_a_copy_in_another_server_has_another(tmp_path: Path) -> None:
    """Paths to one subsystem are taken for ways to one medium, and a copy is another medium."""
    here, there = bytes(range(16)), bytes(range(1, 17))
    first = nqn_of(tmp_path / "ssd", here)
    assert nqn_of(tmp_path / "ssd", here) == first
    shutil.copy(tmp_path / "ssd", tmp_path / "copy")
    assert nqn_of(tmp_path / "copy", there) != first
    assert first.startswith("nqn.2014-08.org.nvmexpress:uuid:")


def test_a_device_and_its_copy_are_not_opened_together(tmp_path: Path) -> None:
    nqn_of(tmp_path / "ssd", bytes(16))
    shutil.copy(tmp_path / "ssd", tmp_path / "copy")
    both = [LocalSection(path=tmp_path / "ssd"), LocalSection(path=tmp_path / "copy")]
    with pytest.raises(UserError, match="carry one label") as told:
        LocalNamespaces(both, HOST, bytes(16), tmp_path)
    assert "leave the copy out" in told.value.advice
    nqn_of(tmp_path / "ssd", bytes(16))  # Nothing was left open.
