"""The pool under an engine, for scripts that the engine's interpreter runs: standard library alone.

A script gets the state folder of a running `g35 up`, kills parts of the pool and waits until `g35 up` has
started them again.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.support.waiting import wait_until

FAULTS: tuple[tuple[str, ...], ...] = (("agent-process",), ("jbof-0", "jbof-1"))
"""What dies together: the agent with its mount, all enclosures."""


class EnginePool:
    def __init__(self, state: str) -> None:
        self.state = Path(state)
        self.mount = self.state / "mnt"

    def folders(self) -> list[Path]:
        """Where an engine may keep files: /fs, and each volume of /shared."""
        return [self.mount / "fs", *sorted((self.mount / "shared").glob("*"))]

    def kill(self, names: tuple[str, ...]) -> dict[str, int]:
        """End processes of the pool, as a crash would; their old numbers."""
        old = {name: int((self.state / f"{name}.pid").read_text()) for name in names}
        for number in old.values():
            os.kill(number, signal.SIGKILL)
        return old

    def wait_back(self, old: dict[str, int]) -> None:
        """Until what was killed runs again and the agent has its enclosures."""
        for name, number in old.items():
            wait_until(lambda n=name, o=number: self._pid(n) not in (o, 0), 30, f"{name} to be started again")
        wait_until(self.is_connected, 30, "the enclosures to be connected")

    def survives(self, look: Callable[[], list[bool | None]], recover: Callable[[], bool]) -> None:
        """Kill parts of the pool: `look` finds no wrong block meanwhile, and at last `recover` is true.

        `look` loads blocks and says for each: True right, None a miss, False wrong.
        """
        for fault in FAULTS:
            old = self.kill(fault)
            for _ in range(5):
                found = look()
                assert False not in found, f"a wrong block while {fault} was dead: {found}"
            self.wait_back(old)
            wait_until(recover, 30, f"the engine to have its blocks again after {fault}")

    def _pid(self, name: str) -> int:
        try:
            return int((self.state / f"{name}.pid").read_text())
        except (OSError, ValueError):
            return 0

    def is_connected(self) -> bool:
        """Whether the agent has all enclosures."""
        try:
            status = json.loads((self.mount / ".g35/status.json").read_text())
        except (OSError, ValueError):
            return False
        return all(each["connected"] for each in status["enclosures"])
