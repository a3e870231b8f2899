"""A guest's root writes what this machine reads: links, pipes, endless files, more than the disk has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from emulator.lab import guest_files
from emulator.lab.errors import ExchangeMisusedError, GuestTookTooMuchError
from emulator.lab.guest_files import (
    Allowance,
    Follower,
    copy_plain_files,
    remove_folder,
    status_in,
    tail_of,
    unnamed_bytes,
)


def a_link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_link_to_a_file(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.mkdir()


replacements = pytest.mark.parametrize("replace", [a_link_to_zeros, a_link_to_a_file, a_pipe, a_folder])


def test_a_follower_hands_on_what_is_new(tmp_path: Path) -> None:
    file, heard = tmp_path / "output", list[str]()
    follower = Follower(file)
    follower.pass_on(heard.append)
    for text in ("one", "two"):
        with file.open("a") as output:
            output.write(text)
        follower.pass_on(heard.append)
        follower.pass_on(heard.append)
    assert heard == ["one", "two"]


def test_a_follower_hands_on_pieces_and_whole_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_files, "PIECE_BYTES", 3)
    file, heard = tmp_path / "output", list[str]()
    file.write_bytes("aä€".encode() + "ö".encode()[:1])
    follower = Follower(file)
    follower.pass_on(heard.append)
    with file.open("ab") as output:
        output.write("ö".encode()[1:])
    follower.pass_on(heard.append)
    assert "".join(heard) == "aä€ö"
    assert len(heard) > 1


@replacements
def test_a_replaced_file_is_not_read(tmp_path: Path, replace: Callable[[Path], None]) -> None:
    place, heard = tmp_path / "output", list[str]()
    replace(place)
    with pytest.raises(ExchangeMisusedError, match="/run/g35/output"):
        Follower(place).pass_on(heard.append)
    with pytest.raises(ExchangeMisusedError):
        status_in(place)
    assert tail_of(place, 100) == ""
    assert heard == []


def test_the_end_of_a_file_and_a_status(tmp_path: Path) -> None:
    file = tmp_path / "status"
    assert tail_of(file, 100) == ""
    with pytest.raises(FileNotFoundError):
        status_in(file)
    file.write_text("12\n")
    assert (status_in(file), tail_of(file, 2)) == (12, "2\n")
    for nonsense in ("", "x", "-1", "256", "9" * 5000):
        file.write_text(nonsense)
        with pytest.raises(ValueError, match=r"status|literal"):
            status_in(file)


def test_what_is_printed_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_files, "PRINTED_BYTES_MAX", guest_files.MIB)
    file, heard = tmp_path / "output", list[int]()
    allowance = Allowance(tmp_path, file, tmp_path / "console")
    allowance.check_printed()
    file.touch()
    os.truncate(file, guest_files.MIB)
    allowance.check_printed()
    os.truncate(file, 1 << 40)
    with pytest.raises(GuestTookTooMuchError, match="its output came to more than 1 MiB"):
        allowance.check_printed()
    Follower(file).pass_on(lambda text: heard.append(len(text)))
    assert sum(heard) == guest_files.MIB
    assert max(heard) == guest_files.PIECE_BYTES


def test_what_is_in_the_shared_folder_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_files, "EXCHANGE_BYTES_MAX", guest_files.MIB)
    exchange = tmp_path / "exchange"
    (exchange / "a/b").mkdir(parents=True)
    (exchange / "a/link").symlink_to("/usr")
    (exchange / "a/up").symlink_to("..")
    (exchange / "a/b/file").write_bytes(bytes(900 << 10))
    allowance = Allowance(exchange)
    allowance.check_exchange(os.getpid())

    # A file without a name takes its room as long as the guest has it open.
    with (exchange / "open").open("wb") as file:
        file.write(bytes(300 << 10))
        file.flush()
        (exchange / "open").unlink()
        assert unnamed_bytes(os.getpid(), exchange.stat().st_dev) >= 300 << 10
        with pytest.raises(GuestTookTooMuchError, match="/run/g35 came to more than 1 MiB"):
            allowance.check_exchange(os.getpid())
    allowance.check_exchange(os.getpid())

    monkeypatch.setattr(guest_files, "EXCHANGE_ENTRIES_MAX", 4)
    with pytest.raises(GuestTookTooMuchError, match="4 files"):
        allowance.check_exchange(os.getpid())
    monkeypatch.setattr(guest_files, "PATH_CHARACTERS_MAX", len(str(exchange / "a")))
    with pytest.raises(GuestTookTooMuchError, match="characters"):
        allowance.check_exchange(os.getpid())


def test_results_are_plain_files_within_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_files, "EXCHANGE_BYTES_MAX", guest_files.MIB)
    source, destination = tmp_path / "results", tmp_path / "out"
    source.mkdir()
    (source / "file").write_bytes(b"x" * 200_000)
    a_link_to_a_file(source / "link")
    a_link_to_zeros(source / "zeros")
    a_pipe(source / "pipe")
    a_folder(source / "folder")
    copy_plain_files(source, destination)
    assert [file.name for file in destination.iterdir()] == ["file"]
    assert (destination / "file").read_bytes() == b"x" * 200_000
    (source / "holes").touch()
    os.truncate(source / "holes", 1 << 40)
    with pytest.raises(GuestTookTooMuchError, match="the results"):
        copy_plain_files(source, destination)
    source.rename(tmp_path / "elsewhere")
    source.symlink_to("/etc")
    with pytest.raises(ExchangeMisusedError, match="results"):
        copy_plain_files(source, destination)


def test_a_folder_as_deep_as_a_guest_can_make_it_goes(tmp_path: Path) -> None:
    top = tmp_path / "scratch"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    remove_folder(top)
    assert not top.exists()
