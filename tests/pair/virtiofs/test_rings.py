"""The driver's ring and the device's queue: whatever is sent comes back once, whole, and in its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fs.driver_chains import Span, add
from tests.support.fs.ring_pair import RingPair

SIZES = st.lists(st.integers(1, 300), max_size=4)
CHAIN = st.tuples(st.just("send"), SIZES.filter(bool), SIZES, st.booleans())
STEP = CHAIN | st.tuples(st.sampled_from(["serve", "collect"]), st.integers(1, 6))


@given(
    st.lists(STEP, max_size=60),
    st.sampled_from([1, 2, 8, 16]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 0xFFF8, 0xFFFF]),
)
def test_any_sequence_of_chains(
    steps: list[tuple[object, ...]], size: int, event_index: bool, may_indirect: bool, first: int
) -> None:
    with RingPair(size, event_index=event_index, indirect=may_indirect, first=first) as pair:
        sent = 0
        for step in steps:
            match step:
                case ("send", list(readable), list(writable), bool(indirect)):
                    indirect = indirect and may_indirect
                    count = len(readable) + len(writable)
                    if count <= size and pair.driver.free >= (1 if indirect else count):
                        pair.send(readable, writable, indirect=indirect, where=sent)
                        sent += 1
                case ("serve", int(limit)):
                    pair.serve(limit)
                case _:
                    pair.collect()
        pair.serve()
        pair.collect()
        assert sorted(pair.answered) == list(range(sent))
        assert pair.driver.free == size


@given(st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_once_around_the_numbers(burst: int, parts: int, event_index: bool) -> None:
    """More chains than a 16-bit index has values, near its end, in bursts of any size."""
    with RingPair(16, event_index=event_index, first=0xFFFF - 40) as pair:
        for _ in range(80 // burst):
            for _ in range(burst):
                pair.send([8] * parts, [8], indirect=True)
            assert pair.serve() == burst
            assert pair.collect() == burst
        assert pair.driver.used_index < 100


@pytest.mark.parametrize("event_index", [True, False])
@given(steps=st.lists(st.sampled_from(["send", "serve", "collect", "sleep", "wait"]), max_size=80))
def test_no_wake_up_is_lost(event_index: bool, steps: list[str]) -> None:
    """Each side sleeps only when it was told that there is nothing, and is woken by the next thing."""
    with RingPair(32, event_index=event_index) as pair:
        device_sleeps = driver_sleeps = False
        for step in steps:
            kicks, calls = pair.kicks, pair.calls
            if step == "send" and pair.driver.free:
                pair.send([16], [16], indirect=True)
                if device_sleeps:
                    assert pair.kicks == kicks + 1, "the device sleeps and was not kicked"
                    device_sleeps = False
            elif step == "serve" and not device_sleeps:
                pair.device.awake()
                served = pair.serve(1)
                if driver_sleeps and served:
                    assert pair.calls > calls, "the driver sleeps and was not called"
                    driver_sleeps = False
            elif step == "collect" and not driver_sleeps:
                pair.collect()
            elif step == "sleep" and not device_sleeps:
                device_sleeps = pair.device.may_sleep()
            elif step == "wait" and not driver_sleeps:
                driver_sleeps = not pair.driver.want_interrupts()


def test_event_index_saves_notifications() -> None:
    with RingPair(64, event_index=True) as pair:
        assert pair.device.may_sleep()
        for _ in range(40):
            pair.send([16], [16], indirect=True)
        assert pair.kicks == 1
        pair.driver.take_used()
        pair.driver.want_interrupts(after=39)
        pair.serve()
        assert pair.calls <= 2  # the first may always be told
        assert pair.collect() == 40


@given(
    st.lists(st.sampled_from(["send", "take", "answer", "die", "die half", "collect"]), max_size=60),
    st.sampled_from([0, 0xFFFD]),
)
def test_devices_that_die_leave_nothing_undone_and_nothing_done_twice(steps: list[str], first: int) -> None:
    """With an inflight area: chains taken and not answered are answered by the next device, once each."""
    with RingPair(16, event_index=True, first=first, inflight=True) as pair:
        held = []
        sent = 0
        for step in steps:
            if step == "send" and pair.driver.free:
                pair.send([40, 8], [16, 50], indirect=True)
                sent += 1
            elif step == "take":
                chain = pair.device.pop()
                if chain is not None:
                    held.append(chain)
            elif step == "answer" and held:
                pair.answer(held.pop(len(held) // 2))
            elif step == "collect":
                pair.collect()
            elif step.startswith("die"):
                if held and step == "die half":
                    for run in held[0].writable:  # it had begun to write its answer
                        run[:] = b"\xee" * len(run)
                held.clear()
                pair.device_dies()
        pair.device_dies()
        pair.serve()
        pair.collect()
        assert sorted(pair.answered) == list(range(sent))
        assert pair.driver.free == 16


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_device_that_dies_around_the_step_of_the_used_index(place: str) -> None:
    """The one moment at which shared memory is between two truths: the used index has moved or not."""
    with RingPair(8, event_index=True, inflight=True) as pair:
        pair.send([8], [8], indirect=True)
        pair.send([8], [8], indirect=True)
        first, second = pair.device.pop(), pair.device.pop()
        assert first is not None
        assert second is not None
        first.writable[0][:] = bytes(first.readable[0])[::-1]
        taken = pair.device._taken
        assert taken is not None
        piece = pair.inflight_piece
        assert piece is not None
        taken.completes(first.head)  # it has noted which one it completes, and dies before the index moves
        if place == "after":  # or the index has moved, and it dies before it notes that
            noted = bytes(piece)
            pair.device.push(first.head, 8)
            piece[:] = noted
        del first, second
        pair.device_dies()
        assert pair.serve() == (1 if place == "after" else 2)
        assert pair.collect() == 2
        assert pair.driver.free == 8


def test_adjacent_pages_come_as_one_run() -> None:
    with RingPair(1024, event_index=True) as pair:
        room = pair.memory.room(1 << 18)
        spans: list[Span] = [(room.address + at, 4096) for at in range(0, 1 << 18, 4096)]
        header = pair.memory.room(64).address
        sent = object()
        add(pair.driver, [(header, 40)], spans, sent, indirect=True)  # type: ignore[arg-type]
        pair.driver.publish()
        chain = pair.device.pop()
        assert chain is not None
        assert [len(run) for run in chain.writable] == [1 << 18]
        add(pair.driver, [(header, 40)], spans[::-1], sent, indirect=True)  # type: ignore[arg-type]
        pair.driver.publish()
        scattered = pair.device.pop()
        assert scattered is not None
        assert [len(run) for run in scattered.writable] == [4096] * 64
        del chain, scattered
