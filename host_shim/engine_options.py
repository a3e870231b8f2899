"""Whether the options in an engine's own configuration are ones that our connector takes.

For host_shim/engine_check.py, which has the text or the file that the user gives the engine: JSON, or YAML
where the interpreter has PyYAML, as LMCache's has. Our part of it is found by what names our connector:

    LMCache   {"module_path": "host_shim.lmcache_l2", "adapter_params": {...}}, or keys `g35.NAME`
    SGLang    {"module_path": "host_shim.sglang_hicache", "g35": {...}}
    vLLM      {"type": "G35Tier", ...}
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from host_shim.connector_options import ConnectorOptions, TierOptions

_PREFIX = "g35."
_VLLM_OWN = frozenset({"type", "module_path", "backpressure"})
"""Keys of a secondary tier that vLLM takes for itself."""


def read_document(given: str) -> Any:
    """The configuration: `given` is the name of a file, or the text itself. Raises ValueError, OSError."""
    text = given if given.lstrip().startswith(("{", "[")) else Path(given).read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError as no_json:
        try:
            yaml = importlib.import_module("yaml")
        except ImportError:
            raise ValueError(f"no JSON ({no_json}), and this interpreter has no PyYAML for YAML") from None
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as no_yaml:
            raise ValueError(f"neither JSON nor YAML: {no_yaml}") from None


def options_of(engine: str, document: Any) -> list[ConnectorOptions]:
    """The options of each place that names our connector. Raises ValueError for those it does not take."""
    return [
        (TierOptions if engine == "vllm" else ConnectorOptions).from_dict(each)
        for each in _sections(engine, document)
    ]


def _sections(engine: str, document: Any) -> Iterator[dict[str, Any]]:
    if isinstance(document, list):
        for each in document:
            yield from _sections(engine, each)
        return
    if not isinstance(document, dict):
        return
    found = {str(key): each for key, each in document.items()}
    own = _own_options(engine, found)
    if own is not None:
        yield own
        return
    for each in found.values():
        yield from _sections(engine, each)


def _own_options(engine: str, found: dict[str, Any]) -> dict[str, Any] | None:
    module = str(found.get("module_path", ""))
    if engine == "vllm":
        if found.get("type") != "G35Tier":
            return None
        return {key: each for key, each in found.items() if key not in _VLLM_OWN}
    if engine == "sglang":
        return _mapping(found.get("g35"), "g35") if module == "host_shim.sglang_hicache" else None
    if module == "host_shim.lmcache_l2":
        return _mapping(found.get("adapter_params"), "adapter_params")
    dotted = {key.removeprefix(_PREFIX): each for key, each in found.items() if key.startswith(_PREFIX)}
    return dotted or None


def _mapping(found: Any, name: str) -> dict[str, Any]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f'g35: "{name}" is an object with options, and not {found!r}')
    return found
