"""The bench's end of a `pool_client`: starts it, asks, and books what it did with its pool."""

import contextlib
import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.bench.redis_site import NotHere
from agent.bench.rounds import GIBIBYTE, Sample, Timed, rate
from agent.errors import G35Error

END_SECONDS = 15.0


class LineClient:
    """A process that does what lines of JSON ask for. It ends with its standard input, so also when the
    bench is killed."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self._name = name
        self._log = log
        with open(log, "ab") as words:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True
            )
        try:
            self.heard()
        except (G35Error, NotHere):
            self.stop()
            raise

    def ask(self, verb: str, seconds: float = 0.0, **further: object) -> dict[str, Any]:
        """Have one thing done; G35Error where it failed or the client is gone."""
        self.tell(verb, seconds, **further)
        return self.heard()

    def tell(self, verb: str, seconds: float = 0.0, **further: object) -> None:
        """As `ask`, and `heard` is what comes of it: several clients work at once."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # where it is gone, its silence says so as well
            self._process.stdin.write(json.dumps({"do": verb, "seconds": seconds, **further}) + "\n")
            self._process.stdin.flush()

    def stop(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def heard(self) -> dict[str, Any]:
        """The answer to what it was told first of what it has not answered yet."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            words = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise G35Error(f"{self._name} ended: {' '.join(words) or 'it said nothing'}")
        answer: dict[str, Any] = json.loads(line)
        if "not_here" in answer:
            raise NotHere(answer["not_here"])
        if "error" in answer:
            raise G35Error(f"{self._name}: {answer['error']}")
        return answer


def speed(answer: dict[str, Any]) -> Sample:
    """GiB/s out of an answer."""
    timed = (answer["operations"], answer["bytes"], answer["seconds"])
    return rate(Timed(*timed, tuple(answer.get("latencies", ()))))


def cost(answer: dict[str, Any]) -> Sample:
    """CPU seconds of the client for each GiB, out of an answer."""
    moved = answer["bytes"]
    return replace(speed(answer), value=answer["cpu_seconds"] * GIBIBYTE / moved if moved else 0.0)
