"""The options of our connectors in the configurations of engines, as the documents show these."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from host_shim.engine_check import Place, configuration_findings, options_taken, read_document

PLACE = Place("/mnt/g35", "kv")
ADAPTER = {"type": "plugin", "module_path": "host_shim.lmcache_l2", "class_name": "G35L2Adapter"}
STORAGE = {"storage_plugins": ["g35"], "extra_config": {"storage_plugin.g35.module_path": "x"}}
HICACHE = {"backend_name": "g35", "module_path": "host_shim.sglang_hicache", "interface_v1": 1}
TIER = {"type": "G35Tier", "module_path": "host_shim.vllm_tier"}
GOOD = {"mount": "/mnt/g35", "volume": "kv"}


def configured(engine: str, options: Any) -> Any:
    """An engine's configuration around options of ours."""
    if engine == "vllm":
        return {"kv_connector_extra_config": {"secondary_tiers": [{"type": "fs"}, {**TIER, **options}]}}
    if engine == "sglang":
        return {**HICACHE, "g35": options}
    if engine == "lmcache-plugin":
        dotted = {f"g35.{key}": each for key, each in options.items()}
        return {**STORAGE, "extra_config": {**STORAGE["extra_config"], **dotted}}  # type: ignore[dict-item]
    return {**ADAPTER, "adapter_params": options}


ENGINES = ("lmcache", "lmcache-plugin", "sglang", "vllm")


def found(engine: str, options: Any) -> tuple[bool, str]:
    told = options_taken(engine.partition("-")[0], json.dumps(configured(engine, options)), PLACE)
    return told.good, told.detail


@pytest.mark.parametrize("engine", ENGINES)
def test_options_as_documented_are_taken(engine: str) -> None:
    assert found(engine, {**GOOD, "threads": 2, "ttl": 60}) == (True, "taken: mount /mnt/g35, volume kv")


@pytest.mark.parametrize(
    ("engine", "more"),
    [
        ("vllm", {"lookup_deadline": 0.5, "enable_kv_events": True}),
        ("lmcache", {"events": "tcp://*:5558", "events_topic": "kv"}),
        ("lmcache-plugin", {"events": "tcp://*:5558"}),
        ("sglang", {"events": "tcp://*:5557", "pools": {"indexer": "small"}}),
    ],
)
def test_options_of_one_engine_alone_are_taken(engine: str, more: dict[str, Any]) -> None:
    assert found(engine, {**GOOD, **more}) == (True, "taken: mount /mnt/g35, volume kv")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"volum": "kv"}, "did you mean volume?"),
        ({"threads": "4"}, '"threads" is a whole number from 1 to 64'),
        ({"ttl": -1}, '"ttl" is a number of seconds'),
        ({"mount": "/mnt/other"}, "they name the mount /mnt/other"),
        ({"volume": "other"}, "they name the volume other"),
    ],
)
def test_what_a_connector_would_refuse_is_said(engine: str, wrong: dict[str, Any], said: str) -> None:
    good, detail = found(engine, {**GOOD, **wrong})
    assert not good
    assert said in detail


def test_a_deadline_of_the_tier_is_checked_as_the_tier_does() -> None:
    assert not found("vllm", {**GOOD, "load_deadline": 0})[0]
    assert found("vllm", {**GOOD, "load_deadline": 2.5, "backpressure": {"any": "thing"}})[0]


@pytest.mark.parametrize("engine", ["lmcache", "sglang", "vllm"])
def test_a_configuration_without_our_connector_is_said(engine: str) -> None:
    told = options_taken(engine, '{"something": [{"else": 1}]}', PLACE)
    assert told.detail == "nothing there names our connector"


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "tier.json"
    file.write_text(json.dumps(configured("vllm", GOOD)))
    assert options_taken("vllm", str(file), PLACE).good


def test_what_is_no_file_with_a_configuration_is_said_in_words(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for given, said in (
        (tmp_path / "none", f"there is no file {tmp_path}/none"),
        (tmp_path, f"{tmp_path} is a folder; name the file"),
        (binary, "is no text in UTF-8"),
        (tmp_path / ("n" * 300), "cannot be read: File name too long"),
    ):
        [told] = configuration_findings("vllm", str(given), PLACE, is_mounted=False)
        assert said in told.detail
        assert "Errno" not in told.detail


def test_yaml_is_read_where_the_interpreter_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("extra_config:\n  g35.mount: /mnt/g35\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ValueError, match="no PyYAML"):
        read_document(str(file))
    answer = {"extra_config": {"g35.mount": "/mnt/g35"}}
    reader = SimpleNamespace(safe_load=lambda _text: answer, YAMLError=ValueError)
    monkeypatch.setitem(sys.modules, "yaml", reader)
    assert options_taken("lmcache", str(file), PLACE).good
