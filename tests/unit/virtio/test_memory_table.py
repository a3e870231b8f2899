"""Guest memory: every address is inside or an error, and views keep what they look at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.virtio.memory_table import AddressError, MappedRegion, MemoryTable
from agent.virtio.vhost_user import Region

PAGE = 4096


def mapped(guest: int, user: int, pages: int = 1, fill: int = 0) -> MappedRegion:
    memory = memoryview(bytearray([fill]) * (pages * PAGE))
    return MappedRegion(Region(guest, pages * PAGE, user, 0), memory)


LOW, HIGH = mapped(0, 0x7000_0000, 2, 1), mapped(2 * PAGE, 0x5000_0000, 2, 2)
FAR = mapped(1 << 40, 0x9000_0000, 1, 3)
TABLE = MemoryTable([FAR, HIGH, LOW])


def test_one_region() -> None:
    assert [bytes(run) for run in TABLE.runs(2 * PAGE - 4, 4)] == [b"\1\1\1\1"]
    assert [bytes(run) for run in TABLE.runs(2 * PAGE, 4)] == [b"\2\2\2\2"]
    assert list(map(len, TABLE.runs((1 << 40) + PAGE - 1, 1))) == [1]
    TABLE.runs(1 << 40, 2)[0][:] = b"ab"
    assert bytes(FAR.memory[:2]) == b"ab"


def test_across_two_regions_is_two_runs() -> None:
    assert [bytes(run) for run in TABLE.runs(2 * PAGE - 2, 5)] == [b"\1\1", b"\2\2\2"]


@pytest.mark.parametrize(
    ("address", "length"),
    [(4 * PAGE, 1), (4 * PAGE - 1, 2), ((1 << 40) - 1, 2), ((1 << 40) + PAGE, 1), (2**64 - 1, 1), (0, 2**32)],
)
def test_outside(address: int, length: int) -> None:
    with pytest.raises(AddressError):
        TABLE.runs(address, length)


def test_user_addresses_are_others() -> None:
    assert bytes(TABLE.user_view(0x7000_0000 + PAGE, 2)) == b"\1\1"
    for address, length in (
        (0, 1),
        (0x7000_0000 + 2 * PAGE, 1),
        (0x7000_0000 + PAGE, PAGE + 1),
        (2**64 - 1, 9),
    ):
        with pytest.raises(AddressError):
            TABLE.user_view(address, length)


@pytest.mark.parametrize(
    "regions",
    [
        [mapped(0, 0, 2), mapped(PAGE, 0x10_0000)],
        [mapped(0, 0, 2), mapped(0x10_0000, PAGE)],
        [mapped(2**64 - PAGE, 0, 2)],
        [mapped(0, 2**64 - PAGE, 2)],
        [MappedRegion(Region(0, 0, 0, 0), memoryview(b""))],
        [MappedRegion(Region(0, PAGE, 0, 0), memoryview(bytearray(PAGE - 1)))],
        [mapped(number * PAGE, number * PAGE) for number in range(33)],
    ],
)
def test_regions_that_cannot_be(regions: list[MappedRegion]) -> None:
    with pytest.raises(AddressError):
        MemoryTable(regions)


def test_regions_come_and_go() -> None:
    table = MemoryTable([LOW]).with_region(HIGH)
    [view] = table.runs(2 * PAGE, 1)
    less = table.without_region(HIGH.region)
    with pytest.raises(AddressError):
        less.runs(2 * PAGE, 1)
    assert bytes(view) == b"\2", "whoever looks at it still may"
    with pytest.raises(AddressError):
        less.without_region(HIGH.region)


@given(st.integers(0, 2**64 - 1) | st.integers(0, 5 * PAGE), st.integers(1, 3 * PAGE))
def test_runs_are_the_bytes_that_were_asked_for(address: int, length: int) -> None:
    try:
        runs = TABLE.runs(address, length)
    except AddressError:
        assert not (address + length <= 4 * PAGE)
        return
    assert sum(map(len, runs)) == length
