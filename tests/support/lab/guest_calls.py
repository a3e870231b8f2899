"""Calling functions inside a guest from a test outside, one guest for many tests.

The guest runs `python -m tests.support.lab.guest_calls MODULE`; outside, `GuestCalls(exchange, running)`
calls functions of that module by name. Arguments and results are JSON and travel as files in the folder that
both see. Each call has its own thread in the guest, so a test can let one run and do something meanwhile.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emulator.lab.errors import last_lines
from emulator.lab.machine import EXCHANGE_IN_GUEST
from tests.support.waiting import wait_until

LEAVE = "leave"
POLL_S = 0.02
CALL_S = 600.0
"""For one call, emulated and beside other work."""


class GuestCalls:
    """Outside: calls into the guest whose exchange folder this is, for as long as it is `running`."""

    def __init__(self, exchange: Path, running: Callable[[], bool]) -> None:
        self.exchange = exchange
        self._running = running
        self._count = 0

    def __call__(self, function: str, **arguments: Any) -> Any:
        """Call it and wait for its result. A failure in there is an AssertionError with its traceback."""
        return self.begin(function, **arguments)()

    def begin(self, function: str, **arguments: Any) -> Callable[[], Any]:
        """Call it; what is returned waits for the result when called."""
        self._count += 1
        answer = self.exchange / f"{self._count}.answer"
        request = self.exchange / f"{self._count}.part"
        request.write_text(json.dumps([function, arguments]))
        request.rename(self.exchange / f"{self._count}.call")

        def result() -> Any:
            try:
                wait_until(lambda: answer.exists() or not self._running(), CALL_S, f"{function} to return")
                assert answer.exists(), "the guest has ended"
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self._words()}") from None
            found = json.loads(answer.read_text())
            if "failure" in found:
                raise AssertionError(f"{function} in the guest:\n{found['failure']}")
            return found["result"]

        return result

    def leave(self, status: int) -> None:
        """End the program in the guest, with this exit status."""
        self.begin(LEAVE, status=status)

    def _words(self) -> str:
        words = []
        for file in (self.exchange / "output", self.exchange.parent / "console"):
            said = file.read_text(errors="replace") if file.exists() else ""
            words.append(f"--- the guest's {file.name} ---\n{last_lines(said)}")
        return "\n".join(words)


def serve(module: str) -> int:
    """Inside: answer calls until one says to leave; the exit status."""
    functions = importlib.import_module(module)
    number = 0
    while True:
        request = EXCHANGE_IN_GUEST / f"{number + 1}.call"
        if not request.exists():
            time.sleep(POLL_S)
            continue
        number += 1
        function, arguments = json.loads(request.read_text())
        if function == LEAVE:
            return int(arguments["status"])
        threading.Thread(target=_answer, args=(number, getattr(functions, function), arguments)).start()


def _answer(number: int, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    try:
        said = json.dumps({"result": function(**arguments)})
    except BaseException:
        said = json.dumps({"failure": traceback.format_exc()})
    part = EXCHANGE_IN_GUEST / f"{number}.answer-part"
    part.write_text(said)
    part.rename(EXCHANGE_IN_GUEST / f"{number}.answer")


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
