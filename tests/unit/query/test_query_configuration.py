"""The query door from the configuration: what it wants, and whom it does without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.config.query_section import QuerySection
from agent.errors import ConfigError
from agent.pool.map.document import tenant_id
from agent.query.access_tokens import new_tokens_file
from agent.query.door import QueryDoor, make_query_door
from tests.support.pool.inline_runner import inline_runner
from tests.support.pool.memory_pool import MemoryPool

OWN = bytes.fromhex(tenant_id("one"))


def section(folder: Path, *tenants: str, **more: Any) -> QuerySection:
    rows = [{"tenant": name, "tokens": folder / name} for name in tenants]
    return QuerySection.model_validate({"listen": ["127.0.0.1:0"], "tenants": rows, **more})


def made(found: QuerySection, erased: tuple[str, ...] = ()) -> QueryDoor:
    served = [MemoryPool(tenant=OWN).agent().served]
    return make_query_door(
        found, served, None, lambda: pytest.fail("asked"), lambda _: False, inline_runner, erased
    )


def test_a_tenant_hears_of_its_own_key_value_volumes(tmp_path: Path) -> None:
    new_tokens_file(tmp_path / "one")
    door = made(section(tmp_path, "one"))
    assert door._shared.service._volumes["one"].keys() == {"v"}
    door.close()


def test_a_tenant_without_a_volume_and_tokens_of_two_tenants_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        new_tokens_file(tmp_path / name)
    with pytest.raises(ConfigError, match="two, which has no key-value volume"):
        made(section(tmp_path, "one", "two"))
    (tmp_path / "two").write_bytes((tmp_path / "one").read_bytes())
    with pytest.raises(ConfigError, match="a token that another tenant has"):
        made(section(tmp_path, "one", "two"))


def test_the_door_does_without_a_tenant_that_was_erased(tmp_path: Path) -> None:
    new_tokens_file(tmp_path / "one")
    door = made(section(tmp_path, "one", "two"), erased=("two",))
    assert list(door._shared.service._volumes) == ["one"]
    door.close()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"listen": ["10.0.0.1:1"]}, "no loopback"),
        ({"tenants": []}, "no tenants"),
        ({"tenants": [{"tenant": "one", "tokens": "/a"}] * 2}, "named twice"),
        ({"certificate": "/a"}, "go together"),
        ({"listen": ["localhost:1"]}, "localhost"),
        ({"keys_per_s": 1}, "keys_per_s"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_what_makes_no_door_is_refused(tmp_path: Path, more: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        section(tmp_path, "one", **more)
