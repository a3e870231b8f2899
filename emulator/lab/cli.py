"""`g35 lab`: the lab from the command line.

Exit codes: 0 success, 1 failure, 2 wrong arguments, 130 Ctrl-C; of `run`, the command's own.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from emulator.command_line import EXIT_FAILED, EXIT_INTERRUPTED, tell_error
from emulator.lab.accelerator import choose_accelerator
from emulator.lab.cache import REPOSITORY
from emulator.lab.device_socket import NoDeviceError
from emulator.lab.errors import LabError, LabUnavailableError
from emulator.lab.image import LabImage, prepare
from emulator.lab.machine import POLL_S, Guest, run_in_guest

app = typer.Typer(
    help="Run things on Debian's stock 6.12 kernel in a virtual machine (QEMU), where the kernel's own NVMe "
    "drivers judge ours. The guest sees this machine's files and cannot change them. Without a verb: run "
    "the tests in tests/lab.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)

told = Console(stderr=True)

OF_THE_GUEST = ("/dev", "/proc", "/run", "/sys", "/tmp", "/var/tmp")
"""Folders that a guest has of its own (`init.sh`)."""
KEPT_IN_VIEW_BELOW = ("/tmp", "/var/tmp")
"""A checkout below these is visible all the same."""

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
    """See `start_folder`. Raises BadParameter."""
    try:
        return start_folder(folder)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--folder") from None


def start_folder(folder: Path) -> Path:
    """The absolute name of a folder. Raises ValueError, with a sentence, where a guest cannot start in it."""
    named = folder.absolute()
    try:
        real = named.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a ring of links
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{folder}: {reason}") from None
    if not real.is_dir():
        raise ValueError(f"{folder} is no folder")
    # The guest goes there by the name, and then by the links: either may lead into a folder of its own.
    for path in (named, real):
        own = hiding_folder(path, REPOSITORY)
        if own:
            raise ValueError(
                f"{folder} is not visible in the guest, whose {own} is its own; name a folder elsewhere"
            )
    return named


def hiding_folder(path: Path, checkout: Path) -> str:
    """The folder of the guest's own that hides `path`, or an empty string."""
    hiding = next((own for own in OF_THE_GUEST if Path(own) in path.parents), "")
    if hiding in KEPT_IN_VIEW_BELOW and path.is_relative_to(checkout):
        return ""
    return hiding


def wait_on_terminal(guest: Guest, what: str) -> None:
    """Wait for the end of an interactive guest, and say on standard error that it boots (up to 40 s).

    QEMU has the terminal in raw mode meanwhile. The guest's script tells by a file that it begins
    (`machine.guest_script`); nothing is written after that. Raises GuestTookTooMuchError,
    ExchangeMisusedError.
    """
    said = -1
    begun = False
    while guest.running():
        begun = begun or guest.has_begun()
        seconds = int(guest.seconds)
        if not begun and seconds > said:
            said = seconds
            if sys.stderr.isatty():
                sys.stderr.write(f"\rbooting {what} ({seconds} s)")
            elif seconds == 0:
                sys.stderr.write(f"booting {what}\n")
            sys.stderr.flush()
        guest.check_allowance()
        time.sleep(POLL_S)
    if not begun and sys.stderr.isatty():
        sys.stderr.write("\n")


def run_tests(*pytest_arguments: str) -> NoReturn:
    """Run pytest, which boots one guest for all tests (tests/support/lab/guest_tests.py)."""
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
        tell_error(f"the lab cannot run here: {error}")
        raise typer.Exit(EXIT_FAILED) from None
    except NoDeviceError as error:
        tell_error(*str(error).split("\n", 1))
        raise typer.Exit(EXIT_FAILED) from None
    except LabError as error:
        tell_error(str(error))
        raise typer.Exit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        with suppress(OSError):  # the terminal may be gone
            told.print("Interrupted; the guest has been ended.")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prepared_image(*, refresh: bool = False) -> LabImage:
    """The image; progress on standard error. Raises LabUnavailableError."""
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
    """Print a piece of a guest's output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
