"""A chain that was answered for a device that died: it is completed, once, and no other is taken for it."""

from __future__ import annotations

import random

import pytest

from agent.fs.virtiofs.device_queue import BadRing, Chain
from tests.support.fs.ring_pair import RingPair


def answered(pair: RingPair, chain: Chain) -> int:
    """Write the answer into a chain that nobody completes yet; how many bytes."""
    left = b"".join(chain.readable)[::-1]
    written = 0
    for run in chain.writable:
        part, left = left[: len(run)], left[len(run) :]
        run[: len(part)] = part
        written += len(part)
    return written


def taken(pair: RingPair) -> tuple[Chain, int]:
    chain = pair.device.pop()
    assert chain is not None
    return chain, pair.device.taking(chain.head)


def test_it_is_completed_and_not_served_again() -> None:
    with RingPair(8, event_index=True, inflight=True) as pair:
        pair.send([64], [128], indirect=True)
        chain, taking = taken(pair)
        same = pair.device.chain_at(chain.head)
        assert [bytes(run) for run in same.readable] == [bytes(run) for run in chain.readable]
        written = answered(pair, same)
        pair.device_dies()
        assert pair.device.complete_left_over(chain.head, taking, written)
        assert pair.device.pop() is None
        assert pair.collect() == 1
        assert not pair.device.complete_left_over(chain.head, taking, written), "it was completed"


def test_a_later_chain_of_this_head_is_served() -> None:
    with RingPair(4, event_index=False, inflight=True) as pair:
        pair.send([64], [128], indirect=True)
        chain, taking = taken(pair)
        written = answered(pair, chain)
        pair.device.push(chain.head, written)
        assert pair.collect() == 1
        pair.send([32], [128], indirect=True)
        later, _ = taken(pair)
        assert later.head == chain.head
        pair.device_dies()
        assert not pair.device.complete_left_over(chain.head, taking, written)
        assert pair.serve() == 1
        assert pair.collect() == 1


def test_a_head_outside_is_no_chain() -> None:
    with RingPair(4, event_index=False) as pair, pytest.raises(BadRing):
        pair.device.chain_at(4)
    with RingPair(4, event_index=False) as pair:
        assert pair.device.taking(3) == 0
        assert not pair.device.complete_left_over(3, 0, 16)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_dies_between_is_answered_once(seed: int) -> None:
    dice = random.Random(seed)
    with RingPair(32, event_index=bool(seed % 2), inflight=True, first=65530) as pair:
        sent = collected = 0
        last: tuple[int, int, int] | None = None
        while collected < 300:
            while sent - collected < 5 and dice.random() < 0.8:
                pair.send([dice.randrange(1, 200)], [dice.randrange(1, 200)], indirect=dice.random() < 0.5)
                sent += 1
            chain = pair.device.pop()
            if chain is not None:
                taking = pair.device.taking(chain.head)
                how = dice.random()
                if how < 0.5:
                    last = (chain.head, taking, answered(pair, pair.device.chain_at(chain.head)))
                if how > 0.7:
                    pair.answer(chain)
                elif how < 0.3:
                    pair.device.push(chain.head, last[2])  # type: ignore[index]  # it was set just now
                else:
                    pair.device_dies()
                    if last is not None:
                        pair.device.complete_left_over(*last)
                    last = None
                    pair.serve(dice.randrange(3))
            collected += pair.collect()
        assert len(pair.answered) >= 300
