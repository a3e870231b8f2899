"""`python -m emulator.lab` is `g35 lab`."""

from __future__ import annotations

import sys

try:
    from emulator.lab.cli import app
except KeyboardInterrupt:  # Ctrl-C while Python is still loading
    sys.exit(130)

if __name__ == "__main__":
    app(prog_name="g35 lab")
