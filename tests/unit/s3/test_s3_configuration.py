"""The section of the configuration, and the files of access keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.config.configuration import Configuration, parse_configuration
from agent.errors import ConfigError
from agent.fs.files.options import FilesOptions
from agent.s3.credentials import new_credentials_file, read_credentials_file
from agent.s3.make_door import make_s3_door
from tests.support.pool.inline_runner import inline_runner

TENANT = {"tenant": "default", "credentials": "/etc/g35/s3.credentials", "buckets": ["blocks"]}


def configured(**section: Any) -> Configuration:
    return parse_configuration(
        {
            "agent": {"state": "/nonexistent", "key_file": "/nonexistent"},
            "enclosures": [{"name": "one", "address": "127.0.0.1", "nqn": "nqn.2014-08.org.nvmexpress:one"}],
            "s3": section,
        },
        "a test's",
    )


def test_an_s3_door_is_a_way_to_the_pool_and_there_is_none_unless_it_is_asked_for() -> None:
    found = configured(listen=["127.0.0.1:9036", "[::1]:9036"], tenants=[TENANT], hosts=["127.0.0.2=blocks"])
    assert found.s3.bucket_of_host == {"127.0.0.2": "blocks"}
    with pytest.raises(ConfigError, match=r"no agent\.mount"):
        configured()


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"listen": ["127.0.0.1:9036"]}, "no tenants"),
        ({"listen": ["0.0.0.0:9036"], "tenants": [TENANT]}, "no loopback address"),
        ({"listen": ["localhost:9036"], "tenants": [TENANT]}, "listens at an IP address"),
        ({"listen": ["127.0.0.1:x"], "tenants": [TENANT]}, "no ADDRESS:PORT"),
        ({"listen": ["127.0.0.1:1"], "tenants": [TENANT], "certificate": "/c"}, "go together"),
        ({"listen": ["127.0.0.1:1"], "tenants": [TENANT, TENANT]}, "named twice"),
        ({"listen": ["127.0.0.1:1"], "tenants": [{**TENANT, "buckets": ["A"]}]}, "no name for a bucket"),
        ({"listen": ["127.0.0.1:1"], "tenants": [{**TENANT, "secret": "x"}]}, "unknown key"),
        ({"listen": ["127.0.0.1:1"], "tenants": [TENANT], "hosts": ["x"]}, "no HOST=BUCKET"),
        (
            {"listen": ["127.0.0.1:1"], "tenants": [TENANT], "hosts": ["localhost:9036=blocks"]},
            "without a port",
        ),
        ({"listen": ["127.0.0.1:1"], "tenants": [{**TENANT, "buckets": ["a..b"]}]}, "no name for a bucket"),
        ({"listen": ["127.0.0.1:1"], "tenants": [TENANT], "secret_key": "x"}, "unknown key"),
        ({"listen": ["127.0.0.1:1"], "tenants": [TENANT], "rdma": "mlx5_0"}, "does not appear to be an IP"),
        ({"listen": ["127.0.0.1:1"], "tenants": [TENANT], "rdma_connections": 0}, "rdma_connections"),
        ({"listen": ["127.0.0.1:1"], "tenants": [TENANT], "rdma_clients": ["10.0.0.1/8"]}, "is no network"),
    ],
)
def test_what_is_not_whole_is_refused(section: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        configured(**section)


def test_a_new_access_key_is_read_back_and_belongs_to_its_tenant(tmp_path: Path) -> None:
    file = tmp_path / "s3.credentials"
    new_credentials_file(file)
    [key] = read_credentials_file(file, "default")
    assert key.tenant == "default"
    assert key.secret.reveal().decode() in file.read_text()
    assert key.secret.reveal().decode() not in repr(key)
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="never overwritten"):
        new_credentials_file(file)


SECRET = "a-secret-that-nobody-may-see"


@pytest.mark.parametrize(
    "text",
    [
        "",
        SECRET,
        f"[a]\naws_access_key_id = G35X\naws_secret_access_key : {SECRET}\n{SECRET}",
        f"[a]\naws_access_key_id = G35 X\naws_secret_access_key = {SECRET}",
        "[a]\naws_access_key_id = G35X\naws_secret_access_key = short",
        f"[a]\naws_secret_access_key = {SECRET}",
        "[a]\naws_access_key_id = G35X\naws_secret_access_key = \u00e9" + SECRET,
        "".join(f"[{name}]\naws_access_key_id = G35X\naws_secret_access_key = {SECRET}\n" for name in "ab"),
    ],
    ids=range(8),
)
def test_a_file_that_is_not_one_of_access_keys_is_refused_without_quoting_it(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "s3.credentials"
    file.touch(0o600)
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_credentials_file(file, "default")
    assert SECRET not in str(refused.value)


def test_a_file_of_access_keys_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "s3.credentials"
    new_credentials_file(file)
    for mode in (0o640, 0o604, 0o660):
        file.chmod(mode)
        with pytest.raises(ConfigError, match="can be read by others"):
            read_credentials_file(file, "default")
    with pytest.raises(ConfigError, match="no regular file"):
        read_credentials_file(tmp_path, "default")


def test_a_tenant_without_volumes_of_blocks_has_no_door(tmp_path: Path) -> None:
    new_credentials_file(tmp_path / "keys")
    found = configured(listen=["127.0.0.1:0"], tenants=[{**TENANT, "credentials": str(tmp_path / "keys")}])
    with pytest.raises(ConfigError, match="no volume of kind"):
        make_s3_door(found.s3, [], tmp_path, FilesOptions(), lambda: pytest.fail("asked"), inline_runner)


@pytest.mark.parametrize("provider", ["emulator.roce.pyverbs", "tests.no_such_provider"])
def test_a_door_whose_rdma_device_is_not_there_says_so(tmp_path: Path, provider: str) -> None:
    found = configured(listen=["127.0.0.1:0"], tenants=[TENANT], rdma="192.0.2.1")
    with pytest.raises(ConfigError, match=r"s3\.rdma: ") as refused:
        make_s3_door(
            found.s3, [], tmp_path, FilesOptions(), lambda: pytest.fail("asked"), inline_runner, {"default"},
            verbs_provider=provider,
        )  # fmt: skip
    assert "g35 doctor" in refused.value.advice


def test_a_tenant_that_was_erased_is_not_missed(tmp_path: Path) -> None:
    found = configured(listen=["127.0.0.1:0"], tenants=[TENANT])
    door = make_s3_door(
        found.s3, [], tmp_path, FilesOptions(), lambda: pytest.fail("asked"), inline_runner, {"default"}
    )
    assert door.snapshot()["objects"] == 0
    door.close()
    assert not list(tmp_path.iterdir())
