"""Drives of the Key Value command set, without a network: room, atomicity, faults, and coming back."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.jbof.enclosure import Enclosure, EnclosureError, EnclosureSettings
from emulator.jbof.faults import ErrorFault, FlipFault
from emulator.jbof.kv_drive import KvDrive
from emulator.jbof.kv_values import FolderValues, MemoryValues, Values
from nvmeof.controller.storage import HELD, Operation, Scratch, StorageError
from nvmeof.wire.kv import StoreOption
from nvmeof.wire.status import Status

CAPACITY = 64 << 10
SCRATCH = Scratch(CAPACITY)


def make(values: Values, capacity: int = CAPACITY) -> KvDrive:
    return KvDrive(3, values, nguid=b"\5" * 16, capacity_bytes=capacity, value_max=32 << 10, seed=35)


@pytest.fixture(params=["memory", "folder"])
def values(request: pytest.FixtureRequest, tmp_path: Path) -> Values:
    return MemoryValues() if request.param == "memory" else FolderValues(tmp_path / "values")


def put(drive: KvDrive, key: bytes, value: bytes, options: StoreOption = StoreOption.NONE) -> None:
    staged = drive.stage(len(value))
    try:
        if staged.window is not None:
            staged.window[:] = value
        else:
            staged.put(0, memoryview(value)[:5])
            staged.put(5, memoryview(value)[5:])
        staged.commit(key, options)
    finally:
        staged.discard()


def get(drive: KvDrive, key: bytes, limit: int = CAPACITY) -> bytes:
    return bytes(drive.retrieve(key, limit, SCRATCH)[0])


def status_of(failure: pytest.ExceptionInfo[StorageError]) -> int:
    return failure.value.status


def test_store_retrieve_replace_delete(values: Values) -> None:
    drive = make(values)
    put(drive, b"one", b"first value")
    put(drive, b"two", b"")
    assert get(drive, b"one") == b"first value"
    view, length = drive.retrieve(b"one", 5, SCRATCH)
    assert (bytes(view), length) == (b"first", 11)
    assert get(drive, b"two") == b""
    assert drive.used_bytes() == 8192
    put(drive, b"one", b"x" * 5000)
    assert drive.used_bytes() == 12288
    assert get(drive, b"one") == b"x" * 5000
    drive.delete(b"one")
    assert not drive.exists(b"one")
    assert drive.used_bytes() == 4096
    for missing in (lambda: drive.delete(b"one"), lambda: get(drive, b"one")):
        with pytest.raises(StorageError) as failure:
            missing()
        assert status_of(failure) == Status.KEY_NOT_FOUND
    drive.flush()
    drive.close()


def test_what_is_sent_stays_whole_while_it_is_replaced() -> None:
    drive = make(MemoryValues())
    put(drive, b"key", b"old" * 100)
    view, _ = drive.retrieve(b"key", CAPACITY, SCRATCH)
    put(drive, b"key", b"new" * 100)
    assert bytes(view) == b"old" * 100
    assert get(drive, b"key") == b"new" * 100


def test_a_store_that_does_not_finish_changes_nothing(values: Values) -> None:
    drive = make(values)
    put(drive, b"key", b"old value")
    staged = drive.stage(9)
    if staged.window is None:
        staged.put(0, memoryview(b"new "))
    else:
        staged.window[:4] = b"new "
    assert get(drive, b"key") == b"old value"
    staged.discard()
    staged.discard()
    assert get(drive, b"key") == b"old value"
    assert drive.used_bytes() == 4096
    drive.close()


def test_room_is_set_aside_while_a_value_arrives(values: Values) -> None:
    drive = make(values)
    staged = [drive.stage(16384) for _ in range(4)]
    with pytest.raises(StorageError) as failure:
        drive.stage(1)
    assert status_of(failure) == Status.CAPACITY_EXCEEDED
    for each in staged:
        each.discard()
    for number in range(16):
        put(drive, b"%d" % number, b"x")
    assert drive.used_bytes() == CAPACITY
    with pytest.raises(StorageError) as failure:
        put(drive, b"0", b"y")
    assert status_of(failure) == Status.CAPACITY_EXCEEDED
    drive.delete(b"15")
    put(drive, b"0", b"y")
    assert get(drive, b"0") == b"y"
    drive.close()


def test_conditions(values: Values) -> None:
    drive = make(values)
    with pytest.raises(StorageError) as failure:
        put(drive, b"key", b"value", StoreOption.ONLY_IF_PRESENT)
    assert status_of(failure) == Status.KEY_NOT_FOUND
    put(drive, b"key", b"value", StoreOption.ONLY_IF_ABSENT)
    with pytest.raises(StorageError) as failure:
        put(drive, b"key", b"other", StoreOption.ONLY_IF_ABSENT)
    assert status_of(failure) == Status.KEY_EXISTS
    put(drive, b"key", b"third", StoreOption.ONLY_IF_PRESENT)
    assert get(drive, b"key") == b"third"
    assert drive.used_bytes() == 4096
    drive.close()


def test_keys_are_listed_in_order(values: Values) -> None:
    drive = make(values)
    for key in (b"b", b"a", b"ab", b"c"):
        put(drive, key, b"x")
    assert drive.keys_from(b"", 10) == [b"a", b"ab", b"b", b"c"]
    assert drive.keys_from(b"aa", 2) == [b"ab", b"b"]
    drive.delete(b"ab")
    assert drive.keys_from(b"a", 2) == [b"a", b"b"]
    assert drive.keys_from(b"d", 2) == []
    drive.close()


def test_faults(values: Values) -> None:
    drive = make(values)
    put(drive, b"key", b"value")
    drive.set_faults(hung=True)
    assert drive.admit(Operation.RETRIEVE, 0, 5, 1.0) == HELD
    drive.heal()
    assert drive.held_until(2.0) == 2.0
    drive.set_faults(extra_latency_s=0.5)
    assert drive.admit(Operation.RETRIEVE, 0, 5, 1.0) == 1.5
    drive.heal()
    drive.set_faults(error=ErrorFault(Status.UNRECOVERED_ERROR, operations=frozenset({Operation.RETRIEVE})))
    drive.admit(Operation.STORE, 0, 5, 1.0)
    with pytest.raises(StorageError) as failure:
        drive.admit(Operation.RETRIEVE, 0, 5, 1.0)
    assert status_of(failure) == Status.UNRECOVERED_ERROR
    drive.heal()
    drive.set_faults(full=True)
    with pytest.raises(StorageError) as failure:
        drive.admit(Operation.STORE, 0, 5, 1.0)
    assert status_of(failure) == Status.CAPACITY_EXCEEDED
    drive.heal()
    drive.set_faults(lose_writes=1.0)
    put(drive, b"key", b"never")
    put(drive, b"new", b"never")
    drive.heal()
    assert get(drive, b"key") == b"value"
    assert not drive.exists(b"new")
    assert drive.used_bytes() == 4096
    drive.set_faults(flip_on_read=FlipFault(1, 1))
    wrong = get(drive, b"key")
    assert wrong != b"value"
    assert wrong[:1] + wrong[2:] == b"vlue"
    drive.heal()
    assert get(drive, b"key") == b"value"
    assert drive.flip_at_rest(0, 100, 1) != []
    assert get(drive, b"key") != b"value"
    for impossible in (
        lambda: drive.zero_at_rest(0, 1),
        lambda: drive.copy_at_rest(0, 1, 1),
        lambda: drive.flip_at_rest(5, 1, 1),
    ):
        with pytest.raises(ValueError, match=r"drive|value"):
            impossible()
    stats = drive.stats()
    assert (stats["keys"], stats["command_set"], stats["faults_injected"]["lose_writes"]) == (1, "kv", 2)
    drive.close()


def test_a_folder_survives_and_leftovers_go(tmp_path: Path) -> None:
    drive = make(FolderValues(tmp_path))
    put(drive, b"\0\1", b"kept" * 2000)
    drive.stage(5000)  # a Store that the process did not live to see the end of
    assert len(list(tmp_path.iterdir())) == 2
    again = make(FolderValues(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["0001"]
    assert get(again, b"\0\1") == b"kept" * 2000
    assert again.used_bytes() == 8192
    with pytest.raises(ValueError, match="8192"):
        make(FolderValues(tmp_path), capacity=4096)
    (tmp_path / "no value").write_bytes(b"")
    with pytest.raises(ValueError, match="no value"):
        make(FolderValues(tmp_path))


def test_an_enclosure_with_both_kinds(tmp_path: Path) -> None:
    settings = EnclosureSettings(drives=1, kv_drives=2, drive_bytes=1 << 20, folder=tmp_path)
    enclosure = Enclosure(settings)
    kinds = [each["command_set"] for each in enclosure.describe()["namespaces"]]
    assert kinds == ["nvm", "kv", "kv"]
    first = enclosure.drive(1)
    assert isinstance(first, KvDrive)
    put(first, b"key", b"value")
    nguid = first.nguid
    enclosure.remove_drive(1)
    assert not enclosure.is_attached(1)
    enclosure.add_drive(1)
    assert enclosure.is_attached(1)
    enclosure.close()
    enclosure = Enclosure(settings)
    first = enclosure.drive(1)
    assert isinstance(first, KvDrive)
    assert (get(first, b"key"), first.nguid) == (b"value", nguid)
    enclosure.close()
    with pytest.raises(EnclosureError, match="describes"):
        Enclosure(EnclosureSettings(drives=2, drive_bytes=1 << 20, folder=tmp_path))


def test_wrong_settings() -> None:
    with pytest.raises(EnclosureError, match="1025"):
        EnclosureSettings(drives=1000, kv_drives=25)
    with pytest.raises(EnclosureError, match="4096"):
        EnclosureSettings(drives=0, kv_drives=1, drive_bytes=512, lba_bytes=512)
    with pytest.raises(ValueError, match="4096"):
        KvDrive(0, MemoryValues(), nguid=b"\1" * 16, capacity_bytes=100, value_max=1)
    with pytest.raises(ValueError, match="longest"):
        KvDrive(0, MemoryValues(), nguid=b"\1" * 16, capacity_bytes=4096, value_max=0)
