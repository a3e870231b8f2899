"""A process with keys leaves no picture of its memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

ASKED = """
import ctypes, resource
from agent.host_os.private_memory import keep_memory_private
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


VERB = """
import ctypes, sys
from agent.cli.main import main
sys.argv = ["g35", *sys.argv[1:]]
try:
    main()
finally:
    print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "verb", [("tenant", "rotate"), ("tenant", "add"), ("pool", "add"), ("pool", "format")]
)
def test_verbs_that_hold_the_root_key_leave_none_either(verb: tuple[str, str]) -> None:
    """A rotation that is waited for has it in its memory for minutes."""
    done = subprocess.run(
        [sys.executable, "-c", VERB, *verb, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "0\n")
