"""Which memory of somebody else's is mapped: none whose access may fail."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent.host_os import foreign_memory
from agent.host_os.descriptor_receiver import Swapped, fetched
from agent.host_os.foreign_descriptors import ForeignRefused, MemoryFetcher
from agent.host_os.foreign_memory import ForeignMemoryRefused, map_foreign_memory

MIB = 1 << 20
SHRINK, WRITE, FUTURE_WRITE = 2, 8, 16


@pytest.fixture
def made() -> Iterator[Callable[..., int]]:
    """Makes a memfd of 2 MiB."""
    with ExitStack() as stack:

        def make(seals: int = SHRINK, flags: int = 0, size: int = 2 * MIB) -> int:
            descriptor = os.memfd_create("strange", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
            stack.callback(os.close, descriptor)
            os.ftruncate(descriptor, size)
            if seals:
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            return descriptor

        yield make


def test_memory_that_is_sealed_is_mapped_and_shared(made: Callable[..., int]) -> None:
    descriptor = made()
    view = map_foreign_memory(descriptor, 4096, MIB)
    view[:5] = b"hello"
    assert len(view) == MIB
    assert os.pread(descriptor, 5, 4096) == b"hello"


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("not sealed against shrinking", {"seals": 0}),
        ("huge pages", {"flags": os.MFD_HUGETLB}),
        ("not for writing", {"seals": SHRINK | WRITE}),
        ("not for writing", {"seals": SHRINK | FUTURE_WRITE}),
        ("it ends at", {"size": MIB}),
    ],
)
def test_memory_that_could_go_away_or_is_not_all_there_is_refused(
    made: Callable[..., int], words: str, options: dict[str, int]
) -> None:
    with pytest.raises(ForeignMemoryRefused, match=words):
        map_foreign_memory(made(**options), 0, 2 * MIB)


def test_numbers_that_are_no_place_in_memory_are_refused(made: Callable[..., int]) -> None:
    descriptor = made()
    for offset, size in ((0, 0), (0, -1), (-4096, 4096), (1 << 63, 1), (1, (1 << 64) - 1), (2 * MIB, 1)):
        with pytest.raises(ForeignMemoryRefused):
            map_foreign_memory(descriptor, offset, size)


def test_a_descriptor_that_is_for_reading_is_refused(made: Callable[..., int]) -> None:
    reading = os.open(f"/proc/self/fd/{made()}", os.O_RDONLY)
    try:
        with pytest.raises(ForeignMemoryRefused, match="not for writing"):
            map_foreign_memory(reading, 0, MIB)
    finally:
        os.close(reading)


def test_what_is_no_memory_is_refused_also_at_own_risk(tmp_path: Path, made: Callable[..., int]) -> None:
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(2 * MIB)
        for descriptor in (file.fileno(), 1 << 20):
            with pytest.raises(ForeignMemoryRefused, match="neither a memfd"):
                map_foreign_memory(descriptor, 0, MIB, at_own_risk=True)
    assert len(map_foreign_memory(made(0), 0, MIB, at_own_risk=True)) == MIB


def test_a_machine_that_never_overcommits_has_no_memory_that_stays(
    made: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mode").write_text("2\n")
    monkeypatch.setattr(foreign_memory, "OVERCOMMIT", tmp_path / "mode")
    with pytest.raises(ForeignMemoryRefused, match="overcommit") as refused:
        map_foreign_memory(made(), 0, MIB)
    assert refused.value.is_unsafe
    monkeypatch.setattr(foreign_memory, "OVERCOMMIT", tmp_path / "hidden")
    assert len(map_foreign_memory(made(), 0, MIB)) == MIB


def test_a_memfd_of_another_process_is_fetched(made: Callable[..., int]) -> None:
    fetcher, descriptor = MemoryFetcher(), made()
    try:
        taken = fetcher.fetch(os.getpid(), descriptor)
        assert not os.get_inheritable(taken)
        assert os.fstat(taken).st_ino == os.fstat(descriptor).st_ino
        os.close(taken)
        with pytest.raises(ForeignRefused, match="no such descriptor"):
            fetcher.fetch(os.getpid(), 1 << 20)
        os.close(fetcher.fetch(os.getpid(), descriptor))
    finally:
        fetcher.close()
    with pytest.raises(ForeignRefused, match="the agent ends"):
        fetcher.fetch(os.getpid(), descriptor)


def test_what_was_swapped_for_a_memfd_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name was right a moment ago; it is for the receiver to close, which may take for ever."""
    monkeypatch.setattr("agent.host_os.descriptor_receiver._named", lambda _process, _number: "/memfd:x")
    reading, writing = os.pipe()
    try:
        with pytest.raises(Swapped) as swapped:
            fetched(os.getpid(), writing)
        os.close(swapped.value.descriptor)
    finally:
        os.close(reading)
        os.close(writing)
