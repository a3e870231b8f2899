"""A process that gives its memory to Mooncake Store: `python -m ... MASTER-PORT BYTES READY-FILE`.

It does nothing else, until it is ended.
"""

import signal
import sys
from pathlib import Path


def main() -> None:
    from mooncake.store import MooncakeDistributedStore

    master, size, ready = f"127.0.0.1:{sys.argv[1]}", int(sys.argv[2]), Path(sys.argv[3])
    store = MooncakeDistributedStore()
    failed = store.setup("127.0.0.1", "P2PHANDSHAKE", size, 16 << 20, "tcp", "", master)
    if failed:
        sys.exit(f"error: Mooncake's provider does not start: {failed}")
    ready.touch()
    signal.pause()


if __name__ == "__main__":
    main()
