"""How an error of the emulator's programs (`g35 jbof`, `lab`, `host`) reaches the person who typed one.

The form is that of all verbs of g35: `error:` and what happened, `hint:` and what to do.
"""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Final

from nvmeof.linux_limits import refusal

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130


def tell_error(text: str, hint: str = "") -> None:
    """Print an error, and what to do about it, on standard error."""
    lines = [f"error: {text}", *(f"hint: {line}" for line in hint.splitlines())]
    print("\n".join(lines), file=sys.stderr, flush=True)


def words_of(error: Exception) -> str:
    """An exception for a person: without the number of an errno, with the file that it is about."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def run_program(application: Callable[..., object], name: str) -> None:
    """Run a program of typer's to its SystemExit. What it does not expect is told without a traceback."""
    try:
        application(prog_name=name)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        found = refusal(error)
        if os.environ.get("G35_DEBUG") == "1":
            traceback.print_exc()
        if found is not None:
            tell_error(*found)
        elif isinstance(error, OSError):
            tell_error(words_of(error))
        else:
            tell_error(
                f"{type(error).__name__}: {error}",
                "this is a bug of g35; run it again with G35_DEBUG=1 and report what it prints",
            )
        sys.exit(EXIT_FAILED)
