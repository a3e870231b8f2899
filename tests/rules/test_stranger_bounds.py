"""The table of what a stranger may have of an enclosure (docs/security.md) says what the constants say."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

_HEADING = "| what a stranger may have of an enclosure | bound | constant | beyond it |"
_UNITS = {"": 1, "s": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def _value(name: str) -> float:
    """A module's constant, or the default of a setting."""
    parts = name.split(".")
    at = next(number for number, part in enumerate(parts) if part[0].isupper())
    found: object = importlib.import_module(".".join(parts[:at]))
    for part in parts[at:]:
        found = getattr(found() if isinstance(found, type) else found, part)
    assert isinstance(found, int | float)
    return found


def test_every_bound_is_the_constants(repository: Path) -> None:
    page = (repository / "docs/security.md").read_text()
    rows = page.partition(_HEADING)[2].partition("\n\n")[0].strip().splitlines()[1:]
    assert len(rows) >= 20
    for row in rows:
        what, bound, constants, _ = (cell.strip() for cell in row.strip("|").split("|"))
        number, _, unit = bound.partition(" ")
        wanted = int(number.replace(",", "")) * _UNITS[unit]
        names = re.findall(r"`([\w.]+)`", constants)
        assert names, what
        for name in names:
            assert _value(name) == wanted, (what, name)
