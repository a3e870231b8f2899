"""Errors of the lab."""


class LabError(Exception):
    """Base of all of these; never raised itself."""


class LabUnavailableError(LabError):
    """This machine cannot run the lab; the text says what is missing and how to get it. Tests are skipped."""


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
    """A link, a pipe or a device where a plain file of the guest's is expected."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the guest has replaced /run/g35/{name}; its replacement is not read")


class GuestTookTooMuchError(LabError):
    """The guest has written more to this machine than it may; it has been ended."""

    def __init__(self, what: str, limit: int, unit: str = "MiB") -> None:
        super().__init__(
            f"the guest has been ended: {what} came to more than {limit} {unit}, which this machine keeps\n"
            "let the command print less, or write to the mount, or to a folder of the guest's own: /tmp"
        )


def last_lines(text: str, count: int = 25) -> str:
    return "\n".join(text.splitlines()[-count:])
