"""Saying that a guest boots for as long as it does, on standard error.

Emulated, that takes up to 40 s. QEMU has the terminal by then, in raw mode, and the guest's words go past
us: its script tells by a file that it begins, and begins a line of its own (`machine.guest_script`). So
nothing is ever written after the guest's first word.
"""

from __future__ import annotations

import sys
import time

from emulator.lab.machine import POLL_S, Guest


def wait_on_terminal(guest: Guest, what: str) -> None:
    """Wait for the end of an interactive guest. Raises GuestTookTooMuchError, ExchangeMisusedError."""
    said = -1
    begun = False
    while guest.running():
        if not begun:
            begun = guest.has_begun()
        seconds = int(guest.seconds)
        if not begun and seconds > said:
            said = seconds
            say_booting(what, seconds)
        guest.check_allowance()
        time.sleep(POLL_S)
    if not begun and sys.stderr.isatty():
        sys.stderr.write("\n")


def say_booting(what: str, seconds: int) -> None:
    """On a terminal one line that counts; elsewhere one line in all."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\rbooting {what} ({seconds} s)")
    elif seconds == 0:
        sys.stderr.write(f"booting {what}\n")
    sys.stderr.flush()
