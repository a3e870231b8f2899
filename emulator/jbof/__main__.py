"""`python -m emulator.jbof`: see cli.py."""

import sys

try:
    from emulator.jbof.cli import main
except KeyboardInterrupt:  # Ctrl-C while Python is still loading
    sys.exit(130)
except (ImportError, MemoryError, OSError) as failure:
    sys.exit(f"error: g35 jbof cannot be loaded: {failure}\nhint: is there a limit (ulimit -v, ulimit -n)?")

if __name__ == "__main__":
    main()
