"""Bytecode of everything that the tests' processes import, made once and before them.

A test run starts about a thousand programs. Where PYTHONDONTWRITEBYTECODE is set, as in many a container,
each would compile all that it imports again, which is a good third of its start. And a guest of the lab,
which only reads this checkout, compiles ten times slower than we.
"""

from __future__ import annotations

import compileall
from pathlib import Path

CHECKOUT = Path(__file__).parents[3]
ROOMS = ("agent", "emulator", "host_shim", "nvmeof", "tests/support")


def compile_all() -> None:
    """What is up to date already costs a look at it. What cannot be written is left to who imports it."""
    for room in ROOMS:
        compileall.compile_dir(CHECKOUT / room, quiet=2)
