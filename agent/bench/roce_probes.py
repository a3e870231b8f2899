"""The emulated RDMA NIC alone, as its own benchmark measures it: `python -m emulator.roce.bench`.

It runs as a program because the agent knows nothing of the emulator, and because it wants two processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from agent.bench.rounds import Sample
from agent.errors import G35Error

SECONDS_MIN = 0.5
"""Two processes and a connection are set up each time; less would measure little else."""


class RoceProbe:
    """One record of the emulator's benchmark, by its name."""

    def __init__(self, name: str, unit: str) -> None:
        self._name, self._unit = name, unit

    def prepare(self) -> None:
        """Nothing: the program starts what it needs, and compares contents, in every round."""

    def round(self, seconds: float) -> Sample:
        command = [sys.executable, "-P", "-m", "emulator.roce.bench"]
        command += ["--seconds", str(max(seconds, SECONDS_MIN)), self._name]
        began = time.perf_counter()
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        took = time.perf_counter() - began
        try:
            record = json.loads(ran.stdout)
            value, unit = float(record["value"]), record["unit"]
        except (ValueError, KeyError, TypeError):
            raise G35Error(f"{self._name} was not measured: {ran.stderr.strip() or ran.stdout!r}") from None
        if unit != self._unit:
            raise G35Error(f"{self._name} came in {unit}, not in {self._unit}")
        return Sample(value, 1, 0, took)
