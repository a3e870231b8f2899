"""Placement: shares by weight, few keys moved, the same place for every agent."""

from __future__ import annotations

import collections
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent.inline.secrets import SecretKey
from agent.pool.volume.placement import KNOWN_MAX, Candidate, Placement
from agent.pool.volume.settings import VolumeExtent

KEYS = 20_000


def placement(sets: Sequence[int], key: bytes = b"k" * 32) -> Placement:
    return Placement(
        SecretKey(key),
        [
            VolumeExtent(n, random.Random(f"member {n}").randbytes(16), 0, count)
            for n, count in enumerate(sets)
        ],
    )


def pseudonyms(count: int, seed: int = 1) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(count)]


@pytest.mark.parametrize("sets", [(8,) * 4, (4, 8, 12), (1, 2, 3, 4, 5, 6), (5,) * 16])
def test_first_candidates_follow_the_weights(sets: tuple[int, ...]) -> None:
    table = placement(sets)
    counts = collections.Counter(table.candidates(each)[0].namespace for each in pseudonyms(KEYS))
    for namespace, weight in enumerate(sets):
        expected = KEYS * weight / sum(sets)
        assert abs(counts[namespace] - expected) < 5 * expected**0.5, (namespace, counts)


@pytest.mark.parametrize("sets", [(40,), (20, 20), (7, 7, 7, 7)])
def test_sets_are_used_evenly(sets: tuple[int, ...]) -> None:
    table = placement(sets)
    counts: collections.Counter[Candidate] = collections.Counter()
    for each in pseudonyms(KEYS):
        counts.update(table.candidates(each))
    expected = 2 * KEYS / sum(sets)
    assert len(counts) == sum(sets)
    for candidate, count in counts.items():
        assert abs(count - expected) < 6 * expected**0.5, candidate
        assert 0 <= candidate.set_number < sets[candidate.namespace]


@pytest.mark.parametrize("sets", [(2,), (32,), (1, 1), (3, 3), (1,) * 16, (1, 32), (40, 1, 1), (6, 2)])
def test_the_two_candidates_are_two(sets: tuple[int, ...]) -> None:
    table = placement(sets)
    for each in pseudonyms(3000):
        first, second = table.candidates(each)
        assert first != second
        if max(sets) * 2 <= sum(sets):
            assert first.namespace != second.namespace, "an enclosure away must leave the other"


def test_namespaces_with_related_nguids_are_told_apart() -> None:
    """Drives are numbered one after the other, and by some with the halves of the NGUID swapped."""
    nguids = [bytes(8) + bytes([n]) * 8 for n in range(1, 5)] + [
        bytes([n]) * 8 + bytes(8) for n in range(1, 5)
    ]
    table = Placement(SecretKey(b"k" * 32), [VolumeExtent(n, nguid, 0, 4) for n, nguid in enumerate(nguids)])
    pairs = {tuple(sorted(each.namespace for each in table.candidates(key))) for key in pseudonyms(2000)}
    assert len(pairs) == 8 * 7 // 2


def test_one_set_is_both_candidates() -> None:
    first, second = placement((1,)).candidates(b"p" * 16)
    assert first == second == Candidate(0, 0)


@pytest.mark.parametrize("members", [1, 2, 3, 4, 7, 15])
def test_a_joining_namespace_moves_its_share(members: int) -> None:
    """A value lies at either of its candidates; it is moved when that place is none any more."""
    before, after = placement((16,) * members), placement((16,) * (members + 1))
    rng = random.Random(3)
    moved = 0
    for each in pseudonyms(8000):
        place = before.candidates(each)[rng.randrange(2)]
        moved += place not in after.candidates(each)
    assert moved / 8000 <= 1 / (members + 1) + 0.02


def test_a_leaving_namespace_moves_only_what_lay_there() -> None:
    before, after = placement((16,) * 6), placement((16,) * 5)
    for each in pseudonyms(4000):
        old = before.candidates(each)
        if all(candidate.namespace != 5 for candidate in old):
            assert after.candidates(each) == old


def test_order_of_the_namespaces_does_not_matter() -> None:
    extents = [VolumeExtent(n, random.Random(f"member {n}").randbytes(16), 0, 4 + n) for n in range(6)]
    one = Placement(SecretKey(b"k" * 32), extents)
    other = Placement(SecretKey(b"k" * 32), extents[::-1])
    for each in pseudonyms(2000):
        assert one.candidates(each) == other.candidates(each)


def test_pseudonyms_depend_on_the_key_alone() -> None:
    one, other = placement((4, 4)), placement((4, 4), b"j" * 32)
    key = b"block hash 12345"
    assert one.pseudonym(key) == placement((9,)).pseudonym(key)
    assert one.pseudonym(key) != other.pseudonym(key)
    assert key not in one.pseudonym(key)


_PRINT = """
from tests.unit.pool.test_placement import *
for each in pseudonyms(300):
    print(placement((3, 4, 5, 40)).candidates(each), placement((3, 4, 5)).pseudonym(each).hex())
"""


def test_another_process_computes_the_same_places() -> None:
    expected = "".join(
        f"{placement((3, 4, 5, 40)).candidates(each)} {placement((3, 4, 5)).pseudonym(each).hex()}\n"
        for each in pseudonyms(300)
    )
    found = subprocess.run(
        [sys.executable, "-c", _PRINT],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
        env={"PYTHONHASHSEED": "77", "PATH": "/usr/bin"},
        timeout=60,
    )
    assert found.stdout == expected


# Frozen: places that lie on flash of pools that exist. A change here orphans every value of every pool.
# Frozen: places that lie on flash. A change here orphans every value of every pool there is.
FROZEN_PLACES = [[(1, 1), (0, 0)], [(1, 4), (0, 4)], [(1, 1), (0, 2)], [(2, 2), (1, 1)], [(0, 0), (1, 4)]]
FROZEN_PSEUDONYM = "450e7b9cd230f9940c33b984ee86be8e"


def test_places_are_frozen() -> None:
    table = placement((5, 9, 7))
    found = [table.candidates(bytes([n]) * 16) for n in range(1, 6)]
    assert [[(c.namespace, c.set_number) for c in pair] for pair in found] == FROZEN_PLACES
    assert table.pseudonym(bytes(range(16))).hex() == FROZEN_PSEUDONYM


FROZEN_PLACES_OF_MANY = [
    [(28, 2), (35, 3)], [(16, 4), (17, 2)], [(17, 3), (10, 0)], [(12, 3), (27, 0)], [(31, 0), (19, 1)]
]  # fmt: skip


@pytest.mark.parametrize("sets", [(5,) * 40, (*(5,) * 40, 6)])
def test_places_among_many_are_frozen(sets: tuple[int, ...]) -> None:
    """Members of one weight are ranked without logarithms, and stand as they would among others."""
    table, pages = placement(sets), [bytes([n]) * 16 for n in range(1, 6)]
    assert [[(c.namespace, c.set_number) for c in table.candidates(each)] for each in pages] == (
        FROZEN_PLACES_OF_MANY
    )
    ranks = table.places(b"".join(pages), 4096)
    assert [[(rank[0][n], rank[1][n] // 4096) for rank in ranks] for n in range(5)] == FROZEN_PLACES_OF_MANY


def _firsts_of_eviction(sets: Sequence[int], seed: int) -> float:
    """How full the volume is, in slots, when a key first finds both of its sets full."""
    rng = random.Random(f"{sets} {seed}")
    table = Placement(
        SecretKey(rng.randbytes(32)),
        [VolumeExtent(n, rng.randbytes(16), 0, count) for n, count in enumerate(sets)],
    )
    taken: collections.Counter[Candidate] = collections.Counter()
    stored = 0
    while True:
        first, second = table.candidates(rng.randbytes(16))
        emptier = first if taken[first] <= taken[second] else second
        if taken[emptier] == 64:
            return stored / (64 * sum(sets))
        taken[emptier] += 1
        stored += 1


SMALL = [(1,), (2,), (3,), (8,), (32,), (1, 1), (2, 2), (1, 2), (3, 5), (1,) * 3, (1,) * 8, (1,) * 16]
LOPSIDED = [(1, 8), (1, 32), (4, 32), (2, 2, 3), (20, 1, 1, 1), (1, 4, 32), (1,) * 15 + (32,)]
LARGE = [(32, 32), (8,) * 16, (32,) * 4]


@pytest.mark.parametrize("sets", SMALL + LOPSIDED + LARGE, ids=lambda sets: "x".join(map(str, sets)))
def test_no_forced_eviction_below_95_percent(sets: tuple[int, ...], seed: int) -> None:
    for run in range(6 if sum(sets) < 64 else 2):
        full = _firsts_of_eviction(sets, seed * 1000 + run)
        assert full >= 0.95, f"{sets}: first forced eviction at {full:.1%}, seed {seed}, run {run}"


def test_few_candidates_are_remembered_and_are_the_same_again() -> None:
    """An operation asks for those of its key several times."""
    table, other = placement((5,) * 16), placement((5,) * 16)
    keys = pseudonyms(3 * KNOWN_MAX)
    first = [table.candidates(each) for each in keys]
    assert [table.candidates(each) for each in keys] == first == [other.candidates(each) for each in keys]
    assert 0 < len(table._known) <= KNOWN_MAX
    assert table.over(table._extents[:3])._known == {}
