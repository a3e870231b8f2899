"""Headers that have proven themselves lately: a header that is the same to the byte proves the same again.

Opening one takes a derived key, a cipher and a dozen calls: a tenth of a get of 64 KiB. Blocks that many
requests begin with are read over and over. So a key's codec keeps what the headers of slots have proven,
those that it saw twice. It believes only a header whose every byte is the same, at the same place. Units
prove themselves as ever.

Where more values take turns than the table holds, each would be pushed out before its next turn, and the
table would cost and never help. So a full table takes one newcomer of `TAKES_ONE_OF`: some stay long enough
to be of use, and a value that is read often soon gets in. How many are passed over is drawn anew each time.
Were it always as many, a value of every second read might always be among them.

The cache ends with its codec: what one key has proven is worth nothing under another.
"""

import random
from typing import Final, Generic, TypeVar

from agent.inline.cipher_suites import Place
from agent.inline.scatter import Buffer

T = TypeVar("T")

KEPT_MAX: Final = 256
"""The most headers that one codec keeps, some 7 KiB each."""
SEEN_MAX: Final = 4096
"""Salts of headers that were seen once. A scan of more values does not push out often read headers."""
TAKES_ONE_OF: Final = 8
"""Newcomers to a full table, on average; the first is taken."""


class HeaderCache(Generic[T]):
    """What headers have proven, by the salt of their write. Safe from any thread: each step is atomic under
    the interpreter's lock, and a race costs a header's second proof."""

    def __init__(self, kept_max: int = KEPT_MAX, seen_max: int = SEEN_MAX) -> None:
        self._kept: dict[bytes, tuple[bytearray, Place, T]] = {}
        self._seen: dict[bytes, None] = {}
        self._kept_max = kept_max
        self._seen_max = seen_max
        self._passed_over = 0
        """How many newcomers are still to be passed over."""

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, salt: bytes, header: Buffer, place: Place) -> T | None:
        """What this very header has proven at this very place; None: not remembered."""
        kept = self._kept.get(salt)
        if kept is None:
            return None
        known, where, proven = kept
        # A bytearray on the left compares memory, with a memoryview as well.
        return proven if where.slot == place.slot and where.nguid == place.nguid and known == header else None

    def keep(self, salt: bytes, header: bytes, place: Place, proven: T) -> None:
        """Keep a header that has proven itself. The oldest headers make room, for one of some newcomers."""
        if salt not in self._seen:
            _make_room(self._seen, self._seen_max)
            self._seen[salt] = None
            return
        if len(self._kept) >= self._kept_max and salt not in self._kept:
            if self._passed_over > 0:
                self._passed_over -= 1
                return
            self._passed_over = random.randrange(2 * TAKES_ONE_OF - 1)
            _make_room(self._kept, self._kept_max)
        self._kept[salt] = (bytearray(header), place, proven)


def _make_room(kept: dict[bytes, T], most: int) -> None:
    while len(kept) >= most:
        try:
            del kept[next(iter(kept))]
        except (StopIteration, KeyError, RuntimeError):
            return  # another thread has just taken one out
