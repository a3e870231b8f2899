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
    """Where a plain file of the guest's is expected there is a link, a pipe or a device."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the guest has replaced /run/g35/{name}; what is there now is not read")


class GuestTookTooMuchError(LabError):
    """The guest has made this machine keep more than it may; it has been ended."""

    def __init__(self, what: str, limit: int, unit: str = "MiB") -> None:
        super().__init__(
            f"the guest has been ended: {what} came to more than {limit} {unit}, which this machine keeps\n"
            "let the command print less, or write to the mount, or to a folder of the guest's own: /tmp"
        )


def last_lines(text: str, count: int = 25) -> str:
    return "\n".join(text.splitlines()[-count:])
