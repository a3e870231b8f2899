"""`python -m emulator.lab` is `g35 lab`."""

from __future__ import annotations

from emulator.lab.cli import app

if __name__ == "__main__":
    app(prog_name="g35 lab")
