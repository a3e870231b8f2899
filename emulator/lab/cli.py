"""`g35 lab`: the lab from the command line.

Exit codes: 0 it worked, 1 it did not, 2 wrong arguments, 130 Ctrl-C.

`run` is the exception: it exits with the status of the command that it ran in the guest.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from emulator.lab.accelerator import choose_accelerator
from emulator.lab.booting import wait_on_terminal
from emulator.lab.cache import REPOSITORY
from emulator.lab.errors import LabError, LabUnavailableError
from emulator.lab.image import LabImage, prepare
from emulator.lab.machine import Guest, run_in_guest
from emulator.lab.start_folder import start_folder

app = typer.Typer(
    help="Run things on Debian's stock 6.12 kernel in a virtual machine (QEMU), where the kernel's own NVMe "
    "drivers judge ours. The guest sees this machine's files and cannot change them. Without a verb: run "
    "the tests in tests/lab.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)

told = Console(stderr=True)

FOLDER_HELP = "Folder of this machine to start in; not below /tmp, /var/tmp or /run: the guest has its own."


@app.callback(invoke_without_command=True)
def lab(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        run_tests()


@app.command("test")
def run_chosen_tests(
    pytest_arguments: Annotated[
        list[str],
        typer.Argument(
            help="Handed on to pytest, e.g. -- -k discover", default_factory=list, show_default=False
        ),
    ],
) -> None:
    """Run the tests in tests/lab, with options for pytest."""
    run_tests(*pytest_arguments)


@app.command("prepare")
def prepare_lab(
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Look for a newer kernel than the cached.")
    ] = False,
) -> None:
    """Download the kernel and build the guest (once)."""
    with failures_told():
        image = prepared_image(refresh=refresh)
        told.print(f"{image.release}, {choose_accelerator(image)}: {image.kernel.parent}", soft_wrap=True)


@app.command("run")
def run(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after --")],
    timeout: Annotated[float, typer.Option(help="Seconds until the guest is ended.", min=1)] = 300.0,
    folder: Annotated[Path, typer.Option(help=FOLDER_HELP)] = REPOSITORY,
    results: Annotated[
        Path | None, typer.Option(help="Folder for the files that it leaves in /run/g35/results.")
    ] = None,
) -> None:
    """Run one command in the guest, as root.

    Prints what it prints and exits with its status. Example: g35 lab run -- nvme list
    """
    start = checked_folder(folder)
    with failures_told():
        prepared_image()
        result = run_in_guest(command, timeout, folder=start, on_output=print_raw, results=results)
        raise typer.Exit(result.status)


@app.command("shell")
def shell(
    folder: Annotated[Path, typer.Option(help=FOLDER_HELP)] = REPOSITORY,
) -> None:
    """Open a shell in the guest.

    `exit` powers the guest off; Ctrl-A X ends QEMU.
    """
    start = checked_folder(folder)
    with failures_told():
        image = prepared_image()
        with Guest(
            "exec /bin/bash --login",
            image=image,
            accelerator=choose_accelerator(image),
            folder=start,
            interactive=True,
        ) as guest:
            wait_on_terminal(guest, "the guest")


def checked_folder(folder: Path) -> Path:
    """As `start_folder`; the words of a wrong argument are typer's to print."""
    try:
        return start_folder(folder)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--folder") from None


def run_tests(*pytest_arguments: str) -> NoReturn:
    """Hand over to pytest; it boots one guest for all tests (tests/support/guest_tests.py)."""
    with failures_told():
        prepared_image()
        command = [sys.executable, "-m", "pytest", str(REPOSITORY / "tests" / "lab"), "-v", "-rs"]
        with subprocess.Popen([*command, *pytest_arguments], cwd=REPOSITORY) as pytest:
            try:
                status = pytest.wait()
            except KeyboardInterrupt:
                pytest.send_signal(signal.SIGINT)  # it ends its guest, and needs a moment for it
                pytest.wait(timeout=15)
                raise
            finally:
                pytest.kill()
        raise typer.Exit(1 if status else 0)
    raise typer.Exit(1)


@contextmanager
def failures_told() -> Iterator[None]:
    """Turn the lab's errors into a message and an exit code; SIGTERM and SIGHUP unwind like Ctrl-C."""

    def unwind(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, unwind)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup
    }
    try:
        yield
    except LabUnavailableError as error:
        told.print(f"The lab cannot run here: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except LabError as error:
        told.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        with suppress(OSError):  # the terminal may be gone
            told.print("Interrupted; the guest has been ended.")
        raise typer.Exit(130) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prepared_image(*, refresh: bool = False) -> LabImage:
    """The image, with what it takes to make it shown on standard error. Raises LabUnavailableError."""
    with _shown_progress() as progress:
        return prepare(progress, refresh=refresh)


@contextmanager
def _shown_progress() -> Iterator[Callable[[str], None]]:
    with told.status("preparing the lab") as status:

        def show(step: str) -> None:
            if told.is_terminal:
                status.update(step)
            elif not step.startswith("downloading") or ": 0 of" in step:
                told.print(step, markup=False, highlight=False)

        yield show


def print_raw(text: str) -> None:
    """Hand on what a guest prints, as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()
