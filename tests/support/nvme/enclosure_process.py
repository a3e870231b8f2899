"""An enclosure in a process of its own.

    with EnclosureProcess.start(["--drives", "4", "--drive-size", "1G"], folder) as enclosure:
        enclosure.ready["port"], enclosure.ready["nqn"]
        enclosure.ask("slow", drive=0, latency_ms=200)
        enclosure.ask("stats")["drives"][0]["write_bytes"]

A process of its own has an interpreter lock of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from emulator.jbof.control_client import ask
from emulator.jbof.enclosure import EnclosureError

START_S: Final = 60.0
STOP_S: Final = 30.0
_POLL_S: Final = 0.01


class EnclosureProcess:
    """A running enclosure. `ready` is its ready line (address, port, nqn, namespaces, control)."""

    def __init__(self, process: subprocess.Popen[bytes], control: Path, ready: dict[str, Any]) -> None:
        self.process = process
        self.control = control
        self.ready = ready

    @classmethod
    def start(
        cls, arguments: Sequence[str], folder: Path, *, name: str = "jbof", timeout_s: float = START_S
    ) -> EnclosureProcess:
        """Start `python -m emulator.jbof` with `arguments`, its sockets and its log in `folder`.

        Returns when it serves. EnclosureError, with the end of its log, if it does not within `timeout_s`.
        """
        control = folder / f"{name}.sock"
        ready_file = folder / f"{name}.ready"
        log = folder / f"{name}.log"
        ready_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "emulator.jbof", "--name", name]
        command += ["--control", str(control), "--ready-file", str(ready_file), *arguments]
        with open(log, "ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + timeout_s
        while not ready_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                tail = log.read_text(errors="replace")[-2000:]
                raise EnclosureError(f"the enclosure {name} did not start:\n{tail}")
            time.sleep(_POLL_S)
        return cls(process, control, json.loads(ready_file.read_text()))

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """A request to its control socket; ControlError if it is refused."""
        return ask(self.control, verb, **fields)

    def kill(self) -> None:
        """SIGKILL, as a crash; returns when it is gone."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Ask it to end and wait; kills it if it does not. The exit status. Idempotent."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.returncode

    def __enter__(self) -> EnclosureProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
