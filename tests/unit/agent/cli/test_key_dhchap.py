"""`g35 key make-dhchap`: what it writes, what it refuses, and what it does not say."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from agent.cli.key_verb import Transform, make_dhchap
from agent.errors import ConfigError
from nvmeof.authentication.secret_files import read_secret_file
from nvmeof.wire.authentication import HashId


@pytest.mark.parametrize(
    ("length", "transform", "hash_id"),
    [
        (32, Transform.SHA256, HashId.SHA256),
        (48, Transform.SHA384, HashId.SHA384),
        (64, Transform.SHA512, HashId.SHA512),
        (64, Transform.NONE, None),
    ],
)
def test_a_secret_is_made(
    length: int,
    transform: Transform,
    hash_id: HashId | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "secret"
    make_dhchap(file, length, transform)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_secret_file(file).transform is hash_id
    said = capsys.readouterr().out
    assert str(length) in said
    assert "DHHC" not in said


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(ConfigError, match="32, 48 or 64"):
        make_dhchap(file, 33)
    assert not file.exists()
    make_dhchap(file)
    before = file.read_text()
    with pytest.raises(ConfigError, match="never overwritten"):
        make_dhchap(file)
    with pytest.raises(ConfigError):
        make_dhchap(tmp_path / "none" / "secret")
    assert file.read_text() == before
