"""The agent's side of registered memory: what it maps, what it refuses, and when it lets go."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent.fs.control import registered_memory
from agent.fs.control.registered_memory import RegisteredMemory
from agent.fs.interface import FsError
from host_shim.registered_memory import Registrable

PAGE = mmap.PAGESIZE
F_ADD_SEALS, F_SEAL_SHRINK, F_SEAL_WRITE, F_SEAL_FUTURE_WRITE = 1033, 2, 8, 16
F_OFD_GETLK = 36
LOCK = struct.Struct("@hhqqi4x")
ME = os.getpid()


@pytest.fixture
def memory() -> Iterator[RegisteredMemory]:
    memory = RegisteredMemory(64 * PAGE)
    yield memory
    memory.close()


@pytest.fixture
def theirs() -> Registrable:
    return Registrable(8 * PAGE)


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def is_locked(descriptor: int, byte: int) -> bool:
    asked = fcntl.fcntl(descriptor, F_OFD_GETLK, LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return LOCK.unpack(asked)[0] != fcntl.F_UNLCK


def refused(memory: RegisteredMemory, descriptor: int, size: int, process: int = ME) -> int:
    with pytest.raises(FsError) as refusal:
        memory.register(process, descriptor, size)
    assert memory.mapped_bytes() == 0
    return refusal.value.errno


def test_both_see_the_same_bytes(memory: RegisteredMemory, theirs: Registrable) -> None:
    region = memory.register(ME, theirs.descriptor, theirs.size)
    region.view[PAGE : PAGE + 5] = b"hello"
    assert theirs.view[PAGE : PAGE + 5] == b"hello"
    assert memory.mapped_bytes() == theirs.size
    region.give_back()
    assert memory.mapped_bytes() == 0
    region.give_back()


def test_it_is_locked_for_as_long_as_it_is_mapped(memory: RegisteredMemory, theirs: Registrable) -> None:
    first = memory.register(ME, theirs.descriptor, theirs.size)
    second = memory.register(ME, theirs.descriptor, theirs.size)
    assert first.locked_byte == second.locked_byte
    assert memory.mapped_bytes() == theirs.size
    assert is_locked(theirs.descriptor, first.locked_byte)
    assert not is_locked(theirs.descriptor, first.locked_byte + 1)
    first.give_back()
    assert is_locked(theirs.descriptor, second.locked_byte)
    second.give_back()
    assert not is_locked(theirs.descriptor, second.locked_byte)


def test_the_end_of_the_agent_unlocks_everything(theirs: Registrable) -> None:
    memory = RegisteredMemory(64 * PAGE)
    region = memory.register(ME, theirs.descriptor, theirs.size)
    memory.close()
    assert not is_locked(theirs.descriptor, region.locked_byte)
    assert refused(memory, theirs.descriptor, theirs.size) == errno.EOPNOTSUPP
    region.give_back()


def test_what_was_mapped_stays_while_it_is_in_use(memory: RegisteredMemory) -> None:
    made = Registrable(PAGE)
    region = memory.register(ME, made.descriptor, PAGE)
    under_way = region.view[:100]
    region.give_back()
    under_way[:] = b"x" * 100
    assert made.view[:100] == b"x" * 100


def test_a_part_of_it(memory: RegisteredMemory, theirs: Registrable) -> None:
    region = memory.register(ME, theirs.descriptor, 2 * PAGE)
    assert len(region.view) == 2 * PAGE
    with pytest.raises(FsError, match="smaller"):
        memory.register(ME, theirs.descriptor, theirs.size)


def test_the_bound(memory: RegisteredMemory) -> None:
    large = Registrable(65 * PAGE)
    assert refused(memory, large.descriptor, large.size) == errno.ENOSPC
    assert refused(RegisteredMemory(0), 0, PAGE) == errno.EOPNOTSUPP


def test_a_bound_on_how_many(monkeypatch: pytest.MonkeyPatch, memory: RegisteredMemory) -> None:
    monkeypatch.setattr(registered_memory, "MAPPED_MAX", 3)
    made = [Registrable(PAGE) for _ in range(4)]
    regions = [memory.register(ME, each.descriptor, PAGE) for each in (*made[:3], *made[:3])]
    with pytest.raises(FsError, match="3 pieces") as refusal:
        memory.register(ME, made[3].descriptor, PAGE)
    assert refusal.value.errno == errno.ENOSPC
    for region in regions:
        region.give_back()
    memory.register(ME, made[3].descriptor, PAGE).give_back()


@pytest.mark.parametrize("size", [0, -PAGE, 1, PAGE + 1, 9 * PAGE, 1 << 62])
def test_sizes(memory: RegisteredMemory, theirs: Registrable, size: int) -> None:
    assert refused(memory, theirs.descriptor, size) in (errno.EINVAL, errno.ENOSPC)


def test_no_such_descriptor_or_process(memory: RegisteredMemory, theirs: Registrable) -> None:
    for descriptor in (1 << 20, (1 << 31) - 1, (1 << 32) - 1):
        assert refused(memory, descriptor, PAGE) == errno.EINVAL
    for process in (0, -1, (1 << 22) + 1):
        assert refused(memory, theirs.descriptor, PAGE, process) == errno.EOPNOTSUPP


def memfd(closing: ExitStack, pages: int, seals: int, *, allow: bool = True) -> int:
    flags = os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if allow else 0)
    descriptor = os.memfd_create("test", flags)
    closing.callback(os.close, descriptor)
    os.pwrite(descriptor, bytes(pages * PAGE), 0)
    if seals:
        fcntl.fcntl(descriptor, F_ADD_SEALS, seals)
    return descriptor


def test_memory_that_could_go_away(memory: RegisteredMemory, closing: ExitStack, tmp_path: Path) -> None:
    kinds = {
        "unsealed": memfd(closing, 4, 0),
        "not to be sealed": memfd(closing, 4, 0, allow=False),
        "sealed against writing": memfd(closing, 4, F_SEAL_SHRINK | F_SEAL_WRITE),
        "sealed against later writing": memfd(closing, 4, F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE),
    }
    file = tmp_path / "file"
    file.write_bytes(bytes(4 * PAGE))
    for name, path in (("a file", str(file)), ("a device", "/dev/zero"), ("shared", "/dev/shm")):
        flags = os.O_RDWR | (os.O_TMPFILE if name == "shared" else 0)
        kinds[name] = os.open(path, flags | os.O_CLOEXEC)
        closing.callback(os.close, kinds[name])
    reading, writing = os.pipe()
    for each in (reading, writing):
        closing.callback(os.close, each)
    kinds["a pipe"] = writing
    assert {name: refused(memory, kind, 4 * PAGE) for name, kind in kinds.items()} == dict.fromkeys(
        kinds, errno.EINVAL
    )


def test_memory_that_is_not_there(memory: RegisteredMemory, closing: ExitStack) -> None:
    """Its pages would be ours to pay for."""
    empty = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    closing.callback(os.close, empty)
    os.ftruncate(empty, 4 * PAGE)
    fcntl.fcntl(empty, F_ADD_SEALS, F_SEAL_SHRINK)
    assert refused(memory, empty, 4 * PAGE) == errno.EINVAL


def test_memory_that_the_caller_may_only_read(memory: RegisteredMemory, theirs: Registrable) -> None:
    """It has a descriptor for it, and we might open it anew for writing: it must not have that of us."""
    for flags in (os.O_RDONLY, os.O_WRONLY):
        descriptor = os.open(f"/proc/self/fd/{theirs.descriptor}", flags | os.O_CLOEXEC)
        try:
            assert refused(memory, descriptor, PAGE) == errno.EINVAL
        finally:
            os.close(descriptor)
