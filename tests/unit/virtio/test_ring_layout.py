"""Sizes and places of the split ring and the inflight area, against the numbers of the specifications."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.virtio import inflight
from agent.virtio.memory_barrier import full_fence, ordering_fence
from agent.virtio.split_ring import (
    DESCRIPTOR,
    DescriptorFlag,
    avail_event_word,
    available_bytes,
    is_queue_size,
    passes_event,
    used_bytes,
    used_event_word,
)

WORD = st.integers(0, 0xFFFF)


def test_a_descriptor() -> None:
    descriptor = (0x1122_3344_5566_7788, 0x99AA_BBCC, 0x0003, 0xEEFF)
    assert DESCRIPTOR.pack(*descriptor).hex() == "8877665544332211" + "ccbbaa99" + "0300" + "ffee"
    assert DESCRIPTOR.unpack_from(bytes(16) + DESCRIPTOR.pack(*descriptor), 16) == descriptor
    assert DescriptorFlag(3) == DescriptorFlag.NEXT | DescriptorFlag.WRITE


def test_where_things_lie_in_a_ring_of_128() -> None:
    # QEMU's addresses in the trace: available ring 0x800 behind the table, used ring 0x140 behind that.
    assert 128 * 16 == 0x800
    assert available_bytes(128) == 262 <= 0x140
    assert used_bytes(128) == 1030
    assert used_event_word(128) * 2 == available_bytes(128) - 2
    assert avail_event_word(128) * 2 == used_bytes(128) - 2


@pytest.mark.parametrize(("size", "good"), [(0, False), (1, True), (3, False), (1024, True), (65536, False)])
def test_queue_sizes(size: int, good: bool) -> None:
    assert is_queue_size(size) is good


@given(WORD, WORD, st.integers(0, 1024))
def test_an_event_is_passed_when_it_lies_between(event: int, old: int, steps: int) -> None:
    new = (old + steps) & 0xFFFF
    walked = {(old + step) & 0xFFFF for step in range(steps)}
    assert passes_event(event, new, old) is (event in walked)


def test_the_inflight_area() -> None:
    assert inflight.queue_bytes(128) == 2112  # 16 + 128 * 16, rounded up to 64
    assert inflight.in_flight_byte(3) == 64
    assert inflight.counter_qword(3) * 8 == 64 + 8
    head = inflight.HEAD.pack(0, 1, 0x80, 0x1234, 0x5678)
    words = memoryview(head).cast("H")
    assert (words[inflight.VERSION_WORD], words[inflight.SIZE_WORD]) == (1, 0x80)
    assert (words[inflight.LAST_BATCH_HEAD_WORD], words[inflight.USED_IDX_WORD]) == (0x1234, 0x5678)


def test_fences_can_be_had() -> None:
    full_fence()
    ordering_fence()
