"""Requests that a door puts aside: how many, in which order, and what becomes of their descriptors."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.fs.doors.dev_fuse import DevFuseDoor
from agent.fs.doors.parked_requests import PARKED, REQUEST_BYTES_MAX, ParkedRequests
from agent.fs.fuse.session import AGAIN, FuseSession, Reply
from agent.fs.interface import RootFileSystem
from agent.host_os.per_user_bounds import Bounds
from agent.inline.scatter import Target
from agent.pool.steps import NoRunner, Runner

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


class Answers(FuseSession):  # which is compiled, so the tests with it are of the interpreted one
    """Answers every request but those that begin with one of these bytes, which give way."""

    def __init__(self, gives_way: bytes = b"") -> None:
        super().__init__(RootFileSystem({}))
        self.gives_way, self.asked = gives_way, bytearray()

    def answer(
        self, request: memoryview, received: int, data: memoryview, room: Target, runner: Runner
    ) -> Reply | None:
        self.asked.append(request[0])
        return AGAIN if request[0] in self.gives_way else [b"answer"]


class Door:
    """A door with requests 0 to 3 put aside, after one of its workers has replied."""

    def __init__(self, session: Answers, descriptor: int) -> None:
        self.session, self.parked = session, ParkedRequests(lambda: True)
        for number in range(4):
            assert self.parked.put(memoryview(bytes([number]) * 80), descriptor)
        self.kernel, self.kernels_end = os.pipe()
        self._door = DevFuseDoor(session, Path("/nowhere"), 2, lambda _: NoRunner(), parked=self.parked)

    def comes_by(self) -> list[int]:
        """Which requests are served, or tried, by a worker that comes by."""
        self.session.asked.clear()
        kernel, nothing = select.poll(), memoryview(b"")
        kernel.register(self.kernel, select.POLLIN)
        self._door._serve_parked(kernel, nothing, nothing, NoRunner())
        return list(self.session.asked)


@pytest.fixture
def make_door(descriptor: int) -> Iterator[Callable[[bytes], Door]]:
    made = list[Door]()

    def make(gives_way: bytes) -> Door:
        made.append(Door(Answers(gives_way), descriptor))
        return made[-1]

    yield make
    for door in made:
        door.parked.close()
        for end in (door.kernel, door.kernels_end):
            with contextlib.suppress(OSError):
                os.close(end)


@pytest.mark.interpreted
def test_a_worker_with_nothing_else_to_do_serves_all_that_was_put_aside(
    make_door: Callable[[bytes], Door],
) -> None:
    door = make_door(b"")
    assert door.comes_by() == [0, 1, 2, 3]
    assert not len(door.parked)


@pytest.mark.interpreted
def test_the_kernels_next_request_waits_for_one_that_was_put_aside_and_no_more(
    make_door: Callable[[bytes], Door],
) -> None:
    door = make_door(b"")
    os.write(door.kernels_end, b"a request")
    assert [door.comes_by(), door.comes_by()] == [[0], [1]]
    assert len(door.parked) == 2


@pytest.mark.interpreted
def test_who_waits_for_an_enclosure_that_is_well_does_not_wait_behind_others(
    make_door: Callable[[bytes], Door],
) -> None:
    door = make_door(bytes([0, 1]))
    assert door.comes_by() == [0, 1, 2, 3, 0, 1], "those that gave way once more, when a place may be free"
    assert len(door.parked) == 2
    assert door.comes_by() == [0, 1], "and no more until somebody has ended a wait"


@pytest.mark.interpreted
def test_nobody_is_served_whose_mount_has_gone(make_door: Callable[[bytes], Door]) -> None:
    door = make_door(b"")
    os.close(door.kernels_end)
    assert door.comes_by() == []
