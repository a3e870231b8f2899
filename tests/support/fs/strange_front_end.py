"""A program that hands descriptors of a FUSE mount of its own to a device, and the end of it that tests hold.

It is a process of its own because whoever forks while it has such a file open closes a copy of it.

    python -m tests.support.fs.strange_front_end MOUNTPOINT
    a line of JSON in: {"do": "hold" | "refuse", "operations": [...]}, {"do": "let_go"},
        {"do": "send", "socket": path, "data": hex, "count": descriptors, "wait": whether for its end}
    a line out: what the device has answered, in hex
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from agent.fs.fuse.abi import Opcode
from tests.support.fs.hanging_files import HangingFiles

REPOSITORY = Path(__file__).resolve().parents[3]
PATIENCE_SECONDS = 60.0


class StrangeFrontEnd:
    """The program, for as long as a `with` block lasts."""

    def __init__(self, mountpoint: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fs.strange_front_end", str(mountpoint)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == '"ready"\n'

    def hold(self, *operations: Opcode) -> None:
        self._ask(do="hold", operations=operations)

    def refuse(self, *operations: Opcode) -> None:
        self._ask(do="refuse", operations=operations)

    def let_go(self) -> None:
        self._ask(do="let_go")

    def send(self, path: Path, data: bytes, count: int = 1, *, wait: bool = True) -> bytes:
        """Hand it over and hang up; what the device answers before it does."""
        return bytes.fromhex(self._ask(do="send", socket=str(path), data=data.hex(), count=count, wait=wait))

    def _ask(self, **words: Any) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return str(json.loads(self._process.stdout.readline()))

    def __enter__(self) -> StrangeFrontEnd:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(PATIENCE_SECONDS)


def connect_when_heard(asking: socket.socket, path: str) -> None:
    """connect(2), again where the listener's backlog is full: a socket with a time-out gets EAGAIN then."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return asking.connect(path)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def _sent(words: dict[str, Any], descriptor: int) -> str:
    with socket.socket(socket.AF_UNIX) as asking, contextlib.suppress(ConnectionError):
        asking.settimeout(PATIENCE_SECONDS)
        found = b""
        if words["wait"]:
            connect_when_heard(asking, words["socket"])
        else:
            try:
                asking.connect(words["socket"])
            except BlockingIOError:
                return ""  # as many wait there as may: who is not heard is turned away, too
        with contextlib.suppress(ConnectionError):
            socket.send_fds(asking, [bytes.fromhex(words["data"])], [descriptor] * words["count"])
            asking.shutdown(socket.SHUT_WR)
            while words["wait"] and (piece := asking.recv(4096)):
                found += piece
        return found.hex()
    return ""


def _main(mountpoint: Path) -> None:
    with HangingFiles(mountpoint) as files:
        descriptor = os.open(files.path, os.O_RDWR)
        print('"ready"', flush=True)
        for line in sys.stdin:
            words = json.loads(line)
            answer = ""
            match words["do"]:
                case "hold":
                    files.hold([Opcode(each) for each in words["operations"]])
                case "refuse":
                    files.refuse([Opcode(each) for each in words["operations"]])
                case "let_go":
                    files.let_go()
                case "send":
                    answer = _sent(words, descriptor)
            print(json.dumps(answer), flush=True)
        files.let_go()
        with contextlib.suppress(OSError):
            os.close(descriptor)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
