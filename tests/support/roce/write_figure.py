"""One of two processes that measure RDMA WRITE over any package with pyverbs' names.

    python -m tests.support.roce.write_figure PACKAGE DEVICE ADDRESS FOLDER active|passive

The two meet in a folder, where each leaves a file with what the other has to know. The active one writes
messages of 64 KiB for `SECONDS`, a few at a time, and leaves the bytes per second in `figure`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from emulator.roce.runtime.registry import add_device
from tests.support.roce.verbs_end import VerbsEnd
from tests.support.waiting import wait_until

MESSAGE: Final = 64 << 10
AT_ONCE: Final = 4
SECONDS: Final = 2.0
PATIENCE_S: Final = 60.0
FIRST_PSN: Final = 1


def leave(folder: Path, name: str, content: Any) -> None:
    unfinished = folder / f"{name}.unfinished"
    unfinished.write_text(json.dumps(content))
    unfinished.rename(folder / name)


def find(folder: Path, name: str) -> Any:
    wait_until((folder / name).exists, PATIENCE_S, name)
    return json.loads((folder / name).read_text())


def measure(end: VerbsEnd, key: int, address: int) -> float:
    """Bytes per second, acknowledged."""
    write = end.e.IBV_WR_RDMA_WRITE
    started = time.perf_counter()
    posted = done = 0
    while True:
        over = time.perf_counter() - started > SECONDS
        while not over and posted - done < AT_ONCE:
            slot = posted % AT_ONCE * MESSAGE
            end.post(write, slot, MESSAGE, remote=(key, address + slot))
            posted += 1
        completion = end.poll()
        if completion is not None:
            assert completion.status == 0, completion.status
            done += 1
        elif over and done == posted:
            return done * MESSAGE / (time.perf_counter() - started)


def main() -> None:
    package, device, address, folder_name, role = sys.argv[1:]
    folder = Path(folder_name)
    if package.startswith("emulator"):
        add_device(device, address)
    other = "passive" if role == "active" else "active"
    with VerbsEnd(package, device, address, AT_ONCE * MESSAGE) as end:
        leave(
            folder,
            role,
            {"gid": end.gid, "qp": end.pair.qp_num, "key": end.memory.rkey, "buf": end.memory.buf},
        )
        peer = find(folder, other)
        end.connect(
            SimpleNamespace(gid=peer["gid"], pair=SimpleNamespace(qp_num=peer["qp"])),
            path_mtu=end.e.IBV_MTU_4096,
            first_psn=FIRST_PSN,
            expected_psn=FIRST_PSN,
        )
        if role == "passive":
            leave(folder, "connected", True)
            find(folder, "figure")
            return
        find(folder, "connected")
        leave(folder, "figure", measure(end, peer["key"], peer["buf"]))


if __name__ == "__main__":
    main()
