"""Objects belong to the pool that has their blocks: the door does without a tenant whose pool is another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agent.config.s3_section import S3Section
from agent.fs.files.options import FilesOptions
from agent.pool.map.document import tenant_id
from agent.pool.volume.volume import Volume
from agent.s3.credentials import new_credentials_file
from agent.s3.door import S3Door
from agent.s3.make_door import make_s3_door
from agent.s3.store import FileWriter
from tests.support.pool.inline_runner import InlineRunner
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import PoolAgent, volume_settings

HERE, ELSEWHERE = "aa" * 16, "bb" * 16


def test_objects_of_another_pool_are_left_alone(tmp_path: Path, expects_log: Callable[..., None]) -> None:
    media = [MemoryNamespace(1 << 24)]
    keys = tmp_path / "keys"
    new_credentials_file(keys)
    tenants = ("default", "blue")
    section = S3Section.model_validate(
        {
            "listen": ["127.0.0.1:0"],
            "tenants": [{"tenant": "default", "credentials": str(keys), "buckets": ["blocks"]}],
        }
    )

    def volume(number: int, tenant: str) -> Volume:
        settings = volume_settings((1,), volume_id=bytes([number]) * 16)
        owned = replace(settings, kind="files", tenant=bytes.fromhex(tenant_id(tenant)))
        return PoolAgent(media, owned).volume

    def door(pool_id: str, not_served: dict[str, str]) -> S3Door:
        volumes = [volume(number, tenant) for number, tenant in enumerate(tenants)]
        channel = MemoryChannel(media)
        return make_s3_door(
            section, volumes, tmp_path, FilesOptions(), lambda: channel, lambda _: InlineRunner(),
            pool_id=pool_id, not_served=not_served,
        )  # fmt: skip

    not_served: dict[str, str] = {}
    first = door(HERE, not_served)
    [store] = first._stores.values()
    store.index.make_bucket("blocks", 1)
    assert not store.holds_anything()
    first.close()
    door(ELSEWHERE, not_served).close()  # it holds nothing yet, and goes with the pool that is there
    second = door(HERE, not_served)
    [store] = second._stores.values()
    FileWriter(store, InlineRunner()).keep(InlineRunner())
    second.close()
    assert not_served == {}
    expects_log("the S3 door does without tenant default: .* names blocks of pool")
    refused = door(ELSEWHERE, not_served)
    assert refused._stores == {}
    assert refused._keys == {}, "nobody comes in"
    refused.close()
    [(what, why)] = not_served.items()
    assert what == "S3 of tenant default"
    assert f"names blocks of pool {HERE}" in why
    third = door(HERE, {})
    [store] = third._stores.values()
    assert store.holds_anything()
    third.close()
