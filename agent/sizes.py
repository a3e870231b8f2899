"""Sizes as people write them, in the configuration, in descriptions of enclosures and on the command line."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*$", re.IGNORECASE)
BYTES_END = 1 << 63
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(value: object) -> object:
    """Bytes out of "1G", "64 KiB" or a number; units are powers of 1,024. Anything else is left alone."""
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value)
    if match is None:
        raise ValueError("a size is a number with K, M, G or T behind it, such as 64K or 1G")
    amount = Decimal(match[1]) * 1024 ** _POWERS[match[2].upper()]
    if amount >= BYTES_END:
        raise ValueError("a size is less than 8 EiB")
    if 0 < amount < 1:
        raise ValueError("that is less than a byte")
    return int(amount)


Size = Annotated[int, BeforeValidator(parse_size)]
"""Bytes, in a record of pydantic's."""
