"""Regions, windows and keys: what may be reached, and what is refused."""

from __future__ import annotations

import errno
import mmap
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.roce.nic.memory import Bind, KeyTable, ProtectionDomain, ProtectionFault, Span, SpanList
from emulator.roce.nic.verbs import Access, Limits, MwType, Sge, VerbsError

RW = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.MW_BIND
BASE = 0x1000


@pytest.fixture
def pd() -> ProtectionDomain:
    return ProtectionDomain(1)


@pytest.fixture
def keys() -> KeyTable:
    return KeyTable(Limits(max_mr=4, max_mw=2, max_mr_size=1 << 20), random.Random(5))


@given(st.integers(-(1 << 65), 1 << 65), st.integers(1, 1 << 32))
def test_no_range_reaches_beyond_its_region(address: int, length: int) -> None:
    pd, keys = ProtectionDomain(1), KeyTable(Limits(), random.Random(5))
    region = keys.add_region(pd, bytearray(100), (1 << 64) - 100, RW)
    inside = region.address <= address and address + length <= region.address + 100
    if inside:
        (span,) = keys.remote(pd, 1, region.rkey, address, length, Access.REMOTE_READ).spans
        assert span == Span(region, address - region.address, length)
    else:
        with pytest.raises(ProtectionFault):
            keys.remote(pd, 1, region.rkey, address, length, Access.REMOTE_READ)
        with pytest.raises(ProtectionFault):
            keys.local(pd, [Sge(address, length, region.lkey)], write=False)


@pytest.mark.parametrize(
    ("memory", "address", "access", "number"),
    [
        (bytearray(8), 0, Access.REMOTE_WRITE, errno.EINVAL),
        (bytearray(8), 0, Access.REMOTE_ATOMIC, errno.EINVAL),
        (bytearray(8), 0, 1 << 12, errno.EINVAL),
        (bytearray(8), -1, RW, errno.EINVAL),
        (bytearray(8), (1 << 64) - 7, RW, errno.EINVAL),
        (bytearray((1 << 20) + 1), 0, RW, errno.EINVAL),
        (memoryview(bytearray(16))[::2], 0, RW, errno.EINVAL),
        (bytes(8), 0, Access.LOCAL_WRITE, errno.EFAULT),
    ],
)
def test_registrations_that_are_refused(
    keys: KeyTable, pd: ProtectionDomain, memory: bytearray, address: int, access: Access, number: int
) -> None:
    with pytest.raises(VerbsError) as caught:
        keys.add_region(pd, memory, address, Access(access))
    assert caught.value.errno == number
    assert pd.users == 0


def test_any_buffer_can_be_registered_and_is_let_go(keys: KeyTable, pd: ProtectionDomain) -> None:
    with mmap.mmap(-1, 4096) as area:
        region = keys.add_region(pd, memoryview(area), BASE, RW)
        keys.local(pd, [Sge(BASE, 4, region.lkey)], write=True).place(0, memoryview(b"abcd"))
        assert area[:4] == b"abcd"
        keys.remove_region(region)
    read_only = keys.add_region(pd, b"constant", BASE, Access.REMOTE_READ)
    target = bytearray(8)
    keys.remote(pd, 1, read_only.rkey, BASE, 8, Access.REMOTE_READ).copy_out(0, memoryview(target))
    assert target == b"constant"
    with pytest.raises(ProtectionFault):
        keys.local(pd, [Sge(BASE, 8, read_only.lkey)], write=True)


def test_the_table_is_bounded_and_keys_are_not_used_again_soon(keys: KeyTable, pd: ProtectionDomain) -> None:
    regions = [keys.add_region(pd, bytearray(8), 0, RW) for _ in range(4)]
    with pytest.raises(VerbsError) as caught:
        keys.add_region(pd, bytearray(8), 0, RW)
    assert caught.value.errno == errno.ENOMEM
    seen = {region.rkey for region in regions}
    keys.remove_region(regions[0])
    for _ in range(100):
        region = keys.add_region(pd, bytearray(8), 0, RW)
        assert region.rkey not in seen
        seen.add(region.rkey)
        keys.remove_region(region)
    with pytest.raises(VerbsError):
        keys.remove_region(regions[0])


def test_zero_based_regions_count_from_zero(keys: KeyTable, pd: ProtectionDomain) -> None:
    region = keys.add_region(pd, bytearray(8), 0x5000, RW | Access.ZERO_BASED)
    assert region.address == 0
    keys.remote(pd, 1, region.rkey, 0, 8, Access.REMOTE_READ)


def test_memory_that_is_gone_is_not_touched(keys: KeyTable, pd: ProtectionDomain) -> None:
    memory = bytearray(8)
    region = keys.add_region(pd, memory, 0, RW)
    spans = keys.local(pd, [Sge(0, 8, region.lkey)], write=True)
    keys.remove_region(region)
    for use in (
        lambda: spans.place(0, memoryview(b"abc")),
        lambda: spans.copy_out(0, memoryview(bytearray(3))),
        lambda: spans.contiguous(0, 3),
    ):
        with pytest.raises(ProtectionFault, match="gone"):
            use()
    memory.append(1)  # nothing holds the buffer any more: else this is a BufferError


def test_entries_of_no_length_are_not_looked_at(keys: KeyTable, pd: ProtectionDomain) -> None:
    assert keys.local(pd, [Sge(77, 0, 12345)], write=True).length == 0


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 40), st.integers(0, 40))
def test_spans_are_one_message(sizes: list[int], start: int, length: int) -> None:
    pd, keys = ProtectionDomain(1), KeyTable(Limits(), random.Random(5))
    regions = [keys.add_region(pd, bytearray(b"." * (size + 2)), 0, RW) for size in sizes]
    spans = SpanList([Span(region, 1, size) for region, size in zip(regions, sizes, strict=True)])
    total = sum(sizes)
    data = bytes(range(1, length + 1))
    model = bytearray(b"." * total)
    if start + length <= total or not length:
        spans.place(start, memoryview(data))
        model[start : start + length] = data[: len(model[start : start + length])]
        found = bytearray(total)
        spans.copy_out(0, memoryview(found))
        assert found == model
        assert bytes(spans.contiguous(start, length)) == bytes(
            model[start : start + len(spans.contiguous(start, length))]
        )
    else:
        with pytest.raises(ProtectionFault, match="longer"):
            spans.place(start, memoryview(data))
    for region, size in zip(regions, sizes, strict=True):
        assert region.view is not None
        assert region.view[0] == region.view[size + 1] == ord(".")


def test_a_bound_region_cannot_go_and_a_freed_window_lets_it(keys: KeyTable, pd: ProtectionDomain) -> None:
    region = keys.add_region(pd, bytearray(64), BASE, RW)
    window = keys.add_window(pd, MwType.TYPE_2)
    keys.bind(window, 7, pd, Bind(region, BASE + 8, 8, Access.REMOTE_READ), window.rkey)
    with pytest.raises(VerbsError) as caught:
        keys.remove_region(region)
    assert caught.value.errno == errno.EBUSY
    keys.remote(pd, 7, window.rkey, BASE + 8, 8, Access.REMOTE_READ)
    with pytest.raises(ProtectionFault, match="grant"):
        keys.remote(pd, 7, window.rkey, BASE + 8, 8, Access.REMOTE_WRITE)
    keys.remove_window(window)
    keys.remove_region(region)
    assert pd.users == 0


def test_windows_of_type_1_are_anybodys_in_the_domain(keys: KeyTable, pd: ProtectionDomain) -> None:
    region = keys.add_region(pd, bytearray(64), BASE, RW)
    window = keys.add_window(pd, MwType.TYPE_1)
    access = Access.REMOTE_WRITE | Access.ZERO_BASED
    keys.bind(window, 7, pd, Bind(region, BASE + 8, 8, access), window.rkey)
    (span,) = keys.remote(pd, 99, window.rkey, 0, 8, Access.REMOTE_WRITE).spans
    assert (span.offset, span.length) == (8, 8)
    assert span.backing.view == region.view
    with pytest.raises(ProtectionFault):
        keys.invalidate(pd, 7, window.rkey)
    keys.bind(window, 7, pd, Bind(region, BASE, 0, access), window.rkey)
    with pytest.raises(ProtectionFault):
        keys.remote(pd, 99, window.rkey, 0, 8, Access.REMOTE_WRITE)
    # What began while it was bound reaches nothing either, bound again or not.
    keys.bind(window, 7, pd, Bind(region, BASE, 8, access), window.rkey)
    with pytest.raises(ProtectionFault, match="gone"):
        SpanList((span,)).place(0, memoryview(b"late"))


def test_windows_are_bounded(keys: KeyTable, pd: ProtectionDomain) -> None:
    for _ in range(2):
        keys.add_window(pd, MwType.TYPE_2)
    with pytest.raises(VerbsError) as caught:
        keys.add_window(pd, MwType.TYPE_2)
    assert caught.value.errno == errno.ENOMEM
