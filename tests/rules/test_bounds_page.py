"""docs/concurrency.md tells the bounds that the program has (agent/host_os/per_user_bounds.py)."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from agent.host_os.per_user_bounds import CATALOGUE, Limit

_ROW = re.compile(r"^\| `([a-z0-9-]+)` \|(.*)\|$", re.MULTILINE)


def row_of(limit: Limit) -> str:
    """A limit as the page has it."""
    memory = f"{limit.bytes_each:,}" if limit.bytes_each else ""
    share = f"{limit.share} ({limit.by})"
    return f"| `{limit.name}` | {limit.counts} | {limit.most:,} | {share} | {limit.refused} | {memory} |"


def test_the_page_has_every_bound_as_it_is(repository: Path) -> None:
    for path in (repository / "agent").rglob("*.py"):
        if "Limit(" in path.read_text(encoding="utf-8") and path.name != "per_user_bounds.py":
            importlib.import_module(".".join(path.relative_to(repository).with_suffix("").parts))
    page = (repository / "docs/concurrency.md").read_text(encoding="utf-8")
    said = [match[0] for match in _ROW.finditer(page.partition("### Counts that others can raise")[2])]
    assert said == [row_of(CATALOGUE[name]) for name in sorted(CATALOGUE)]
