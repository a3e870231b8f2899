"""The mount behind fuse_memory_*: `python -m agent.bench.memory_mount MOUNT BYTES LONG-BYTES READY-FILE`.

Our /dev/fuse door over one file in memory: the cost of door, kernel and one copy, without fabric and cipher.
"""

import signal
import sys
import threading
from pathlib import Path

from agent.bench.contents import Contents
from agent.bench.one_file import OneFile
from agent.fs.doors.make_door import make_door
from agent.pool.steps import NoRunner

WORKERS = 4


def main() -> None:
    mount, size, long_bytes, ready = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    files = OneFile(Contents(size).value(0), long_bytes)
    door = make_door("dev_fuse", files, mount, WORKERS, lambda _number: NoRunner())
    door.start()
    try:
        ready.write_text("ready\n")
        while not stop.is_set() and not door.wait(timeout=0.2):
            pass
    finally:
        door.stop()


if __name__ == "__main__":
    main()
