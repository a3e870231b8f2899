"""A client of the S3 door that gets objects by RDMA: `python -m agent.bench.s3_rdma_load` and what follows.

Its arguments, and what it is asked, are those of agent/bench/s3_client.py.
"""

import sys
from pathlib import Path
from typing import Final

from agent.bench.contents import pages
from agent.bench.pool_client import answer_lines
from agent.bench.s3_client import VALUE_BYTES, Gets
from agent.bench.s3_rdma_client import S3RdmaClient
from agent.s3.credentials import read_credentials_file
from nvmeof.transport.verbs_provider import free_loopback_address

PROVIDER: Final = "emulator.roce.pyverbs"


class Objects:
    """The objects of a bucket, each got into the same memory. The client compares checksums."""

    def __init__(self, client: S3RdmaClient, bucket: str) -> None:
        self._client, self._bucket = client, bucket
        client.connect()
        self._region = client.register(pages(VALUE_BYTES))

    def get(self, name: str) -> memoryview:
        return self._region.view[: self._client.get(f"/{self._bucket}/{name}", self._region)]


def main() -> None:
    port, bucket, count = int(sys.argv[1]), sys.argv[3], int(sys.argv[4])
    [key] = read_credentials_file(Path(sys.argv[2]), "default")
    with S3RdmaClient("127.0.0.1", port, key, PROVIDER, free_loopback_address()) as client:
        answer_lines(Gets(Objects(client, bucket), count), "s3")


if __name__ == "__main__":
    main()
