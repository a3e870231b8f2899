"""Run by NIXL's interpreter: its POSIX plug-in moves blocks to files on a mount, in each of its queue modes.

Argument: the folder. The modes are the plug-in's parameters, and what it chooses without any.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import sys
import time
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

BLOCK_BYTES = 256 << 10
BLOCKS = 24
PATIENCE_SECONDS = 30.0
MODES = ("use_aio", "use_uring", "use_posix_aio")
IO_URING_SETUP = 425


def has_uring() -> bool:
    """Many containers forbid it, and so may a machine (kernel.io_uring_disabled)."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Where it is there, it finds fault with the address.
    return libc.syscall(IO_URING_SETUP, 1, None) == -1 and ctypes.get_errno() == errno.EFAULT


def transfer(agent: Any, operation: str, memory: list[tuple[int, ...]], files: list[tuple[int, ...]]) -> None:
    local = agent.get_xfer_descs(memory, "DRAM")
    remote = agent.get_xfer_descs(files, "FILE")
    handle = agent.initialize_xfer(operation, local, remote, agent.name, backends=["POSIX"])
    state = agent.transfer(handle)
    until = time.monotonic() + PATIENCE_SECONDS
    while state == "PROC" and time.monotonic() < until:
        state = agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)
    if state != "DONE":
        raise SystemExit(f"{operation} ended as {state}")


def round_trip(folder: str, mode: str) -> None:
    agent = nixl_agent(f"g35-{mode}", nixl_agent_config(backends=[]))
    chosen = {each: "true" if each == mode else "false" for each in MODES}
    agent.create_backend("POSIX", chosen if mode in MODES else {})
    blocks = np.frombuffer(bytearray(random.Random(5).randbytes(BLOCKS * BLOCK_BYTES)), np.uint8)
    back = np.zeros_like(blocks)
    descriptor = os.open(f"{folder}/{mode}.bin", os.O_RDWR | os.O_CREAT, 0o600)
    order = list(range(BLOCKS))
    random.Random(6).shuffle(order)
    file_regions = [(place * BLOCK_BYTES, BLOCK_BYTES, descriptor) for place in order]
    registered = [
        agent.register_memory([(each.ctypes.data, each.nbytes, 0, "")], "DRAM", ["POSIX"])
        for each in (blocks, back)
    ]
    registered.append(agent.register_memory([(0, blocks.nbytes, descriptor, "")], "FILE", ["POSIX"]))
    for operation, memory in (("WRITE", blocks), ("READ", back)):
        regions = [(memory.ctypes.data + at * BLOCK_BYTES, BLOCK_BYTES, 0) for at in range(BLOCKS)]
        transfer(agent, operation, regions, file_regions)
    if not np.array_equal(blocks, back):
        raise SystemExit("what came back is not what was written")
    with open(f"{folder}/{mode}.bin", "rb") as file:
        content = file.read()
    for at, place in enumerate(order):
        part = content[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]
        if part != blocks[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES].tobytes():
            raise SystemExit(f"block {at} does not lie where it was written to")
    for each in registered:
        agent.deregister_memory(each)
    os.close(descriptor)
    print(f"{mode}: {BLOCKS} blocks of {BLOCK_BYTES} bytes written and read back")


def main() -> None:
    for mode in ("default", *MODES):
        if mode == "use_uring" and not has_uring():
            print("use_uring: no io_uring")
            continue
        round_trip(sys.argv[1], mode)
    print("all steps done")


if __name__ == "__main__":
    main()
