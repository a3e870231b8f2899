"""Places of many keys at once are those of each."""

from __future__ import annotations

import random

import pytest

from agent.inline.secrets import SecretKey
from agent.pool.volume.placement import Placement
from agent.pool.volume.settings import VolumeExtent
from tests.support.pool.memory_pool import nguid_of

SET_BYTES = 1 << 20
KEY = SecretKey(bytes(range(32)))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    "sets", [(1,), (2,), (7,), (5, 5), (1, 9), (100, 3, 2), (1, 1, 1), tuple(range(1, 16)), (500, *[1] * 13)]
)
def test_the_places_of_many_keys_are_those_of_each(sets: tuple[int, ...], apart: bool) -> None:
    extents = [
        VolumeExtent(number + 3, nguid_of(number), (number + 1) << 30, count)
        for number, count in enumerate(sets)
    ]
    placement = Placement(KEY, extents, apart=apart)
    dice = random.Random(35)
    pseudonyms = placement.pseudonyms([dice.randbytes(16) for _ in range(500)])
    starts = {extent.namespace: extent.offset for extent in extents}
    assert placement.places(pseudonyms, SET_BYTES) == [
        [(each.namespace, starts[each.namespace] + each.set_number * SET_BYTES) for each in two]
        for two in map(placement.candidates, pseudonyms)
    ]


def test_pseudonyms_of_many_keys_are_those_of_each() -> None:
    placement = Placement(KEY, [VolumeExtent(0, nguid_of(0), 0, 4)])
    keys = [bytes([number]) * 16 for number in range(20)]
    assert placement.pseudonyms(keys) == [placement.pseudonym(key) for key in keys]
    assert placement.pseudonyms([]) == []
