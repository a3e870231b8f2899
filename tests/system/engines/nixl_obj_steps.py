"""Run by NIXL's interpreter: its OBJ plug-in moves blocks to objects behind the S3 door, and asks for some.

Arguments: address and port of the door, its bucket, the file of the access key.
"""

from __future__ import annotations

import configparser
import random
import sys
import time
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

BLOCK_BYTES = 1 << 20
BLOCKS = 8
PATIENCE_SECONDS = 30.0


def transfer(agent: Any, operation: str, memory: Any, names: list[str]) -> None:
    registered = [
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM", ["OBJ"]),
        agent.register_memory(
            [(0, BLOCK_BYTES, number, name) for number, name in enumerate(names)], "OBJ", ["OBJ"]
        ),
    ]
    local = agent.get_xfer_descs(
        [(memory.ctypes.data + at * BLOCK_BYTES, BLOCK_BYTES, 0) for at in range(len(names))], "DRAM"
    )
    remote = registered[1].trim()
    handle = agent.initialize_xfer(operation, local, remote, agent.name, backends=["OBJ"])
    state = agent.transfer(handle)
    until = time.monotonic() + PATIENCE_SECONDS
    while state == "PROC" and time.monotonic() < until:
        state = agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)
    for each in registered:
        agent.deregister_memory(each)
    if state != "DONE":
        raise SystemExit(f"{operation} ended as {state}")


def main() -> None:
    where, bucket, file = sys.argv[1:]
    keys = configparser.ConfigParser()
    keys.read(file)
    agent = nixl_agent("g35", nixl_agent_config(backends=[]))
    agent.create_backend(
        "OBJ",
        {
            "access_key": keys["default"]["aws_access_key_id"],
            "secret_key": keys["default"]["aws_secret_access_key"],
            "bucket": bucket,
            "endpoint_override": where,
            "scheme": "http",
            "region": "us-east-1",
            "use_virtual_addressing": "false",
        },
    )
    blocks = np.frombuffer(bytearray(random.Random(5).randbytes(BLOCKS * BLOCK_BYTES)), np.uint8)
    back = np.zeros_like(blocks)
    names = [f"{number:032x}" for number in range(BLOCKS)]
    transfer(agent, "WRITE", blocks, names)
    transfer(agent, "READ", back, names)
    if not np.array_equal(blocks, back):
        raise SystemExit("what came back is not what was written")
    asked = [(0, 0, 0, names[0]), (0, 0, 0, "never-stored")]
    found = agent.query_memory(asked, "OBJ", mem_type="OBJ")
    if found[0] is None or found[1] is not None:
        raise SystemExit(f"asked what is there, it said {found}")
    print("the same")


main()
