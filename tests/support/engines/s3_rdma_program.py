"""A client to be killed: `python -m tests.support.engines.s3_rdma_program PORT ADDRESS PATH`.

It gets an object again and again.
"""

from __future__ import annotations

import sys

from agent.bench.s3_rdma_client import S3RdmaClient
from tests.support.engines.s3_served import EMULATED, KEY


def main() -> None:
    port, address, path = sys.argv[1:]
    with S3RdmaClient("127.0.0.1", int(port), KEY, EMULATED, address) as client:
        client.connect()
        region = client.register(memoryview(bytearray(3 << 20)))
        client.get(path, region)
        print("second round", flush=True)
        while True:
            client.get(path, region)


if __name__ == "__main__":
    main()
