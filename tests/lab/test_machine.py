"""The lab's machine seen from outside: results, deadlines, deaths, and that nothing of it stays behind."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from emulator.lab.errors import GuestDiedError, GuestTimedOutError
from emulator.lab.image import LabImage
from emulator.lab.machine import Guest, run_in_guest
from tests.support.processes import Processes
from tests.support.waiting import wait_until


def gone(pid: int) -> bool:
    return not Path("/proc", str(pid)).exists()


def test_output_status_and_results_come_back_and_the_checkout_stays(
    lab_image: LabImage, repository: Path, tmp_path: Path
) -> None:
    victim = repository / "pyproject.toml"
    before = victim.read_bytes()
    new = repository / "written-by-the-guest"
    script = f"""
        uname -r
        echo overwritten > {victim}; cat {victim}
        touch {new} && ls {new}
        echo for the host > /run/g35/results/file
        ln -s /etc/passwd /run/g35/results/link
        ls /sys/class/net
        exit 3
    """
    printed: list[str] = []
    result = run_in_guest(script, 600, on_output=printed.append, results=tmp_path / "results")
    assert result.status == 3
    assert result.output == f"{lab_image.release}\noverwritten\n{new}\nlo\n"
    assert "".join(printed) == result.output
    assert victim.read_bytes() == before
    assert not new.exists()
    assert [file.name for file in (tmp_path / "results").iterdir()] == ["file"], "a link is not followed"


@pytest.mark.nightly  # test_lab_parts.py has the words of the script each time
def test_an_argument_vector_arrives_as_it_is(lab_image: LabImage) -> None:
    words = ["a b", "$HOME", "'\"", "*", ""]
    with Guest(["/usr/bin/printf", r"<%s>\n", *words], image=lab_image) as guest:
        assert guest.wait(600).output.splitlines() == [f"<{word}>" for word in words]


def test_a_command_that_does_not_end_is_ended(lab_image: LabImage) -> None:
    with Guest("echo started; sleep 1000", image=lab_image) as guest:
        wait_until(guest.output, 600, "the guest's first word")
        with pytest.raises(GuestTimedOutError) as caught:
            guest.wait(guest.seconds)
    assert caught.value.output == "started\n"
    assert gone(guest.pid)
    assert not guest.exchange.exists()


@pytest.mark.nightly  # a matter of the lab's own, which seldom changes
def test_a_kernel_panic_is_told_with_the_console(lab_image: LabImage) -> None:
    with (
        Guest("echo c > /proc/sysrq-trigger", image=lab_image) as guest,
        pytest.raises(GuestDiedError) as caught,
    ):
        guest.wait(600)
    assert "Kernel panic" in caught.value.console
    assert gone(guest.pid)


@pytest.mark.parametrize(
    "how",
    # SIGTERM is handled as SIGINT is.
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly), signal.SIGKILL],
)
def test_an_interrupted_lab_leaves_nothing(
    lab_image: LabImage, processes: Processes, tmp_path: Path, how: signal.Signals
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    lab = processes.start(
        [sys.executable, "-m", "emulator.lab", "run", "--", "sleep", "1000"],
        environment={"TMPDIR": str(scratch)},
    )
    wait_until(lambda: list(scratch.glob("*/exchange/script")), 300, "the guest to be set up")

    def qemu() -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{lab.pid}/task/{lab.pid}/children").read_text().split()]

    (pid,) = wait_until(qemu, 300, "QEMU to run")
    status = lab.stop(120, how)
    wait_until(lambda: gone(pid), 60, "QEMU to go")
    if how is signal.SIGKILL:
        assert status == -signal.SIGKILL  # its folder is removed by the next lab that starts
    else:
        assert status == 130
        assert list(scratch.iterdir()) == []
