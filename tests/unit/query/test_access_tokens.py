"""Tokens of routers: their files, and whose one is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.errors import ConfigError
from agent.query import access_tokens
from agent.query.access_tokens import TOKENS_MAX, new_tokens_file, read_tokens_file, tenant_of


def private(path: Path, text: str) -> Path:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(text)
    return path


def test_a_new_file_has_one_token_which_is_its_tenants(tmp_path: Path) -> None:
    path = tmp_path / "query.tokens"
    new_tokens_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    found = read_tokens_file(path, "one")
    assert tenant_of(path.read_bytes().strip(), found) == "one"
    assert tenant_of(b"c" * 43, found) is None
    assert path.read_text().strip() not in repr(found)
    with pytest.raises(ConfigError, match="never overwritten"):
        new_tokens_file(path)


def test_several_lines_are_several_tokens_of_one_tenant(tmp_path: Path) -> None:
    found = read_tokens_file(private(tmp_path / "two", "a" * 32 + "\n" + "b" * 32 + "\n"), "one")
    assert [tenant_of(letter * 32, found) for letter in (b"a", b"b", b"c")] == ["one", "one", None]


@pytest.mark.parametrize("text", ["", "short", "a" * 31, "a" * 257, "ä" * 40, "(" * 40])
def test_a_file_without_usable_tokens_is_refused_and_not_quoted(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_tokens_file(private(tmp_path / "bad", text), "one")
    assert not text or text not in str(refused.value)


def test_a_file_has_few_tokens_and_is_nobody_elses_to_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="17 tokens"):
        read_tokens_file(private(tmp_path / "many", "\n".join(["a" * 40] * (TOKENS_MAX + 1))), "one")
    path = private(tmp_path / "open", "a" * 40)
    path.chmod(0o644)
    with pytest.raises(ConfigError):
        read_tokens_file(path, "one")


def test_every_token_is_compared_whether_or_not_one_has_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [
        access_tokens.Token(access_tokens._digest(text), str(text))
        for text in (b"a" * 40, b"b" * 40, b"c" * 40)
    ]
    compared = []
    real = access_tokens.hmac.compare_digest

    def counting(first: bytes, second: bytes) -> bool:
        compared.append(len(second))
        return real(first, second)

    monkeypatch.setattr(access_tokens.hmac, "compare_digest", counting)
    for presented in (b"a" * 40, b"c" * 40, b"x", b"y" * 256):
        compared.clear()
        tenant_of(presented, known)
        assert compared == [32, 32, 32]
