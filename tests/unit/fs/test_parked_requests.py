"""Requests that a door puts aside: how many, in which order, and what becomes of their descriptors."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from agent.fs.doors.parked_requests import PARKED, REQUEST_BYTES_MAX, ParkedRequests
from agent.host_os.per_user_bounds import Bounds

REQUEST = memoryview(bytes(range(80)))


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.open("/dev/null", os.O_RDWR)
    yield made
    os.close(made)


def test_the_one_that_waited_longest_comes_first_and_once_there_is_room(descriptor: int) -> None:
    room: list[bool] = []
    parked = ParkedRequests(lambda: bool(room))
    for number in range(3):
        assert parked.put(memoryview(bytes([number]) * 80), descriptor)
    assert parked.take() is None, "nobody could wait for it"
    room.append(True)
    taken = [parked.take() for _ in range(3)]
    assert [each.request[0] for each in taken if each] == [0, 1, 2]
    assert parked.take() is None
    assert all(each is not None and each.descriptor != descriptor for each in taken)
    for each in taken:
        assert each is not None
        assert parked.put_back(each)
    assert len(parked) == 3
    parked.close()


def test_as_many_are_put_aside_as_may_be(descriptor: int) -> None:
    parked, bounds = ParkedRequests(lambda: True), Bounds()
    parked.watch(bounds)
    for _ in range(PARKED.most):
        assert parked.put(REQUEST, descriptor)
    assert not parked.put(REQUEST, descriptor)
    row = {row["name"]: row for row in bounds.snapshot()}["parked-requests"]
    assert (row["held"], row["limit"], row["refusals"]) == (PARKED.most, PARKED.most, 1)
    taken = parked.take()
    assert taken is not None
    os.close(taken.descriptor)
    assert parked.put(REQUEST, descriptor), "there is room again"
    parked.close()


def test_what_brings_data_along_is_not_put_aside(descriptor: int) -> None:
    parked = ParkedRequests(lambda: True)
    assert not parked.put(memoryview(bytes(REQUEST_BYTES_MAX + 1)), descriptor)


def test_without_a_descriptor_to_be_had_it_is_refused() -> None:
    parked = ParkedRequests(lambda: True)
    assert not parked.put(REQUEST, 1 << 20)
    assert not len(parked)


def test_with_its_last_worker_a_door_lets_go_of_every_descriptor(descriptor: int) -> None:
    parked = ParkedRequests(lambda: True)
    for _ in range(3):
        assert parked.put(REQUEST, descriptor)
    in_hand = parked.take()
    assert in_hand is not None
    parked.leave(2)
    assert len(parked) == 2, "another worker is there"
    parked.leave(2)
    assert not len(parked)
    assert not parked.put(REQUEST, descriptor)
    assert is_open(in_hand.descriptor), "its taker closes it"
    assert not parked.put_back(in_hand)
    assert not is_open(in_hand.descriptor)
