"""`[[spill]]`: what is taken and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agent.config.configuration import Configuration, parse_configuration
from agent.config.spill_section import SpillSection
from agent.errors import ConfigError
from agent.service.queue_plan import QueuePlan
from agent.spill.bundle import BundleBuilder
from agent.spill.tier import SpillTier, target_of
from tests.support.pool.memory_pool import MemoryPool
from tests.support.pool.spill_pool import POOL_ID

BUCKET = {
    "bucket": "kept",
    "endpoint": "https://s3.example:9000",
    "credentials_file": "/nonexistent",
    "max_bytes": "1G",
}


def configuration(*places: dict[str, Any]) -> Configuration:
    return parse_configuration(
        {
            "agent": {"mount": "/mnt/g35", "state": "/nonexistent", "key_file": "/nonexistent", "workers": 2},
            "enclosures": [{"name": "one", "address": "127.0.0.1", "nqn": "nqn.2014-08.org.nvmexpress:one"}],
            "spill": list(places),
        },
        "a test's",
    )


def test_a_folder_and_a_bucket_are_places_and_have_a_queue_each() -> None:
    found = configuration({"folder": "/mnt/scale", "max_bytes": "1T", "volumes": ["kv"]}, BUCKET)
    assert found.spill[0].bundle == 32 << 20
    assert found.spill[0].values == "used"
    plan = QueuePlan.of(found)
    assert len(plan.spill) == 2
    assert plan.total == plan.spill.stop - 1
    assert len(QueuePlan.of(configuration()).spill) == 0


@pytest.mark.parametrize(
    "place",
    [
        {"max_bytes": "1G"},
        {"folder": "/mnt/scale"},
        {"folder": "relative", "max_bytes": "1G"},
        {"folder": "/mnt/scale", "max_bytes": "1G", "fodler": 1},
        {"folder": "/mnt/scale", "max_bytes": "1M"},
        {"folder": "/mnt/scale", "max_bytes": "1G", "bundle": "4M"},
        {"folder": "/mnt/scale", "max_bytes": "1G", "bundle": "65M"},
        {"folder": "/mnt/scale", "max_bytes": "1G", "deadline_ms": 0},
        {"folder": "/mnt/scale", "max_bytes": "1G", "values": "some"},
        {"folder": "/mnt/scale", "max_bytes": "1G", "endpoint": "https://s3.example"},
        {"folder": "/mnt/scale", "max_bytes": "1G", "volumes": ["kv", "kv"]},
        BUCKET | {"folder": "/mnt/scale"},
        BUCKET | {"endpoint": ""},
        BUCKET | {"endpoint": "s3.example"},
        BUCKET | {"endpoint": "https://user:word@s3.example"},
        BUCKET | {"endpoint": "https://s3.example:70000"},
        BUCKET | {"bucket": "Not A Bucket"},
        BUCKET | {"credentials_file": None},
    ],
)
def test_what_makes_no_sense_is_refused(place: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        configuration(place)


def test_a_volume_has_one_place() -> None:
    with pytest.raises(ConfigError):
        configuration(BUCKET, BUCKET)
    with pytest.raises(ConfigError):
        configuration(BUCKET | {"volumes": ["a", "b"]}, BUCKET | {"volumes": ["b"]})


def test_credentials_that_others_can_read_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = AKIA0123\naws_secret_access_key = not-a-real-secret\n")
    file.chmod(0o644)
    section = SpillSection.model_validate(BUCKET | {"credentials_file": str(file)})
    with pytest.raises(ConfigError) as refused:
        target_of(section)
    assert "not-a-real-secret" not in f"{refused.value} {refused.value.advice}"
    file.chmod(0o600)
    target_of(section).close()


def test_a_volume_of_two_copies_or_of_files_has_no_place(tmp_path: Path) -> None:
    section = SpillSection.model_validate({"folder": str(tmp_path), "max_bytes": "1G", "volumes": ["v"]})
    volume = MemoryPool((2, 2), copies=2).agent().volume
    with pytest.raises(ConfigError):
        SpillTier([section], POOL_ID, [volume], {}, [lambda: pytest.fail("no channel is wanted")])
    every = section.model_copy(update={"volumes": ()})
    tier = SpillTier([every], POOL_ID, [volume], {}, [lambda: pytest.fail("no channel is wanted")])
    (shown,) = tier.snapshot() or []
    assert shown["volumes"] == {}
    assert volume.below is None
    tier.stop()


@pytest.mark.parametrize("value_mib", [8, 32, 60, 64])
@pytest.mark.parametrize("names", [["v"], []])
def test_a_bundle_that_holds_no_value_of_its_volume_is_refused(
    tmp_path: Path, value_mib: int, names: list[str]
) -> None:
    def of(bundle: str) -> SpillSection:
        return SpillSection.model_validate(
            {"folder": str(tmp_path), "max_bytes": "1G", "volumes": names, "bundle": bundle}
        )

    volume = MemoryPool((1,), value_bytes=value_mib << 20).agent().volume
    with pytest.raises(ConfigError) as refused:
        SpillTier([of(f"{value_mib}M")], POOL_ID, [volume], {}, [lambda: pytest.fail("none is wanted")])
    found = re.search(r'bundle = "(\d+M)"', refused.value.advice)
    if value_mib == 64:
        assert "without v" in refused.value.advice
        return
    assert found is not None
    tier = SpillTier([of(found[1])], POOL_ID, [volume], {}, [lambda: pytest.fail("none is wanted")])
    assert BundleBuilder(volume.settings.slot_bytes, of(found[1]).bundle).has_room(volume.settings.slot_bytes)
    tier.stop()
