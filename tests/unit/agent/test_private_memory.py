"""A process with keys leaves no picture of its memory."""

from __future__ import annotations

import subprocess
import sys

ASKED = """
import ctypes, resource
from agent.private_memory import keep_memory_private
libc = ctypes.CDLL(None)
assert libc.prctl(3, 0, 0, 0, 0) == 1
keep_memory_private()
print(libc.prctl(3, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CORE)[0])
"""


def test_no_core_and_nothing_to_trace() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.stdout, done.stderr) == ("0 0\n", "")
