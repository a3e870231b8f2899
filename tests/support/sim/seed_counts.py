"""How many seeds a simulation plays: part of them in `make test`, all of them in `make nightly`.

G35_SEEDS is read here and nowhere else: `whole`, or one number for every simulation. Those of a part
come first in the whole run too, so what fails in a part fails in the whole.
"""

from __future__ import annotations

import os

WHOLE = "whole"
"""What `make nightly` sets."""


def seed_count(whole: int, part: int | None = None) -> int:
    """The number of seeds: `part`, or `whole` where that is quick, unless G35_SEEDS says otherwise.

    Raises ValueError for another word.
    """
    wish = os.environ.get("G35_SEEDS", "")
    if wish == WHOLE:
        return whole
    if wish:
        return int(wish)
    return whole if part is None else part
