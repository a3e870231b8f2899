"""The test's end of a conversation with a whole engine, which runs in an environment of its own."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.engines.engine_door import READY
from tests.support.engines.engine_environments import REPOSITORY, engine_python
from tests.support.processes import Processes

START_SECONDS = 300.0
"""An engine imports torch and compiles what it likes, on two busy cores."""
ANSWER_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine said to one prompt."""

    tokens: tuple[int, ...]
    """Generated, greedily."""
    prompt: int
    """Tokens of the prompt."""
    cached: int
    """Tokens of the prompt that it did not compute."""
    first_s: float
    """Seconds from the prompt to the first token."""
    processor_s: float
    """Seconds of processors that the engine's process took for the whole answer, on all its threads."""
    digest: str = ""
    """Of the logits of all steps, where the engine shows them."""
    groups: int = 1
    """Groups of layers whose blocks the engine keeps apart."""

    @property
    def said(self) -> tuple[tuple[int, ...], str]:
        """What has to be the same however it came about."""
        return self.tokens, self.digest


class WholeEngine:
    """One engine's process, from its start to `end`."""

    def __init__(self, processes: Processes, engine: str, script: Path, folder: Path, **options: Any) -> None:
        """`folder`: where the socket lies. Skips the test where the engine is not installed."""
        python = engine_python(engine)
        door = folder / f"{engine}.sock"
        door.unlink(missing_ok=True)
        self._started = processes.start(
            [python, script, door, json.dumps(options)],
            environment={
                "PYTHONPATH": str(REPOSITORY),
                "PYTHONDONTWRITEBYTECODE": "1",
                "HF_HUB_OFFLINE": "1",
                "HOME": os.environ.get("HOME", str(folder)),
            },
        )
        self._started.wait_for_line(READY, START_SECONDS)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(ANSWER_SECONDS)
        self._socket.connect(str(door))
        self._file = self._socket.makefile("rwb")

    def ask(self, *prompts: int) -> list[Answer]:
        """One prompt after the other."""
        return [self._ask(prompt) for prompt in prompts]

    def _ask(self, prompt: int) -> Answer:
        self._file.write(b"%d\n" % prompt)
        self._file.flush()
        line = self._file.readline()
        assert line, f"the engine ended:\n{self.output[-4000:]}"
        found = json.loads(line)
        return Answer(**(found | {"tokens": tuple(found["tokens"])}))

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._started.output

    def __enter__(self) -> WholeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def end(self) -> None:
        """Hang up, and wait for its end."""
        self.__exit__()
        status = self._started.process.wait(ANSWER_SECONDS)
        assert status == 0, f"the engine ended with {status}:\n{self.output[-4000:]}"
