"""A process with keys leaves no picture of its memory."""

from __future__ import annotations

import subprocess
import sys

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
libc = ctypes.CDLL(None)
for verb in sys.argv[1:]:
    libc.prctl(4, 1, 0, 0, 0)
    assert libc.prctl(3, 0, 0, 0, 0) == 1
    sys.argv = ["g35", *verb.split(), "--help"]
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code
    print(verb, code, libc.prctl(3, 0, 0, 0, 0), file=sys.stderr)
"""


def test_verbs_that_hold_the_root_key_leave_none_either() -> None:
    """A rotation that is waited for has it in its memory for minutes."""
    verbs = ("tenant rotate", "tenant add", "pool add", "pool format")
    done = subprocess.run(
        [sys.executable, "-c", VERB, *verbs], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "".join(f"{verb} 0 0\n" for verb in verbs))
