"""Keys that this agent keeps from its own evictions, because somebody reads or writes what consists of them.

A hold is a promise of one agent: another agent may evict the key, and then its read is a miss. It names keys
(pseudonyms), so a value may move meanwhile. Holds must not be able to stop a volume from taking new values: a
holder's keys are bounded, and so is the part of a set that is held or pinned
(agent/pool/mutable/lookup_and_hold.py).
"""

import threading
from collections.abc import Collection, Sequence
from typing import Final

from agent.host_os.per_user_bounds import SHARED, Bound, Holder, Limit

# fmt: off
HELD_KEYS: Final = Limit(
    "held-keys", "values of open files that are kept from eviction", 65_536, by="user, guest",
    share=SHARED, refused="the file may be evicted while it is open", bytes_each=512,
)
# fmt: on


class Holds:
    """The held keys of one volume. Safe from any thread."""

    def __init__(self) -> None:
        self.bound: Final = Bound(HELD_KEYS, HELD_KEYS.most, frozenset((0,)))
        self._counts: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def held(self) -> Collection[bytes]:
        """The pseudonyms that no eviction may take."""
        return self._counts

    def take(self, pseudonyms: Sequence[bytes], holder: Holder) -> "Hold":
        """Hold all of these, which differ; or none where the holder has no room for them."""
        if not pseudonyms or not self.bound.take(holder, len(pseudonyms)):
            return Hold(self, (), holder)
        with self._lock:
            for pseudonym in pseudonyms:
                self._counts[pseudonym] = self._counts.get(pseudonym, 0) + 1
        return Hold(self, pseudonyms, holder)

    def add(self, pseudonyms: Sequence[bytes], hold: "Hold") -> bool:
        """Hold these, too. False, and nothing done: the holder has no room for them, or the hold was let go
        of."""
        pseudonyms = [each for each in pseudonyms if each not in hold.pseudonyms]
        if not self.bound.take(hold.holder, len(pseudonyms)):
            return False
        with self._lock:
            if is_held := not hold.is_over:
                hold.pseudonyms.update(pseudonyms)
                for pseudonym in pseudonyms:
                    self._counts[pseudonym] = self._counts.get(pseudonym, 0) + 1
        if not is_held:
            self.bound.give_back(hold.holder, len(pseudonyms))
        return is_held

    def empty(self, pseudonyms: set[bytes]) -> list[bytes]:
        """Take all out of a hold's keys; of two threads one gets them."""
        with self._lock:
            taken = list(pseudonyms)
            pseudonyms.clear()
            return taken

    def take_out(self, pseudonym: bytes, pseudonyms: set[bytes]) -> bool:
        """Take one key out of a hold's; whether it was there."""
        with self._lock:
            is_there = pseudonym in pseudonyms
            pseudonyms.discard(pseudonym)
            return is_there

    def give_back(self, pseudonyms: Sequence[bytes], holder: Holder) -> None:
        with self._lock:
            for pseudonym in pseudonyms:
                left = self._counts[pseudonym] - 1
                if left:
                    self._counts[pseudonym] = left
                else:
                    del self._counts[pseudonym]
        self.bound.give_back(holder, len(pseudonyms))


class Hold:
    """Keys that were all there, and stay as far as this agent can tell, until `let_go`.

    Any thread may let go, for good. Who has the hold may `add` and `leave`, one thread at a time.
    """

    __slots__ = ("_holds", "holder", "is_over", "pseudonyms")

    def __init__(self, holds: Holds, pseudonyms: Sequence[bytes], holder: Holder) -> None:
        self._holds: Final = holds
        self.pseudonyms: Final = set(pseudonyms)
        self.holder: Final = holder
        self.is_over = False

    @property
    def kept(self) -> int:
        """How many keys are held: fewer than were asked for, where there was no room to hold all."""
        return len(self.pseudonyms)

    def add(self, pseudonyms: Sequence[bytes]) -> bool:
        """See `Holds.add`."""
        return self._holds.add(pseudonyms, self)

    def leave(self, pseudonym: bytes) -> None:
        """Hold this key no longer."""
        if self._holds.take_out(pseudonym, self.pseudonyms):
            self._holds.give_back([pseudonym], self.holder)

    def let_go(self) -> None:
        """The keys may be evicted again. A second call does nothing."""
        self.is_over = True
        pseudonyms = self._holds.empty(self.pseudonyms)
        if pseudonyms:
            self._holds.give_back(pseudonyms, self.holder)
