"""`python -m emulator.jbof`: see cli.py."""

import sys

try:
    from emulator.jbof.cli import main
except KeyboardInterrupt:  # Ctrl-C while Python is still loading
    sys.exit(130)

if __name__ == "__main__":
    main()
