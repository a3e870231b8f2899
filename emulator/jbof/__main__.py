"""`python -m emulator.jbof`: see cli.py."""

from emulator.jbof.cli import main

if __name__ == "__main__":
    main()
