"""Secrets and their files, Diffie-Hellman groups, numbers: the parts of authentication."""

from __future__ import annotations

import hmac
import os
import pickle
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvmeof.authentication.groups import BadPublicValue, KeyPair, modulus, value_bytes
from nvmeof.authentication.secret import Credentials, DhchapSecret, Numbers, new_secret, parse_secret
from nvmeof.authentication.secret_files import (
    SecretFileError,
    read_credentials,
    read_hosts_file,
    read_secret_file,
    write_secret_file,
)
from nvmeof.wire.authentication import GroupId, HashId

# By `nvme gen-dhchap-key` of nvme-cli 2.3 with --hmac 2 --key-length 48.
BY_NVME_CLI = "DHHC-1:02:u+txwWF0z1/96lrsdJOW9h6T7INLehAkYi083vnhpeVwJyrroZ85RhEStPcv8kEvPxAg/Q==:"
REAL_GROUPS = [group for group in GroupId if group is not GroupId.NULL]
SECRETS = st.builds(
    DhchapSecret,
    st.sampled_from([32, 48, 64]).flatmap(lambda n: st.binary(min_size=n, max_size=n)),
    st.sampled_from([None, *HashId]),
)


@given(SECRETS)
def test_a_secret_survives_as_text(secret: DhchapSecret) -> None:
    again = parse_secret(secret.text() + "\n")
    assert again.same_as(secret)
    assert again.transform is secret.transform


def test_a_secret_of_nvme_cli() -> None:
    secret = parse_secret(BY_NVME_CLI)
    assert secret.transform is HashId.SHA384
    assert secret.text() == BY_NVME_CLI


def test_a_transformed_key_is_bound_to_a_name() -> None:
    raw = bytes(range(32))
    assert DhchapSecret(raw).key_for("nqn.a") == raw
    assert DhchapSecret(raw, HashId.SHA512).key_for("nqn.a") == hmac.digest(
        raw, b"nqn.aNVMe-over-Fabrics", "sha512"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "DHHC-1:01:AAAA",
        BY_NVME_CLI.replace("DHHC-1", "DHHC-2"),
        BY_NVME_CLI.replace(":02:", ":04:"),
        BY_NVME_CLI.replace(":02:", ":2:"),
        BY_NVME_CLI.replace("u+tx", "u+t!"),
        BY_NVME_CLI.replace("u+tx", "u+ty"),
        BY_NVME_CLI + "x",
        "DHHC-1:00:AAAA:",
        "DHHC-1:00::",
    ],
)
def test_a_bad_secret_is_refused_and_not_quoted(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_secret(text)
    assert "u+t" not in str(caught.value)


def test_a_secret_is_not_shown() -> None:
    secret = new_secret()
    shown = [repr(secret), str(secret), f"{secret}", repr(Credentials(secret, new_secret()))]
    assert all(secret.text() not in each and secret.key_for("a").hex() not in each for each in shown)
    with pytest.raises(TypeError):
        pickle.dumps(secret)


def test_host_and_controller_need_secrets_of_their_own() -> None:
    secret = new_secret()
    with pytest.raises(ValueError, match="same secret"):
        Credentials(secret, parse_secret(secret.text().replace("DHHC-1:01:", "DHHC-1:02:")))


# --- groups ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", REAL_GROUPS, ids=lambda group: group.name.lower())
def test_moduli(group: GroupId) -> None:
    """The ends that RFC 7919 gives them; and by Euler's criterion, for which 2 is a square, a prime.

    One wrong bit would make the number composite, and the criterion fail.
    """
    prime = modulus(group)
    bits = 8 * value_bytes(group)
    assert prime.bit_length() == bits
    assert prime >> (bits - 128) == 0xFFFFFFFF_FFFFFFFF_ADF85458_A2BB4A9A
    assert prime & (1 << 64) - 1 == (1 << 64) - 1
    assert pow(2, (prime - 1) // 2, prime) == 1


@pytest.mark.parametrize("group", REAL_GROUPS[:3], ids=lambda group: group.name.lower())
def test_both_sides_get_one_secret(group: GroupId) -> None:
    ours, theirs = KeyPair(group), KeyPair(group)
    assert ours.public != theirs.public
    shared = ours.shared(theirs.public)
    assert shared == theirs.shared(ours.public)
    assert len(shared) == len(ours.public) == value_bytes(group)
    assert str(ours._exponent) not in repr(ours)


def test_public_values_that_make_the_secret_known_are_refused() -> None:
    group = GroupId.FFDHE2048
    pair, prime = KeyPair(group), modulus(group)
    for value in (0, 1, prime - 1, prime, prime + 1, (1 << 2048) - 1):
        with pytest.raises(BadPublicValue):
            pair.shared(value.to_bytes(256))
    for length in (0, 255, 257, 384):
        with pytest.raises(BadPublicValue):
            pair.shared(b"\x02" * length)
    with pytest.raises(BadPublicValue, match="our own"):
        pair.shared(pair.public)


# --- numbers --------------------------------------------------------------------------------------------


def test_numbers_go_round_and_skip_nothing_but_sequence_0() -> None:
    numbers = Numbers()
    numbers._sequence, numbers._transaction = 0xFFFF_FFFE, 0xFFFE
    assert [numbers.next_sequence() for _ in range(3)] == [0xFFFF_FFFF, 1, 2]
    assert [numbers.next_transaction() for _ in range(3)] == [0xFFFF, 0, 1]


# --- files ----------------------------------------------------------------------------------------------


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_secret_file(tmp_path: Path) -> None:
    secret = new_secret(48, HashId.SHA384)
    write_secret_file(tmp_path / "s", secret)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    assert read_secret_file(tmp_path / "s").same_as(secret)
    with pytest.raises(SecretFileError, match="never overwritten"):
        write_secret_file(tmp_path / "s", new_secret())
    write_secret_file(tmp_path / "c", new_secret())
    assert read_credentials(tmp_path / "s", tmp_path / "c").controller_secret is not None
    with pytest.raises(SecretFileError, match="same secret"):
        read_credentials(tmp_path / "s", tmp_path / "s")


def test_exposed_and_odd_files_are_refused(tmp_path: Path) -> None:
    text = new_secret().text()
    for mode in (0o640, 0o604, 0o660):
        with pytest.raises(SecretFileError, match="chmod 600"):
            read_secret_file(written(tmp_path / "s", text, mode))
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("fifo", "missing", "."):
        with pytest.raises(SecretFileError):
            read_secret_file(tmp_path / name)
    (tmp_path / "binary").write_bytes(b"\xff" * 40)
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(SecretFileError):
        read_secret_file(tmp_path / "binary")


def test_a_file_is_readable_by_its_group_where_systemd_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "s", new_secret().text(), 0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    read_secret_file(path)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "other"))
    with pytest.raises(SecretFileError):
        read_secret_file(path)


def test_a_hosts_file(tmp_path: Path) -> None:
    one, two, own = new_secret(), new_secret(), new_secret()
    text = f"# hosts\n\nnqn.a {one.text()}\nnqn.b {two.text()} {own.text()} # both ways\n"
    found = read_hosts_file(written(tmp_path / "h", text), (HashId.SHA512,), (GroupId.FFDHE3072,))
    assert list(found) == ["nqn.a", "nqn.b"]
    assert found["nqn.a"].controller_secret is None
    assert found["nqn.b"].host_secret.same_as(two)
    assert found["nqn.b"].controller_secret is not None
    assert (found["nqn.b"].hashes, found["nqn.b"].groups) == ((HashId.SHA512,), (GroupId.FFDHE3072,))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no host"),
        ("nqn.a", "line 1"),
        ("nqn.a SECRET SECRET2 more", "line 1"),
        ("\nnqn.a nonsense", "line 2"),
        ("nqn.a SECRET SECRET", "same secret"),
        ("nqn.a SECRET\nnqn.a SECRET2", "twice"),
        ("n" * 300 + " SECRET", "line 1"),
    ],
)
def test_a_bad_hosts_file_is_refused_and_not_quoted(tmp_path: Path, text: str, said: str) -> None:
    one, two = new_secret().text(), new_secret().text()
    with pytest.raises(SecretFileError, match=said) as caught:
        read_hosts_file(written(tmp_path / "h", text.replace("SECRET2", two).replace("SECRET", one)))
    assert "DHHC-1:0" not in str(caught.value)
