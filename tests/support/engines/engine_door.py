"""The engine's end of a conversation with a test: prompts by number, answers by line. Standard library alone.

An engine's interpreter runs a script that ends in `serve`. The test holds the other end (whole_engine.py):
it sends one line of JSON for each prompt, gets one back, and breaks the pool meanwhile.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

READY = "the engine is ready"
WORDS = 512
"""Of a model's vocabulary; prompts draw from these."""


def prompt_tokens(prompt: int, count: int) -> list[int]:
    """The tokens of prompt number `prompt`: random, and the same in each process."""
    dice = random.Random(prompt)
    return [dice.randrange(3, WORDS) for _ in range(count)]


def options() -> dict[str, Any]:
    """What the test handed to the script."""
    found: dict[str, Any] = json.loads(sys.argv[2])
    return found


def serve(answer: Callable[[int], dict[str, Any]]) -> None:
    """Answer prompts until the test hangs up. The socket's path is the script's first argument."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(sys.argv[1])
        door.listen(1)
        print(READY, flush=True)
        line, _ = door.accept()
    with line, line.makefile("rwb") as file:
        for request in file:
            before = time.process_time()
            found = answer(int(request))
            found["processor_s"] = time.process_time() - before
            print(
                f"prompt {int(request)}: {found['cached']} cached, first token after {found['first_s']:.3f} s"
            )
            file.write(json.dumps(found).encode() + b"\n")
            file.flush()


def end() -> None:
    """End the process at once: an engine's own threads may hold up an ordinary end for minutes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
