"""The client's own side of registered memory: where buffers lie, and what is waited for."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading

import pytest

from host_shim.registered_memory import MEMFDS_MAX, RegisteredMemory, Registrable
from host_shim.session_files import Refusal
from tests.support.waiting import wait_until

LOCK = struct.Struct("@hhqqi4x")
F_OFD_SETLK = 37


@pytest.fixture
def memory() -> RegisteredMemory:
    return RegisteredMemory()


def test_a_buffer_and_its_slices_are_found(memory: RegisteredMemory) -> None:
    first, second = memory.new(10_000), memory.new(1 << 20)
    assert (len(first), len(second)) == (10_000, 1 << 20)
    assert not any(first)
    for buffer, at, length in ((first, 0, 10_000), (second[4096:8192], 4096, 4096), (second[7:8], 7, 1)):
        place = memory.find(buffer)
        assert place is not None
        assert place[1:] == (at, length)
        assert place[0].view[at : at + length] == buffer
    assert memory.find(memoryview(bytearray(100))) is None
    assert memory.find(second[:0]) is None
    assert memory.find(second.toreadonly()) is None


def test_what_is_cast_is_found(memory: RegisteredMemory) -> None:
    words = memory.new(4096).cast("I")
    place = memory.find(words[2:6])
    assert place is not None
    assert place[1:] == (8, 16)


def test_small_ones_share_a_page(memory: RegisteredMemory) -> None:
    places = [memory.find(memory.small(64)) for _ in range(1025)]
    known = [place for place in places if place is not None]
    assert len(known) == 1025
    assert len({(id(memfd), offset) for memfd, offset, _ in known}) == 1025
    assert len({id(memfd) for memfd, _, _ in known}) == 2


def test_a_bound_on_descriptors(memory: RegisteredMemory) -> None:
    buffers = [memory.new(4096) for _ in range(MEMFDS_MAX + 1)]
    assert all(memory.find(buffer) is not None for buffer in buffers[:-1])
    assert memory.find(buffers[-1]) is None


def test_no_size(memory: RegisteredMemory) -> None:
    for size in (0, -1):
        with pytest.raises(ValueError, match="bytes of memory"):
            memory.new(size)


def test_ordinary_memory_where_there_is_no_other(
    memory: RegisteredMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> int:
        raise Refusal(errno.ENOMEM, "no memory")

    monkeypatch.setattr(os, "memfd_create", refuse)
    buffer = memory.new(5000)
    buffer[:] = bytes(5000)
    assert memory.find(buffer) is None


def test_after_the_end_buffers_stay_what_they_are(memory: RegisteredMemory) -> None:
    buffer = memory.new(4096)
    buffer[:3] = b"abc"
    place = memory.find(buffer)
    assert place is not None
    descriptor = place[0].descriptor
    memory.close()
    assert memory.find(buffer) is None
    assert bytes(buffer[:3]) == b"abc"
    os.fstat(descriptor)  # a call under way may have to wait for the agent by it
    del place
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_it_is_sealed_against_shrinking() -> None:
    made = Registrable(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(made.descriptor, 0)


def test_a_lock_is_waited_for() -> None:
    """As the agent takes it: by an open file description of its own."""
    made = Registrable(4096)
    theirs = os.open(f"/proc/self/fd/{made.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    lock = LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 1 << 62, 1, 0)
    fcntl.fcntl(theirs, F_OFD_SETLK, lock)
    made.wait_for(1 << 61)  # another byte's
    waiting = threading.Thread(target=made.wait_for, args=(1 << 62,))
    waiting.start()
    # It blocks in the kernel: that it does is seen in how the lock is waited for.
    wait_until(lambda: _blocked(waiting), what="the thread to wait for the lock")
    os.close(theirs)
    waiting.join(10)
    assert not waiting.is_alive()
    made.wait_for(1 << 62)


def _blocked(thread: threading.Thread) -> bool:
    with open(f"/proc/self/task/{thread.native_id}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"
