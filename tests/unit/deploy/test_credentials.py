"""The root key as a credential of a systemd service: who else may be able to read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.errors import ConfigError
from agent.inline.secrets import create_root_key, load_root_key


@pytest.fixture
def credential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The key as systemd lays it out where there are ACLs: the bits of the group are their mask."""
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    key = tmp_path / "root.key"
    create_root_key(key)
    key.chmod(0o440)
    return key


def test_a_credential_may_be_readable_by_an_acl(credential: Path) -> None:
    assert len(load_root_key(credential)) == 32


@pytest.mark.parametrize("mode", [0o444, 0o460, 0o441])
def test_but_by_nobody_else(credential: Path, mode: int) -> None:
    credential.chmod(mode)
    with pytest.raises(ConfigError, match="can be read by others"):
        load_root_key(credential)


def test_a_key_elsewhere_has_no_such_excuse(credential: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("", str(credential.parent.parent), str(credential)):
        monkeypatch.setenv("CREDENTIALS_DIRECTORY", folder)
        with pytest.raises(ConfigError, match="can be read by others"):
            load_root_key(credential)
