"""Media and drives, without a network."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import typer

from emulator.jbof.cli import _size
from emulator.jbof.drive import Drive
from emulator.jbof.drive_folder import derived_nguid
from emulator.jbof.drive_model import DriveModelSettings
from emulator.jbof.enclosure import Enclosure, EnclosureError, EnclosureSettings
from emulator.jbof.faults import DriveFaults, ErrorFault, FlipFault, choose_bits
from emulator.jbof.medium import FileMedium, Medium, MemoryMedium, NullMedium
from nvmeof.controller.storage import HELD, Operation, Scratch, StorageError
from nvmeof.wire.status import Status

SIZE = 1 << 20


@pytest.fixture(params=["memory", "prefaulted", "file"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Medium:
    if request.param == "file":
        return FileMedium(tmp_path / "drive.img", SIZE)
    return MemoryMedium(SIZE, prefault=request.param == "prefaulted")


def contents(medium: Medium, offset: int, length: int) -> bytes:
    into = bytearray(length)
    medium.read_into(offset, memoryview(into))
    return bytes(into)


@pytest.mark.parametrize(
    ("offset", "length"), [(0, SIZE), (4096, 8192), (100, 50), (4000, 5000), (5000, 3000)]
)
def test_a_punched_range_reads_as_zeros_and_its_neighbours_stay(
    medium: Medium, offset: int, length: int
) -> None:
    medium.write(0, b"x" * SIZE)
    medium.punch(offset, length)
    expected = b"x" * offset + bytes(length) + b"x" * (SIZE - offset - length)
    assert contents(medium, 0, SIZE) == expected
    medium.flush()
    medium.close()


def test_a_null_medium_forgets_and_reads_as_zeros() -> None:
    medium = NullMedium(4 << 20)
    medium.write(0, b"x" * 8192)
    into = bytearray(b"y" * ((2 << 20) + 5))
    medium.read_into(4096, memoryview(into))
    assert not any(into)
    assert (medium.window(0, 1), medium.used_bytes(), medium.size) == (None, 0, 4 << 20)


def test_a_window_is_the_medium_itself() -> None:
    memory = MemoryMedium(SIZE)
    window = memory.window(4096, 4)
    window[:] = b"abcd"
    assert contents(memory, 4095, 6) == b"\0abcd\0"
    window.release()
    memory.close()


def test_a_file_is_sparse_and_survives(tmp_path: Path) -> None:
    path = tmp_path / "drive.img"
    medium = FileMedium(path, 1 << 30)
    medium.write(123456789, b"here")
    assert medium.used_bytes() < 1 << 20
    medium.close()
    again = FileMedium(path, 1 << 30)
    assert contents(again, 123456789, 4) == b"here"
    again.close()
    with pytest.raises(ValueError, match="is to have"):
        FileMedium(path, 1 << 20)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_cut_short_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    medium = FileMedium(tmp_path / "drive.img", SIZE)
    os.truncate(tmp_path / "drive.img", 4096)
    drive = Drive(0, medium, nguid=b"1" * 16)
    with pytest.raises(StorageError) as caught:
        drive.read(8192, 4096, Scratch(SIZE))
    assert caught.value.status == Status.UNRECOVERED_READ_ERROR
    drive.close()


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (errno.ENOSPC, Status.CAPACITY_EXCEEDED),
        (errno.EDQUOT, Status.CAPACITY_EXCEEDED),
        (errno.EIO, Status.WRITE_FAULT),
    ],
)
def test_errors_of_the_disk_become_statuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    drive = Drive(0, FileMedium(tmp_path / "drive.img", SIZE), nguid=b"1" * 16)

    def broken(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(StorageError) as caught:
        drive.write(0, memoryview(b"x" * 4096), placed=False)
    assert caught.value.status == status
    assert drive.counters.failed_commands == 1
    drive.close()


def test_counters() -> None:
    drive = Drive(3, MemoryMedium(SIZE), nguid=b"1" * 16)
    scratch = Scratch(SIZE)
    drive.admit(Operation.READ, 0, 8192, 0.0)
    drive.read(0, 8192, scratch)
    window = drive.write_window(0, 4096)
    assert window is not None
    drive.write(0, window, placed=True)
    drive.admit(Operation.WRITE, 0, 4096, 0.0)
    drive.admit(Operation.FLUSH, 0, 0, 0.0)
    drive.admit(Operation.WRITE_ZEROES, 0, 4096, 0.0)
    drive.write_zeroes(0, 4096, deallocate=True)
    drive.admit(Operation.DEALLOCATE, 0, 32, 0.0)
    drive.deallocate(4096, 4096)
    stats = drive.stats()
    assert {key: value for key, value in stats.items() if value and "_" in key} == {
        "lba_bytes": 4096,
        "used_bytes": SIZE,
        "read_commands": 1,
        "read_bytes": 8192,
        "write_commands": 1,
        "write_bytes": 4096,
        "flush_commands": 1,
        "write_zeroes_commands": 1,
        "write_zeroes_bytes": 4096,
        "deallocate_commands": 1,
        "deallocate_bytes": 4096,
    }
    assert (stats["drive"], stats["nsid"], stats["nguid"]) == (3, 4, (b"1" * 16).hex())
    window.release()
    drive.close()


def test_a_model_and_slowness_add_up() -> None:
    drive = Drive(0, MemoryMedium(SIZE), nguid=b"1" * 16, model=DriveModelSettings(read_latency_s=0.1))
    assert drive.admit(Operation.READ, 0, 4096, 1.0) == pytest.approx(1.1)
    drive.set_faults(extra_latency_s=0.2)
    assert drive.admit(Operation.READ, 0, 4096, 1.0) == pytest.approx(1.3)
    drive.set_model(DriveModelSettings())
    assert drive.admit(Operation.READ, 0, 4096, 1.0) == pytest.approx(1.2)
    drive.set_faults(hung=True)
    assert drive.admit(Operation.READ, 0, 4096, 1.0) == HELD
    assert drive.held_until(2.0) == HELD
    drive.heal()
    assert drive.held_until(2.0) == 2.0
    drive.close()


def test_damage_at_rest(medium: Medium) -> None:
    drive = Drive(0, medium, nguid=b"1" * 16, seed=35)
    medium.write(0, b"x" * SIZE)
    hit = drive.flip_at_rest(8192, 4096, 5)
    assert all(8192 <= position < 12288 for position in hit)
    damaged = contents(medium, 0, SIZE)
    assert sum((byte ^ ord("x")).bit_count() for byte in damaged) == 5
    drive.zero_at_rest(0, 4096)
    assert contents(medium, 0, 4096) == bytes(4096)
    medium.write(16384, b"s" * 4096)
    drive.copy_at_rest(16384, 0, 4096)
    assert contents(medium, 0, 4096) == b"s" * 4096
    with pytest.raises(ValueError):
        drive.flip_at_rest(SIZE - 10, 11, 1)
    with pytest.raises(ValueError):
        drive.zero_at_rest(-1, 1)
    drive.heal()
    assert contents(medium, 0, 4096) == b"s" * 4096, "damage stays"
    drive.close()


def test_chance_follows_the_seed() -> None:
    one, two = DriveFaults(random.Random(35)), DriveFaults(random.Random(35))
    for faults in (one, two):
        faults.error = ErrorFault(0x281, 0.5)
    drawn = [one.failing(Operation.READ) is not None for _ in range(200)]
    assert drawn == [two.failing(Operation.READ) is not None for _ in range(200)]
    assert 60 < sum(drawn) < 140


def test_flips_on_read_overlap_the_range() -> None:
    faults = DriveFaults(random.Random(35))
    faults.flip_on_read = FlipFault(1000, 10, bits=80)
    hit = faults.bits_to_flip(1005, 100)
    assert {position for position, _ in hit} == {0, 1, 2, 3, 4}
    assert len(hit) == 40, "all bits of what overlaps, for there are no more"
    assert faults.bits_to_flip(1010, 100) == []
    assert len(choose_bits(random.Random(1), 0, 1, 99)) == 8


@pytest.mark.parametrize("wrong", [{"status": 0}, {"status": 0x800}, {"status": 0x281, "probability": 1.1}])
def test_errors_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        ErrorFault(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("4K", 4096), ("1M", 1 << 20), ("1.5GiB", 3 << 29), ("2 tb", 2 << 40)]
)
def test_sizes(text: str, size: int) -> None:
    assert _size(text) == size


@pytest.mark.parametrize("text", ["", "G", "1X", "-1M", "1,5G", "0x10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        _size(text)


# --- the enclosure's drives, without starting it -----------------------------------------------------------


def test_drives_in_files_keep_their_names(tmp_path: Path) -> None:
    settings = EnclosureSettings(drives=2, drive_bytes=SIZE, folder=tmp_path / "flash")
    first = Enclosure(settings)
    names = [drive.nguid for drive in first.drives]
    with pytest.raises(EnclosureError, match="another enclosure"):
        Enclosure(settings)
    first.close()
    again = Enclosure(settings)
    assert [drive.nguid for drive in again.drives] == names
    assert len(set(names)) == 2
    again.close()
    with pytest.raises(EnclosureError, match="describes a drive"):
        Enclosure(EnclosureSettings(drives=1, drive_bytes=2 * SIZE, folder=tmp_path / "flash"))


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"nguid": "zz", "size": 1048576, "lba_bytes": 4096}']
)
def test_a_broken_description_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "drive-000.json").write_text(text)
    with pytest.raises(EnclosureError, match=r"drive-000\.json"):
        Enclosure(EnclosureSettings(drives=1, drive_bytes=SIZE, folder=tmp_path))


def test_drives_in_memory_have_the_same_names_each_time() -> None:
    enclosure = Enclosure(EnclosureSettings(drives=2, drive_bytes=SIZE, name="a"))
    assert [drive.nguid for drive in enclosure.drives] == [
        derived_nguid("nqn.2026-01.io.g35:a", number) for number in range(2)
    ]
    assert derived_nguid("nqn.2026-01.io.g35:b", 0) != derived_nguid("nqn.2026-01.io.g35:a", 0)
    enclosure.close()


def test_drives_come_and_go() -> None:
    enclosure = Enclosure(EnclosureSettings(drives=1, drive_bytes=SIZE))
    enclosure.drive(0).medium.write(0, b"kept")
    enclosure.remove_drive(0)
    assert not enclosure.is_attached(0)
    with pytest.raises(ValueError, match="not in the enclosure"):
        enclosure.remove_drive(0)
    assert enclosure.add_drive(size=2 * SIZE).number == 1
    assert enclosure.add_drive(0) is enclosure.drive(0)
    with pytest.raises(ValueError, match="there already"):
        enclosure.add_drive(0)
    with pytest.raises(KeyError):
        enclosure.add_drive(7)
    assert contents(enclosure.drive(0).medium, 0, 4) == b"kept"
    assert [entry["size"] for entry in enclosure.describe()["namespaces"]] == [SIZE, 2 * SIZE]
    enclosure.close()


@pytest.mark.parametrize(
    "wrong", [{"drives": -1}, {"drives": 1025}, {"lba_bytes": 1024}, {"drive_bytes": 100}, {"drive_bytes": 0}]
)
def test_enclosures_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(EnclosureError):
        EnclosureSettings(**wrong)  # type: ignore[arg-type]


def test_a_name_that_is_too_long() -> None:
    with pytest.raises(EnclosureError):
        Enclosure(EnclosureSettings(name="n" * 300, drive_bytes=SIZE))


def test_to_look_a_command_up_is_no_call_of_python() -> None:
    """A drive asks three sets of operations with each."""
    assert all(type(operation).__hash__ is object.__hash__ for operation in Operation)
