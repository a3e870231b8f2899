"""Sizes and times as people write and read them: in configurations, in descriptions, on the command line."""

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
BYTES_END = 1 << 63
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(value: object) -> object:
    """Bytes out of "1G", "64 KiB" or a number; units are powers of 1,024. Anything else is left alone."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError("a size is a number with K, M, G or T behind it, such as 64K or 1G")
    amount = Decimal(match[1]) * 1024 ** _POWERS[match[2].upper()]
    if amount >= BYTES_END:
        raise ValueError("a size is less than 8 EiB")
    if 0 < amount < 1:
        raise ValueError("that is less than a byte")
    return int(amount)


def parse_drive_size(text: str) -> int:
    """Bytes out of "15.36T" or "15.36 TB": powers of 1,000, as drives are sold; "14TiB" in those of 1,024.

    Raises ValueError.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("a size is a number with M, G or T behind it, such as 15.36T")
    power = 1024 if text.strip().lower().endswith("ib") else 1000
    amount = Decimal(match[1]) * power ** _POWERS[match[2].upper()]
    if not 1 <= amount < BYTES_END and amount:
        raise ValueError("a size is a byte or more, and less than 8 EiB")
    return int(amount)


_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(B|b|bit)/s", re.ASCII)
_DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
RATE_END = 1e18


def parse_rate(text: str) -> float:
    """Bytes a second out of `400GB/s`, `2.5TB/s` or `800Gb/s` (bits). Units are powers of 1,000, as links
    have them. Raises ValueError, for a rate of nothing too."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError("a rate is a number with KB/s, MB/s, GB/s, TB/s or Gb/s behind it, such as 400GB/s")
    rate = float(match[1]) * _DECIMAL[match[2]] / (1 if match[3] == "B" else 8)
    if not 0 < rate < RATE_END:
        raise ValueError("a rate is more than 0, and less than a million TB/s")
    return rate


def readable_rate(rate: float) -> str:
    """Bytes a second as links state them: `400 GB/s`."""
    for unit in ("B", "KB", "MB", "GB"):
        if rate < 1000:
            return f"{rate:.4g} {unit}/s"
        rate /= 1000
    return f"{rate:,.4g} TB/s"


def typed_size(size: int) -> str:
    """A number of bytes as one would type it, exactly: 256M, 1028K."""
    for power, unit in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if size >= 1024**power and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return str(size)


def readable_bytes(count: float) -> str:
    """A number of bytes as people read it, in powers of 1,024, with four digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"


def counted(count: int, noun: str) -> str:
    """`1 drive`, `2 drives`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def readable_seconds(seconds: float) -> str:
    """A time as people read it: `44 s`, `42 min 44 s`, `3 h 5 min`, `12 d 3 h`."""
    whole = int(seconds)
    for size, unit, less, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // less} {smaller}"
    return f"{whole} s"


def unit_of(text: str) -> str:
    """The unit that a size was written in: K, M, G, T, or none for bytes. Raises ValueError."""
    match = _SIZE.match(text)
    if match is None:
        raise ValueError("no size")
    return match[2].upper()


def size_text(size: int, unit: str | None = None) -> str:
    """Bytes for people, such as "1.5 GiB": exact. `unit`: K, M, G, T, or none for bytes.

    Where that one takes more than three places behind the point, or none is given, the largest that does not.
    """
    wanted = [] if unit is None else [unit]
    for each in (*wanted, *sorted(_POWERS, key=lambda name: -_POWERS[name])):
        amount = Decimal(size) / 1024 ** _POWERS[each]
        is_short = amount == amount.quantize(Decimal("1.000")) and (amount >= 1 or each in wanted)
        if is_short or not each:
            return f"{amount.normalize():f} {f'{each}iB' if each else 'bytes'}"
    raise AssertionError("bytes take no places behind the point")


Size = Annotated[int, BeforeValidator(parse_size)]
"""Bytes, in a record of pydantic's."""
