"""A guest is ended whatever it does; a program that writes to the exchange folder stands in for QEMU."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from emulator.lab import guest_files, machine
from emulator.lab.cli import failures_told, wait_on_terminal
from emulator.lab.errors import (
    ExchangeMisusedError,
    GuestDiedError,
    GuestTimedOutError,
    GuestTookTooMuchError,
)
from emulator.lab.image import LabImage
from emulator.lab.machine import Guest
from tests.support.waiting import wait_until

IMAGE = LabImage("6.12.1+deb12-amd64", Path("/k/vmlinuz"), Path("/k/initramfs"))
LONG_S = 60.0

Start = Callable[..., Guest]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """A guest whose root does what a shell script says in its exchange folder."""
    monkeypatch.setattr(machine.tempfile, "tempdir", str(tmp_path))

    def started(script: str, *, interactive: bool = False) -> Guest:
        def command(_image: object, _accelerator: object, exchange: Path, *_rest: object) -> list[str]:
            return ["sh", "-c", f"cd {exchange}; {script}"]

        monkeypatch.setattr(machine, "qemu_command", command)
        return Guest("", image=IMAGE, interactive=interactive)

    return started


def by_clock(monkeypatch: pytest.MonkeyPatch, times: list[float], then: Callable[[Guest], float]) -> None:
    """Since the boot it is so long, then so long; and after those, what `then` says."""
    monkeypatch.setattr(Guest, "seconds", property(lambda guest: times.pop(0) if times else then(guest)))


def until_there_is(name: str) -> str:
    """For a script."""
    return f"until [ -e {name} ]; do sleep 0.01; done"


def test_an_honest_guest(start: Start, tmp_path: Path) -> None:
    heard: list[str] = []
    with start("echo words > output; echo found > results/file; echo 3 > status") as guest:
        result = guest.wait(LONG_S, heard.append)
        guest.copy_results(tmp_path / "results")
    assert (result.status, result.output, "".join(heard)) == (3, "words\n", "words\n")
    assert (tmp_path / "results/file").read_text() == "found\n"
    assert not guest.exchange.exists()


PANIC = "echo panic >> boots; echo '[    2.07] Kernel panic - not syncing: Fatal exception' > ../console"


def test_a_kernel_that_dies_of_its_boot_is_booted_again(start: Start) -> None:
    with start(f"[ -e boots ] && echo 0 > status && exit; {PANIC}") as guest:
        assert guest.wait(LONG_S).status == 0


def test_but_not_for_ever(start: Start) -> None:
    with start(PANIC) as guest:
        with pytest.raises(GuestDiedError, match="without an exit status"):
            guest.wait(LONG_S)
        assert (guest.exchange / "boots").read_text().count("panic") == machine.BOOTS


@pytest.mark.parametrize("script", [f"touch begun; {PANIC}", "touch boots"])
def test_a_death_that_may_be_the_scripts_doing_stands(start: Start, script: str) -> None:
    with start(script) as guest:
        with pytest.raises(GuestDiedError):
            guest.wait(LONG_S)
        assert (guest.exchange / "boots").read_text() in ("panic\n", "")


@pytest.mark.parametrize("name", ["output", "status"])
def test_a_link_to_endless_zeros(start: Start, name: str) -> None:
    heard: list[str] = []
    with (
        start(f"rm -f {name}; ln -s /dev/zero {name}; sleep 0.2") as guest,
        pytest.raises(ExchangeMisusedError, match=name),
    ):
        guest.wait(LONG_S, heard.append)
    assert heard == []


def test_the_deadline_holds_while_nobody_takes_the_words(start: Start) -> None:
    stuck = threading.Event()

    def full(_text: str) -> None:
        """As a pipe whose reader does not read; it goes on when the guest has been ended."""
        guest._qemu.wait(LONG_S)
        stuck.set()

    with start("echo words > output; exec sleep 1000") as guest:
        wait_until(guest.output, what="its words")
        with pytest.raises(GuestTimedOutError) as caught:
            guest.wait(guest.seconds + 0.5, full)
        assert stuck.is_set()
    assert caught.value.output == "words\n"


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("truncate -s 1T output", "its output"),
        ("truncate -s 1T ../console", "its console"),
        ("head -c 3M /dev/zero > file", "/run/g35"),
        ("exec 9> file; rm file; head -c 3M /dev/zero >&9", "/run/g35"),
    ],
)
def test_a_guest_that_fills_the_disk(
    start: Start, monkeypatch: pytest.MonkeyPatch, script: str, what: str
) -> None:
    monkeypatch.setattr(guest_files, "EXCHANGE_BYTES_MAX", 2 * guest_files.MIB)
    monkeypatch.setattr(machine, "EXCHANGE_POLL_S", 0.0)
    with start(f"{script}; exec sleep 1000") as guest, pytest.raises(GuestTookTooMuchError, match=what):
        guest.wait(LONG_S)
    assert not guest.running()


def test_a_shell_says_that_it_boots_until_the_guest_speaks(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    begun: list[bool] = []

    def then(guest: Guest) -> float:
        """It begins once 1 s was said, and 2 s pass once that was seen."""
        if not begun:
            (guest.exchange / "begin").touch()
            begun.extend([True] * guest.has_begun())
            return 1.9
        (guest.exchange / "end").touch()
        return 2.1

    by_clock(monkeypatch, [0.0, 0.9, 1.1], then)
    script = f"{until_there_is('begin')}; touch begun; {until_there_is('end')}"
    with start(script, interactive=True) as guest:
        wait_on_terminal(guest, "the GPU host")
    said = capsys.readouterr().err
    assert said == "\rbooting the GPU host (0 s)\rbooting the GPU host (1 s)", "then the guest's line begins"


def test_where_there_is_no_terminal_it_is_said_once(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def then(guest: Guest) -> float:
        (guest.exchange / "end").touch()
        return 1.2

    by_clock(monkeypatch, [0.0, 0.6, 1.1], then)
    with start(until_there_is("end"), interactive=True) as guest:
        wait_on_terminal(guest, "the GPU host")
    assert capsys.readouterr().err == "booting the GPU host\n"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminal_that_is_closed_unwinds_like_ctrl_c(how: signal.Signals) -> None:
    before = signal.signal(how, signal.SIG_DFL)  # nohup, under which tests may run, has it ignored
    try:
        with pytest.raises(typer.Exit) as caught, failures_told():
            signal.raise_signal(how)
        assert caught.value.exit_code == 130
        assert signal.getsignal(how) is signal.SIG_DFL
    finally:
        signal.signal(how, before)
