"""Sizes as people write them: `512M`, `1G`, `1.5GiB`. Binary units only, for a drive is memory or a file."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes. ValueError with a sentence for the user if it is no size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a size: {text!r}; write for example 512M or 1G")
    return int(float(match[1]) * _UNITS[match[2].upper()])
