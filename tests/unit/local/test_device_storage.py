"""The medium of a local namespace: bytes at their places, whatever their memory, and errors as statuses."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.config.local_section import LocalSection
from agent.local import storage as storage_module
from agent.local.device import open_device
from agent.local.label import NAMESPACE_START
from agent.local.storage import DeviceStorage
from agent.remote.fence import LOST_SECONDS
from nvmeof.controller.storage import Scratch, StorageError
from nvmeof.wire.status import Status
from tests.support.waiting import wait_until

MIB = 1 << 20


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[DeviceStorage]:
    found = DeviceStorage(open_device(LocalSection(path=tmp_path / "ssd", size=8 * MIB)))
    yield found
    found.close()


def read(storage: DeviceStorage, offset: int, length: int) -> bytes:
    return bytes(storage.read(offset, length, Scratch(2 * MIB)))


def test_what_is_written_is_read_at_its_place(storage: DeviceStorage) -> None:
    payload = os.urandom(3 * 4096)
    for memory in (payload, bytearray(b"x" + payload)[1:]):
        storage.write(4096, memoryview(memory), placed=False)
        assert read(storage, 4096, len(payload)) == payload
    with open(storage.device.path, "rb") as file:
        file.seek(NAMESPACE_START + 4096)
        assert file.read(len(payload)) == payload


def test_parts_of_blocks_are_written_too(storage: DeviceStorage) -> None:
    payload = os.urandom(8192)
    storage.write(0, memoryview(payload), placed=False)
    storage.write(100, memoryview(b"abc"), placed=False)
    storage.write(4096, memoryview(b"d" * 5000)[:3000], placed=False)
    wanted = bytearray(payload)
    wanted[100:103] = b"abc"
    wanted[4096:7096] = b"d" * 3000
    assert read(storage, 0, 8192) == wanted


def test_zeroes_are_written(storage: DeviceStorage) -> None:
    storage.write(0, memoryview(b"x" * 2 * MIB), placed=False)
    storage.write_zeroes(4096, MIB + 4096, deallocate=True)
    assert read(storage, 0, 2 * MIB) == b"x" * 4096 + bytes(MIB + 4096) + b"x" * (MIB - 8192)
    storage.deallocate(0, 4096)
    assert read(storage, 0, 4096) == b"x" * 4096


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (errno.EIO, Status.WRITE_FAULT),
        (errno.ENOSPC, Status.CAPACITY_EXCEEDED),
        (errno.ENODEV, Status.NAMESPACE_NOT_READY),
    ],
)
def test_a_device_that_fails_is_told_apart(
    storage: DeviceStorage, monkeypatch: pytest.MonkeyPatch, number: int, status: Status
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(storage_module.os, "pwrite", fail)
    monkeypatch.setattr(storage_module.os, "fdatasync", fail)
    for action in (lambda: storage.write(0, memoryview(bytes(4096)), placed=False), storage.flush):
        with pytest.raises(StorageError) as told:
            action()
        assert told.value.status == status


def test_a_file_that_was_cut_short_fails(storage: DeviceStorage) -> None:
    os.truncate(storage.device.path, 2 * MIB)
    with pytest.raises(StorageError) as told:
        read(storage, 4 * MIB, 4096)
    assert told.value.status == Status.UNRECOVERED_READ_ERROR


def test_writes_to_one_place_take_turns_and_others_go_on(
    storage: DeviceStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that hangs never lands behind a later one."""
    real, hangs, go_on = os.pwrite, threading.Event(), threading.Event()

    def slow(descriptor: int, data: memoryview, offset: int) -> int:
        if bytes(data[:1]) == b"1":
            hangs.set()
            assert go_on.wait(30)
        return real(descriptor, data, offset)

    monkeypatch.setattr(storage_module.os, "pwrite", slow)

    def write(mark: bytes, offset: int) -> threading.Thread:
        def run() -> None:
            storage.write(offset, memoryview(mark * 8192), placed=False)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    first = write(b"1", 0)
    assert hangs.wait(30)
    second = write(b"2", 4096)
    write(b"3", 8192 + 4096).join(30)
    assert second.is_alive()
    assert read(storage, 4096, 4096) == bytes(4096)
    go_on.set()
    first.join(30)
    second.join(30)
    assert read(storage, 0, 12288) == b"1" * 4096 + b"2" * 8192


class Hanging:
    """A device whose writes of "1" hang until `go_on`; and what threads wrote, by the order of their ends."""

    def __init__(self, storage: DeviceStorage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storage = storage
        self.hangs, self.go_on = threading.Event(), threading.Event()
        self.ended: list[tuple[str, int]] = []
        self.threads: list[threading.Thread] = []
        self._real = os.pwrite
        monkeypatch.setattr(storage_module.os, "pwrite", self._pwrite)

    def _pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        if bytes(data[:1]) == b"1":
            self.hangs.set()
            assert self.go_on.wait(30)
        return self._real(descriptor, data, offset)

    def write(self, mark: str, offset: int = 0) -> None:
        """On a thread of its own; returns once it waits, or has ended."""
        before = len(self.storage._turns)

        def run() -> None:
            try:
                self.storage.write(offset, memoryview(mark.encode() * 4096), placed=False)
                self.ended.append((mark, 0))
            except StorageError as refused:
                self.ended.append((mark, refused.status))

        thread = threading.Thread(target=run)
        self.threads.append(thread)
        thread.start()
        wait_until(
            lambda: len(self.storage._turns) > before or not thread.is_alive(), 10, "the write to come"
        )

    def join(self) -> None:
        self.go_on.set()
        for each in self.threads:
            each.join(30)


def test_writes_that_wait_for_one_place_go_in_the_order_in_which_they_came(
    storage: DeviceStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waited and was given up never lands behind one that came later and was acknowledged."""
    hanging = Hanging(storage, monkeypatch)
    hanging.write("1")
    assert hanging.hangs.wait(30)
    marks = "23456789"
    for mark in marks:
        hanging.write(mark)
    hanging.write("x", 4096)  # another place goes on
    wait_until(lambda: ("x", 0) in hanging.ended, 10, "the other place")
    hanging.join()
    assert read(storage, 0, 4096) == b"9" * 4096
    assert sorted(hanging.ended) == sorted((mark, 0) for mark in f"1{marks}x")
    assert not storage._turns


def test_a_write_that_waited_for_long_is_refused_and_never_lands(
    storage: DeviceStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert storage_module.TURN_SECONDS < LOST_SECONDS
    monkeypatch.setattr(storage_module, "TURN_SECONDS", 0.05)
    hanging = Hanging(storage, monkeypatch)
    hanging.write("1")
    assert hanging.hangs.wait(30)
    hanging.write("2")
    wait_until(lambda: bool(hanging.ended), 10, "the write to be refused")
    assert hanging.ended == [("2", Status.NAMESPACE_NOT_READY)]
    hanging.join()
    assert read(storage, 0, 4096) == b"1" * 4096


def test_a_device_that_hangs_refuses_what_would_hang_too(
    storage: DeviceStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "HUNG_SECONDS", 0.0)
    hanging = Hanging(storage, monkeypatch)
    for number in range(storage_module.HUNG_MOST):
        hanging.write("1", number * 4096)
    wait_until(lambda: len(storage._begun) == storage_module.HUNG_MOST, 10, "all of them to hang")
    for action in (lambda: read(storage, 1 << 20, 4096), storage.flush):
        with pytest.raises(StorageError, match="hangs") as told:
            action()
        assert told.value.status == Status.NAMESPACE_NOT_READY
    hanging.join()
    assert read(storage, 0, 4096) == b"1" * 4096


def test_a_block_device_that_was_pulled_is_gone_and_not_damaged(
    storage: DeviceStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux sets its size to zero: a read finds the end there, and a write no room."""
    monkeypatch.setattr(storage, "_is_block", True)

    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage_module.os, "pwrite", no_room)
    with pytest.raises(StorageError) as told:
        storage.write(0, memoryview(bytes(4096)), placed=False)
    assert told.value.status == Status.CAPACITY_EXCEEDED  # It has its size still.
    os.truncate(storage.device.path, 0)
    for action in (
        lambda: read(storage, 0, 4096),
        lambda: storage.write(0, memoryview(bytes(4096)), placed=False),
    ):
        with pytest.raises(StorageError) as told:
            action()
        assert told.value.status == Status.NAMESPACE_NOT_READY


def test_the_end_waits_for_a_write_and_then_refuses(
    storage: DeviceStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "CLOSE_SECONDS", 0.01)
    real, hangs, go_on = os.pwrite, threading.Event(), threading.Event()

    def slow(descriptor: int, data: memoryview, offset: int) -> int:
        hangs.set()
        assert go_on.wait(30)
        return real(descriptor, data, offset)

    monkeypatch.setattr(storage_module.os, "pwrite", slow)
    writer = threading.Thread(target=lambda: storage.write(0, memoryview(bytes(4096)), placed=False))
    writer.start()
    assert hangs.wait(30)
    assert not storage.close()
    os.fstat(storage.device.buffered)  # It is open still: another file with its number would be written to.
    with pytest.raises(StorageError):
        read(storage, 0, 4096)
    go_on.set()
    writer.join(30)
    wait_until(storage.close, 10, "the write to end")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(storage.device.buffered)
