"""What can go wrong in the lab, told apart by what the caller can do about it."""

from __future__ import annotations


class LabError(Exception):
    """Base of all of these; never raised itself."""


class LabUnavailableError(LabError):
    """This machine cannot run the lab: a program or the kernel package is missing. Tests are skipped.

    The text says what is missing and, where there is a remedy, how to get it.
    """


class GuestDiedError(LabError):
    """The guest ended without an exit status: a kernel panic, or QEMU failed. Carries its console."""

    def __init__(self, reason: str, output: str, console: str) -> None:
        super().__init__(f"{reason}\n--- last lines of the guest's console ---\n{last_lines(console)}")
        self.output = output
        self.console = console


class GuestTimedOutError(LabError):
    """The command was still running at its deadline; the guest has been ended."""

    def __init__(self, timeout_s: float, output: str, console: str) -> None:
        super().__init__(
            f"the guest was still running after {timeout_s:.0f} s and has been ended\n"
            f"--- last lines of its output ---\n{last_lines(output)}\n"
            f"--- last lines of its console ---\n{last_lines(console)}"
        )
        self.output = output
        self.console = console


class ExchangeMisusedError(LabError):
    """The guest has put something else where a plain file of its own is expected: a link, a pipe, a device."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the guest has made /run/g35/{name} something other than it was; it is not trusted")


class GuestTookTooMuchError(LabError):
    """The guest has made this machine keep more than it may; it has been ended."""

    def __init__(self, what: str, limit: int, unit: str = "MiB") -> None:
        super().__init__(
            f"{what} of the guest would be more than {limit} {unit}, and it has been ended\n"
            "let the command print less, or write to files: the mount, or folders of the guest's own"
        )


def last_lines(text: str, count: int = 25) -> str:
    return "\n".join(text.splitlines()[-count:])
