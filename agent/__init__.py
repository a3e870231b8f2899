"""The DPU program: it pools enclosures, seals and checks blocks, and serves the GPU host's mount."""

import signal
import sys

# `g35` takes up to a second to load. Until its verb runs (agent/cli/main.py), Ctrl-C has the kernel end it:
# a KeyboardInterrupt amid an import prints a traceback, or a library swallows it and the verb goes on.
# These are the first lines of ours that run. A program that only imports us keeps its own way with signals;
# so does one that was started to ignore Ctrl-C.
_as_module = sys.argv[:1] == ["-m"] and "agent.cli" in sys.orig_argv
_as_script = "".join(sys.argv[:1]).endswith("/g35")
if (_as_module or _as_script) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import nvmeof  # noqa: E402, F401  (it decides whether the hot modules are compiled ones, before any is imported)
