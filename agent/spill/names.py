"""Names of objects in G4: a pure function of pool, volume and the bundle's number.

A number has 28 bits: 8 of the generation, which is the time in steps of some six days, and 20 that are
drawn at random. So agents that know nothing of each other name bundles side by side; who meets a name that
is taken draws again. A generation is a prefix, by which old bundles are found and deleted."""

import re
from typing import Final

from agent.inline.random_bytes import random_bytes

ROOT: Final = "g35-spill"
GENERATION_SECONDS: Final = 1 << 19
GENERATIONS: Final = 256
PARTIAL: Final = ".part-"
"""What the name of a file begins with that is being written."""
_SERIAL_BITS: Final = 20
_OF_A_BUNDLE: Final = re.compile(r"([0-9a-f]{32})/[0-9a-f]{2}/[0-9a-f]{5}")


def generation_at(wall: float) -> int:
    """0 to 255; it comes again after four years."""
    return int(wall) // GENERATION_SECONDS % GENERATIONS


def new_number(wall: float) -> int:
    """The number of a new bundle, by the time in seconds since the epoch."""
    serial = int.from_bytes(random_bytes(3), "little") & ((1 << _SERIAL_BITS) - 1)
    return generation_at(wall) << _SERIAL_BITS | serial


def pool_prefix(pool_id: str) -> str:
    """What all names of a pool begin with."""
    return f"{ROOT}/{pool_id}/"


def volume_prefix(pool_id: str, volume_id: bytes) -> str:
    """What all names of a volume begin with."""
    return f"{pool_prefix(pool_id)}{volume_id.hex()}/"


def bundle_name(pool_id: str, volume_id: bytes, number: int) -> str:
    generation, serial = number >> _SERIAL_BITS, number & ((1 << _SERIAL_BITS) - 1)
    return f"{volume_prefix(pool_id, volume_id)}{generation:02x}/{serial:05x}"


def age_of(name: str, wall: float) -> int:
    """How many generations ago a bundle was written; 256 for a name that is none of a bundle."""
    try:
        generation = int(name.split("/")[-2], 16)
    except (IndexError, ValueError):
        return GENERATIONS
    return (generation_at(wall) - generation) % GENERATIONS


def volume_of(name: str, pool_id: str) -> str:
    """The hexadecimal id of the volume whose object it is; empty where it is no bundle of the pool."""
    prefix = pool_prefix(pool_id)
    found = _OF_A_BUNDLE.fullmatch(name[len(prefix) :]) if name.startswith(prefix) else None
    return found[1] if found is not None else ""
