"""How often an agent looks for garbage that refers to itself.

Nearly all that a request makes goes with its last reference. So a search finds next to nothing, with the
interpreter's lock held.
"""

import gc
from typing import Final

_MADE: Final = 10_000
"""Objects made and not yet gone, from one search to the next; Python itself takes 700. A batch of puts has
some hundreds at a time, and the searches were 4 % of their processor time."""


def search_seldom() -> None:
    """From now on. What there is by now stays to the end: to search all of it holds threads up for 50 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MADE, *gc.get_threshold()[1:])
