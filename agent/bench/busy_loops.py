"""Busy loops beside what is measured: `python -m agent.bench.busy_loops` is one, and ends with its parent."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from agent.host_os.parent_death import die_with_parent

LOOPS_MAX: Final = 64


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that take all the processor time that Linux gives them, for as long as the block runs."""
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            loops.append(subprocess.Popen([sys.executable, "-P", "-m", "agent.bench.busy_loops"]))
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def main() -> None:
    die_with_parent()
    while True:
        pass


if __name__ == "__main__":
    main()
