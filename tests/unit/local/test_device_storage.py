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
    assert (storage.read_bytes, storage.written_bytes) == (6 * 4096, 6 * 4096)


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
    storage.close()
    os.fstat(storage.device.buffered)  # It is open still: another file with its number would be written to.
    with pytest.raises(StorageError):
        read(storage, 0, 4096)
    go_on.set()
    writer.join(30)
    wait_until(lambda: not storage._users, 10, "the write to end")
    storage.device.close()
