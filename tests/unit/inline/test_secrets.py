"""Key files, wrapping, and secrets that must not be seen."""

from __future__ import annotations

import base64
import copy
import json
import logging
import os
import pickle
from pathlib import Path

import pytest

from agent.errors import ConfigError, Fault
from agent.inline.secrets import (
    VOLUME_SECRET_BYTES,
    Purpose,
    SecretKey,
    WrongKey,
    create_root_key,
    load_root_key,
    new_volume_secret,
    root_key_in,
    unwrap_secret,
    wrap_secret,
)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "root.key"
    create_root_key(path)
    return path


def refused(path: Path, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_root_key(path)
    assert caught.value.fault is Fault.OURS
    for word in words:
        assert word in f"{caught.value.message} {caught.value.advice}"
    if path.is_file() and len(path.read_bytes()) > 35:
        assert path.read_bytes()[15:35] not in str(caught.value).encode(), "the key shows in the message"


def test_a_new_key_can_be_loaded_and_is_only_the_owners(key_file: Path) -> None:
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert len(load_root_key(key_file)) == 32
    assert load_root_key(key_file).reveal() == load_root_key(key_file).reveal()
    assert key_file.read_text().count("\n") == 1


def test_two_keys_differ(tmp_path: Path, key_file: Path) -> None:
    create_root_key(tmp_path / "second.key")
    assert load_root_key(tmp_path / "second.key").reveal() != load_root_key(key_file).reveal()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601, 0o660, 0o666, 0o610])
def test_an_exposed_key_is_refused(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    refused(key_file, f"{mode:04o}", "chmod 600")


def test_a_missing_key_of_a_pool_is_to_be_brought_back(tmp_path: Path) -> None:
    """A new one opens nothing of a pool that is there, so nobody is told to make one."""
    refused(tmp_path / "none.key", "there is no root key", "bring that file back")
    with pytest.raises(ConfigError) as missing:
        root_key_in(tmp_path / "none.key")
    assert "key new" not in missing.value.advice
    with pytest.raises(ConfigError) as missing:
        root_key_in(tmp_path / "none.key", "make one")
    assert missing.value.advice == "make one"


def test_a_folder_and_a_fifo_are_refused(tmp_path: Path, key_file: Path) -> None:
    refused(tmp_path)
    fifo = tmp_path / "fifo.key"
    os.mkfifo(fifo, 0o600)
    refused(fifo, "regular file")


def test_a_key_is_never_overwritten(key_file: Path) -> None:
    before = key_file.read_bytes()
    with pytest.raises(ConfigError, match="never overwritten"):
        create_root_key(key_file)
    assert key_file.read_bytes() == before
    with pytest.raises(ConfigError):
        create_root_key(key_file.parent / "no such folder" / "root.key")


def test_a_key_is_not_written_through_a_symlink(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (tmp_path / "root.key").symlink_to(target)
    with pytest.raises(ConfigError):
        create_root_key(tmp_path / "root.key")
    assert not target.exists()


def test_every_damage_is_refused(key_file: Path) -> None:
    whole = key_file.read_bytes()
    for cut in range(len(whole) - 1):
        key_file.write_bytes(whole[:cut])
        refused(key_file, "no root key")
    for at in range(len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 0x04
        key_file.write_bytes(damaged)
        refused(key_file)
    prefix, _, check = whole.decode().strip().split(":")
    short = base64.b64encode(bytes(16)).decode()
    for text in ("", "\n", "::", f"{prefix}:{short}:{check}", "a:b:c:d", "\x00" * 80, "é" * 30, "x" * 9000):
        key_file.write_text(text)
        refused(key_file)


def test_wrapping_binds_root_and_context() -> None:
    root, other = SecretKey(b"\x01" * 32), SecretKey(b"\x02" * 32)
    secret = new_volume_secret()
    assert len(secret) == VOLUME_SECRET_BYTES
    wrapped = wrap_secret(root, Purpose.VOLUME, b"pool and volume", secret)
    assert secret.reveal() not in wrapped
    assert unwrap_secret(root, Purpose.VOLUME, b"pool and volume", wrapped).reveal() == secret.reveal()
    for unwrap in (
        lambda: unwrap_secret(other, Purpose.VOLUME, b"pool and volume", wrapped),
        lambda: unwrap_secret(root, Purpose.VOLUME, b"another volume", wrapped),
        lambda: unwrap_secret(root, Purpose.VOLUME, b"", wrapped),
        lambda: unwrap_secret(root, Purpose.TENANT, b"pool and volume", wrapped),
        lambda: unwrap_secret(root, Purpose.VOLUME, b"pool and volume", wrapped[:-8]),
        lambda: unwrap_secret(root, Purpose.VOLUME, b"pool and volume", b""),
        lambda: unwrap_secret(root, Purpose.VOLUME, b"pool and volume", b"\x00" * 7),
        lambda: unwrap_secret(root, Purpose.VOLUME, b"pool and volume", wrapped + bytes(8)),
    ):
        with pytest.raises(WrongKey) as caught:
            unwrap()
        assert secret.reveal().hex() not in str(caught.value)
    for bit in range(0, len(wrapped) * 8, 7):
        damaged = bytearray(wrapped)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WrongKey):
            unwrap_secret(root, Purpose.VOLUME, b"pool and volume", bytes(damaged))


def test_a_secret_of_another_length_is_no_secret() -> None:
    root = SecretKey(b"\x01" * 32)
    wrapped = wrap_secret(root, Purpose.VOLUME, b"", SecretKey(bytes(64)))
    with pytest.raises(WrongKey, match="length"):
        unwrap_secret(root, Purpose.VOLUME, b"", wrapped)


def test_a_secret_is_not_seen(caplog: pytest.LogCaptureFixture) -> None:
    secret = SecretKey(b"do not show this to anybody, ok?")
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("agent").debug("%s %r %s", secret, secret, [secret])
    texts = [repr(secret), str(secret), f"{secret}", f"{secret!r:>40}", repr([secret]), caplog.text]
    for text in texts:
        assert "show" not in text
        assert secret.reveal().hex() not in text
    for escape in (
        lambda: pickle.dumps(secret),
        lambda: pickle.dumps(secret, protocol=0),
        lambda: copy.copy(secret),
        lambda: copy.deepcopy([secret]),
        lambda: json.dumps(secret),
        lambda: vars(secret),
        lambda: bytes(secret),  # type: ignore[call-overload]
    ):
        with pytest.raises(TypeError):
            escape()
    assert secret != SecretKey(secret.reveal()), "equality would be an oracle, and not in constant time"


def test_derived_keys_are_separate() -> None:
    root = SecretKey(b"\x07" * 32)
    derived = {
        root.derive("a").reveal(),
        root.derive("b").reveal(),
        root.derive("a", b"x").reveal(),
        root.derive("a", b"y").reveal(),
        root.reveal(),
    }
    assert len(derived) == 5
    assert len(root.derive("long", length=64)) == 64
    assert len(root.fingerprint()) == 8
    assert root.fingerprint() not in root.reveal()
