"""Where a key belongs: a pure function of the key and the pool map, the same for every agent.

A key is replaced by its pseudonym, AES-256 under the volume's placement key. So neither place nor directory
tells anything of the key, and nobody without the volume's secret can aim keys at one set. Then

* weighted rendezvous hashing (Thaler and Ravishankar 1998; weights after Schindelhauer and Schomaker 2005)
  ranks the namespaces of the volume, and
* the candidates are one set in each of the two best-ranked namespaces; the key goes to the emptier set. A
  namespace with more than half of the sets may get both candidates: with the other one always in the small
  rest, its keys would in effect have one choice.

A volume may ask for its first copy on a server's own SSD and its second in an enclosure (`local_first`). Then
the two kinds of namespaces are ranked apart, and a key has one candidate in each. Which server that is
follows from the key, and not from who writes: so every agent finds both copies
(docs/decisions/0057-a-servers-own-ssds.md).

Two namespaces keep a volume of few sets from running full in one of them while the other has room, and let
writes go on while an enclosure is away (docs/decisions/0003-candidates-in-two-namespaces.md). A joining
namespace still moves about 1/N of the keys: it enters the first two ranks of 2/N of them, and displaces the
place where half of those lie.
"""

import math
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agent.inline.secrets import SecretKey
from agent.inline.single_block_aes import BlockCipher
from agent.pool.volume.settings import VolumeExtent

FEW_MEMBERS: Final = 12
"""Up to so many namespaces are ranked one by one. It is part of the placement: all agents do alike."""
KNOWN_MAX: Final = 64
"""Pseudonyms whose candidates are remembered: an operation asks for those of its key several times."""
_WORDS: Final = struct.Struct("<QQ")
_MASK: Final = (1 << 64) - 1


Rank: TypeAlias = tuple[list[int], list[int]]
"""One candidate for each of many keys: its namespace, and its byte offset there."""


class Candidate(NamedTuple):
    """A set that a key may lie in: namespace (index into the pool map) and set number there."""

    namespace: int
    set_number: int


def _candidate(namespace: int, set_number: int) -> Candidate:
    # Every request makes two, and a named tuple's own way to be made is interpreted.
    return tuple.__new__(Candidate, (namespace, set_number))


def splitmix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every bit of the input moves every bit."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


_ONE: Final = np.uint64(1)
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mixed_all(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    first, second, third = _SHIFTS
    mixed = value ^ (value >> first)
    mixed *= _FACTORS[0]
    mixed ^= mixed >> second
    mixed *= _FACTORS[1]
    mixed ^= mixed >> third
    return mixed


def _member_seed(nguid: bytes) -> int:
    first, second = _WORDS.unpack(nguid)
    return splitmix(splitmix(first) ^ second)


class Placement:
    """Candidates of keys in one volume. Immutable, but for what it remembers of itself; a changed pool map
    makes a new one. Safe from any thread."""

    def __init__(
        self,
        placement_key: SecretKey,
        extents: Sequence[VolumeExtent],
        *,
        apart: bool = False,
        local_first: bool = False,
    ) -> None:
        """`apart`: the two sets of a key lie in two namespaces wherever there are two: for a volume of two
        copies. `local_first`: the first of the two lies on a server's own SSD, the second in an enclosure,
        wherever the volume lies on both kinds."""
        self._apart = apart
        self._local_first = local_first
        self._near: Placement | None = None
        self._far: Placement | None = None
        self._key = placement_key
        self._blocks = BlockCipher(placement_key.reveal())
        self._known: dict[bytes, tuple[Candidate, Candidate]] = {}
        if not extents:
            raise ValueError("a volume without an extent has no place for anything")
        self._extents = tuple(extents)
        self._members = [_member_seed(extent.nguid) for extent in extents]
        self._seeds: NDArray[np.uint64] = np.array(self._members, dtype=np.uint64)
        self._weights: NDArray[np.float64] = np.array([extent.sets for extent in extents], dtype=np.float64)
        self._alike = len({extent.sets for extent in extents}) == 1
        """All have the same weight, so the scores are in the order of what they are made of."""
        self._sets: NDArray[np.uint64] = np.array([extent.sets for extent in extents], dtype=np.uint64)
        self._steps_and_sets: NDArray[np.uint64] = np.array(
            (max(extents[0].sets - 1, 1), extents[0].sets), dtype=np.uint64
        )
        """What the two words of a pseudonym are divided by, in a volume of one extent."""
        self._namespaces: NDArray[np.int64] = np.array([each.namespace for each in extents], dtype=np.int64)
        self._offsets: NDArray[np.uint64] = np.array([each.offset for each in extents], dtype=np.uint64)
        most = max(range(len(extents)), key=lambda number: extents[number].sets)
        near = [extent for extent in extents if extent.is_local]
        far = [extent for extent in extents if not extent.is_local]
        if local_first and near and far:
            self._near = Placement(placement_key, near, apart=True)
            self._far = Placement(placement_key, far, apart=True)
        half = sum(extent.sets for extent in extents) / 2
        self._dominant = most if extents[most].sets > half and not self._apart else -1

    def over(self, extents: Sequence[VolumeExtent]) -> "Placement":
        return Placement(self._key, extents, apart=self._apart, local_first=self._local_first)

    def pseudonym(self, key: bytes) -> bytes:
        """What stands for `key` (16 bytes) on flash."""
        return self._blocks.encrypt(key)

    def pseudonyms(self, keys: bytes) -> bytes:
        """Those of several keys, one behind the other as these are, by one call of the cipher."""
        return self._blocks.encrypt(keys)

    def key_of(self, pseudonym: bytes) -> bytes:
        """The key that a pseudonym stands for."""
        return self._blocks.decrypt(pseudonym)

    def candidates(self, pseudonym: bytes) -> tuple[Candidate, Candidate]:
        """The two sets of a pseudonym, the better-ranked first; both the same in a volume of one set."""
        known = self._known.get(pseudonym)
        if known is not None:
            return known
        found = self._candidates(pseudonym)
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known[pseudonym] = found
        return found

    def _candidates(self, pseudonym: bytes) -> tuple[Candidate, Candidate]:
        low: int
        high: int
        low, high = _WORDS.unpack(pseudonym)
        extents = self._extents
        if self._near is not None and self._far is not None:
            return self._near.best_set(low, high), self._far.best_set(low, high)
        if len(extents) == 1:
            return self._two_sets(0, low, high)
        best, runner_up = self._two_best(low)
        if best == self._dominant and self._two_best(splitmix(low))[0] == best and extents[best].sets > 1:
            return self._two_sets(best, low, high)
        return self._set_in(best, high), self._set_in(runner_up, high)

    def best_set(self, low: int, high: int) -> Candidate:
        """The set in the best-ranked namespace, by the two words of a pseudonym."""
        return self._set_in(0 if len(self._extents) == 1 else self._two_best(low)[0], high)

    def places(self, pseudonyms: bytes, set_bytes: int) -> list[Rank]:
        """The candidates of many pseudonyms at once, the better-ranked of all of them first.

        Arrays are a tenth of the cost. Their logarithm may differ from `candidates`' in its last bit, and
        with it one place in 10^15: for looks alone, which ask again where they find nothing.
        """
        words = np.frombuffer(pseudonyms, dtype="<u8").reshape(-1, 2)
        if len(self._extents) == 1:
            return self._places_in_one(words, set_bytes)
        low, high = words[:, 0].copy(), words[:, 1].copy()
        if self._near is not None and self._far is not None:
            return [each.best_places(low, high, set_bytes) for each in (self._near, self._far)]
        best, runner_up = self._ranked(low)
        first, second = self._set_numbers(np.array((best, runner_up)), high)
        if self._dominant >= 0:
            both = self._shared(low, best)
            runner_up = np.where(both, best, runner_up)
            of_best = self._sets[best]
            step = _ONE + _mixed_all(low ^ self._seeds[best]) % np.maximum(of_best - _ONE, _ONE)
            second = np.where(both, (first + step) % of_best, second)
        return [self._rank(best, first, set_bytes), self._rank(runner_up, second, set_bytes)]

    def _places_in_one(self, words: NDArray[np.uint64], set_bytes: int) -> list[Rank]:
        """`places` of a volume with one extent: both words of all pseudonyms are mixed by one call."""
        extent, mixed = self._extents[0], _mixed_all(words ^ self._seeds[0])
        # In place and in both columns at once: each operation costs more than what it does to so few numbers.
        mixed %= self._steps_and_sets
        second, first = mixed.T
        if extent.sets > 1:
            second += _ONE
        second += first
        second %= self._sets
        mixed *= np.uint64(set_bytes)
        mixed += self._offsets
        namespaces = [extent.namespace] * len(words)
        second_at, first_at = mixed.T.tolist()
        return [(namespaces, first_at), (namespaces, second_at)]

    def best_places(self, low: NDArray[np.uint64], high: NDArray[np.uint64], set_bytes: int) -> Rank:
        """As `best_set`, of many pseudonyms."""
        best, _ = self._ranked(low)
        return self._rank(best, self._set_numbers(best, high), set_bytes)

    def _shared(self, low: NDArray[np.uint64], best: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Of which keys both sets lie in the best namespace, where one is dominant."""
        if self._extents[self._dominant].sets == 1:
            return np.full(len(low), False)
        again, _ = self._ranked(_mixed_all(low))
        both: NDArray[np.bool_] = (best == self._dominant) & (again == self._dominant)
        return both

    def _set_numbers(self, members: NDArray[np.intp], high: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return _mixed_all(high ^ self._seeds[members]) % self._sets[members]

    def _rank(self, members: NDArray[np.intp], numbers: NDArray[np.uint64], set_bytes: int) -> Rank:
        offsets = self._offsets[members] + numbers * np.uint64(set_bytes)
        return self._namespaces[members].tolist(), offsets.tolist()

    def _ranked(self, words: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The two best members for each word; the same twice where there is one."""
        if len(self._extents) == 1:
            only = np.zeros(len(words), dtype=np.intp)
            return only, only
        value = _mixed_all(self._seeds[:, None] ^ words[None, :])
        if self._alike:
            best = value.argmax(axis=0)
            value[best, np.arange(len(words))] = 0
            return best, value.argmax(axis=0)
        uniform = ((value >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        scores = -np.log(uniform) / self._weights[:, None]
        if len(self._extents) == 2:
            best = (scores[1] < scores[0]).astype(np.intp)
            return best, 1 - best
        best = scores.argmin(axis=0)
        scores[best, np.arange(len(words))] = np.inf
        return best, scores.argmin(axis=0)

    def _set_in(self, member: int, high: int) -> Candidate:
        # The same set whichever rank the namespace has: a new one ahead of it moves nothing within it.
        extent = self._extents[member]
        return _candidate(extent.namespace, splitmix(high ^ self._members[member]) % extent.sets)

    def _two_sets(self, member: int, low: int, high: int) -> tuple[Candidate, Candidate]:
        """Two different sets of one namespace, where it has two."""
        extent, first = self._extents[member], self._set_in(member, high)
        if extent.sets == 1:
            return first, first
        step = 1 + splitmix(low ^ self._members[member]) % (extent.sets - 1)
        return first, _candidate(extent.namespace, (first.set_number + step) % extent.sets)

    def _two_best(self, word: int) -> tuple[int, int]:
        # -ln(u)/w is exponentially distributed with rate w, so the smallest falls to a namespace with
        # probability w over the sum of weights: that is what makes the weights shares.
        if len(self._members) <= FEW_MEMBERS:
            return self._two_best_of_few(word)
        value = _mixed_all(self._seeds ^ np.uint64(word))
        if self._alike:
            first = int(value.argmax())
            value[first] = 0
            return first, int(value.argmax())
        uniform = ((value >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        scores = -np.log(uniform) / self._weights
        two = np.argpartition(scores, 1)[:2]
        best, runner_up = int(two[0]), int(two[1])
        return (best, runner_up) if scores[best] <= scores[runner_up] else (runner_up, best)

    def _two_best_of_few(self, word: int) -> tuple[int, int]:
        """The same ranking without arrays, whose set-up costs more than a few members do."""
        scores = []
        for number, seed in enumerate(self._members):
            uniform = ((splitmix(seed ^ word) >> 11) + 0.5) * 2.0**-53
            scores.append((-math.log(uniform) / self._extents[number].sets, number))
        scores.sort()
        return scores[0][1], scores[1][1]
