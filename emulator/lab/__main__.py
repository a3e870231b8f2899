"""`python -m emulator.lab` is `g35 lab`."""

import sys

try:
    from emulator.command_line import run_program
    from emulator.lab.cli import app
except KeyboardInterrupt:  # Ctrl-C while Python is still loading
    sys.exit(130)
except (ImportError, MemoryError, OSError) as failure:
    sys.exit(f"error: g35 lab cannot be loaded: {failure}\nhint: is there a limit (ulimit -v, ulimit -n)?")

if __name__ == "__main__":
    run_program(app, "g35 lab")
