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
    whole = placement.pseudonyms(dice.randbytes(500 * 16))
    pseudonyms = [whole[at : at + 16] for at in range(0, len(whole), 16)]
    starts = {extent.namespace: extent.offset for extent in extents}
    both = [placement.candidates(pseudonym) for pseudonym in pseudonyms]
    assert placement.places(whole, SET_BYTES) == [
        (
            [two[rank].namespace for two in both],
            [starts[two[rank].namespace] + two[rank].set_number * SET_BYTES for two in both],
        )
        for rank in (0, 1)
    ]


def test_pseudonyms_of_many_keys_are_those_of_each() -> None:
    placement = Placement(KEY, [VolumeExtent(0, nguid_of(0), 0, 4)])
    keys = [bytes([number]) * 16 for number in range(20)]
    assert placement.pseudonyms(b"".join(keys)) == b"".join(map(placement.pseudonym, keys))
    assert placement.pseudonyms(b"") == b""
    assert placement.places(b"", SET_BYTES) == [([], []), ([], [])]
